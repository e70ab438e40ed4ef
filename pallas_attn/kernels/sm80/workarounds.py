"""Write by hand what JAX 0.11.2's Mosaic GPU does not offer on SM80.

Each entry ends with when it can go. This is the one file of the family that builds MLIR.
"""

from __future__ import annotations

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.addresses import as_scalar, if_traced, pointer_to
from pallas_attn.kernels.explicit.registers import SCALAR, of_registers
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
