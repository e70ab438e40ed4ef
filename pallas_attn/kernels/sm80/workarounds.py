"""Write by hand what JAX 0.11.2's Mosaic GPU does not offer on SM80.

Each entry ends with when it can go. This is the one file of the family that builds MLIR.
"""

from __future__ import annotations

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.registers import of_registers
from pallas_attn.private import ir, llvm, mgpu

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
