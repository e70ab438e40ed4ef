"""Write by hand what JAX 0.11.2's Mosaic GPU does not offer on SM80.

Each entry ends with when it can go. This is the one file of the family that builds MLIR.
"""

from __future__ import annotations

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.addresses import as_scalar, if_traced, linear_index, pointer_to
from pallas_attn.kernels.explicit.registers import SCALAR, Layout, of_registers
from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils


def store_row_values(x, vector, batch, head, start, num_rows, layout):
    """Store a number a row, those of rows before `num_rows` alone.

    Args:
        x: [rows] float32, in `layout`.
        vector: [B, H, S] in global memory.
        batch, head, start: int32 scalars.
        num_rows: see `copy_rows`.
        layout: such as that of a sum's rows.
    """
    scalars = batch, head, start, *if_traced(num_rows)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *[SCALAR] * len(scalars)))
    def store(_, vector, x, batch, head, start, end=num_rows):
        f32 = ir.F32Type.get()
        i32 = ir.IntegerType.get_signless(32)
        base = pointer_to(vector, batch, head, start)
        left = None
        if end is not None:
            left = arith.subi(as_scalar(end), start.registers.item())

        def store_one(value, index):
            row = arith.index_cast(i32, index[0])
            pointer = mgpu_utils.getelementptr(base, [row], f32)
            if left is None:
                llvm.store(value, pointer)
            else:
                exists = arith.cmpi(arith.CmpIPredicate.slt, row, left)
                with mgpu.when(exists):
                    llvm.store(value, pointer)

        x.foreach(store_one)

    store(vector, x, *scalars)


def add_to_sums(x, sums, batch, head, start):
    """Add rows start .. of a product, two warps sharing rows, to float32 sums of one head.

    The sums lie in blocks of 16 rows and 8 columns, a block in the order in which a product's
    registers hold it (row half, column parity, 8 rows, 4 column pairs), so that the lanes of a warp
    add to 32 neighbours.

    Args:
        x: [rows, columns] float32.
        sums: [B, H, S, columns] in global memory.
        batch, head, start: int32 scalars; start is a multiple of 16.
    """
    rows, columns = x.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), Layout.MMA_ACC(np.dtype("bfloat16"), m_warps=2), *[SCALAR] * 3)
    )
    def add(_, sums, x, batch, head, first):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu.c(128, i32))
        warp, lane = (f(thread, mgpu.c(32, i32)) for f in (arith.divui, arith.remui))
        row_warp, column_warp = (f(warp, mgpu.c(2, i32)) for f in (arith.divui, arith.remui))
        offset = arith.addi(linear_index([row_warp, column_warp], [columns * 16, 128]), lane)
        base = mgpu_utils.getelementptr(pointer_to(sums, batch, head, first), [offset], f32)
        registers = x.registers.reshape(rows // 32, columns // 16, 2)
        for (i, j, half), pair in np.ndenumerate(registers):
            for parity in range(2):
                place = i * columns * 32 + j * 256 + half * 64 + parity * 32
                value = llvm.extractelement(pair, mgpu.c(parity, i32))
                text = f"red.relaxed.gpu.global.add.f32 [$0 + {4 * place}], $1;"
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"), [base, value], text, "l,f", has_side_effects=True
                )

    add(sums, x, batch, head, start)


# ---- Divide fast. Can go when `approx_math` divides with rcp.approx. -----------------------------


def reciprocal(x, layout):
    """Return 1 / x to one float32 ulp; x is float32, in `layout`."""

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout)
    )
    def approximate(_, x):
        def one(value):
            return llvm.inline_asm(ir.F32Type.get(), [value], "rcp.approx.ftz.f32 $0, $1;", "=f,f")

        return _map(one, x)

    return approximate(x)


def _map(function, x):
    """Apply a function to each element of an array in registers."""
    i32 = ir.IntegerType.get_signless(32)
    registers = np.empty_like(x.registers)
    for index, register in np.ndenumerate(x.registers):
        if isinstance(register.type, ir.VectorType):
            for i in range(register.type.shape[0]):
                place = mgpu.c(i, i32)
                value = function(llvm.extractelement(register, place))
                register = llvm.insertelement(register, value, place)
        else:
            register = function(register)
        registers[index] = register
    return of_registers(x, list(registers.flat))
