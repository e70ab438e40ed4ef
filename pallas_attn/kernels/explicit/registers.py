"""Numbers and tiles in registers; what JAX takes for a scalar may differ among threads."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils
from twin_attention.targets import ptx

Layout = plgpu.Layout
SCALAR = Layout.WG_SPLAT
NUMBER = plgpu.ShapeDtypeStruct((), np.dtype("int32"), SCALAR)
SUMS = Layout.MMA_ACC(np.dtype("bfloat16"))
ROWS = SUMS.reduce(1)
WARPS = 4
THREADS = 32 * WARPS


@plgpu.inline_mgpu(return_type=NUMBER)
def thread_index(_):
    return mgpu.FragmentedArray.splat(mgpu_utils.thread_idx(), (), is_signed=True)


def divide(x, y):
    """Return x / y of float32 numbers, rounded to nearest; `approx_math` divides faster."""

    @plgpu.inline_mgpu(
        arg_types=(SCALAR,) * 2, return_type=plgpu.ShapeDtypeStruct((), np.dtype("float32"), SCALAR)
    )
    def quotient(_, x, y):
        operands = [x.registers.item(), y.registers.item()]
        value = llvm.inline_asm(ir.F32Type.get(), operands, ptx.DIVIDE, ptx.DIVIDE_CONSTRAINTS)
        return mgpu.FragmentedArray.splat(value, ())

    return quotient(x, y)


def upcast_pairs(x, code):
    """Return one byte of each packed pair, int16, as float16, by `targets.ptx.Upcast`."""
    layout = Layout.MMA_RHS(np.dtype("int16"))

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, np.dtype("float16"), layout),
    )
    def convert(_, x):
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.F16Type.get())
        registers = np.empty_like(x.registers)
        for index, register in np.ndenumerate(x.registers):
            value = mgpu_utils.bitcast(register, i32)
            value = llvm.inline_asm(i32, [value], code, ptx.UPCAST_CONSTRAINTS)
            registers[index] = mgpu_utils.bitcast(value, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return convert(x)


def warp_and_lane():
    i32 = ir.IntegerType.get_signless(32)
    thread = mgpu_utils.thread_idx()
    return [f(thread, mgpu.c(32, i32)) for f in (arith.divui, arith.remui)]


def column_of_thread():
    """Return the first of a thread's two columns in a block of 8."""
    i32 = ir.IntegerType.get_signless(32)
    quad = arith.remui(mgpu_utils.thread_idx(), mgpu.c(4, i32))
    return arith.muli(quad, mgpu.c(2, i32))


def row_number(rows, tile, half):
    return scalar(rows.registers.reshape(-1, 2)[tile, half])


def place_of(row, total, group_size, head):
    """Return whether a row exists, and its token and query head, or those of the last row."""
    i32 = ir.IntegerType.get_signless(32)
    exists = arith.cmpi(arith.CmpIPredicate.slt, row, mgpu.c(total, i32))
    row = arith.minsi(row, mgpu.c(total - 1, i32))
    token, of_group = (f(row, mgpu.c(group_size, i32)) for f in (arith.divui, arith.remui))
    return exists, (token, arith.addi(head.registers.item(), of_group))


def of_registers(like, registers):
    """Return other float registers as an array of the layout and shape of `like`."""
    shaped = np.empty(like.registers.shape, object)
    shaped.flat = registers
    return mgpu.FragmentedArray(_registers=shaped, _layout=like.layout, _is_signed=None)


def scalar(register):
    if isinstance(register.type, ir.VectorType):
        return llvm.extractelement(register, mgpu.c(0, ir.IntegerType.get_signless(32)))
    return register


def as_register(value, like):
    if not isinstance(like.type, ir.VectorType):
        return value
    vector = llvm.mlir_undef(ir.VectorType.get((1,), value.type))
    return llvm.insertelement(vector, value, mgpu.c(0, ir.IntegerType.get_signless(32)))


def make_pair(low, high):
    i32 = ir.IntegerType.get_signless(32)
    pair = llvm.mlir_undef(ir.VectorType.get((2,), low.type))
    pair = llvm.insertelement(pair, low, mgpu.c(0, i32))
    return llvm.insertelement(pair, high, mgpu.c(1, i32))


def iota(shape, axis, layout):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def as_rows(x, like):
    return lax.broadcast_in_dim(x, like.shape, [0])


def as_columns(x, like, layout):
    return plgpu.layout_cast(lax.broadcast_in_dim(x, like.shape, [1]), layout)
