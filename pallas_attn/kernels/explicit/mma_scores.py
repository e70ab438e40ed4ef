"""Scores: from a product of mma.sync to the input of the softmax."""

import functools

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.registers import of_registers
from pallas_attn.kernels.library.scores import attention_mask
from pallas_attn.private import ir, llvm, mgpu
from twin_attention.targets.tanh import LIMIT, P, Q


def visible_scores(s, position, key, end, rule, window, masked, layout):
    """Compute `library.pairs.scores.pair_scores` of products; keys from `end` on are hidden."""
    if rule.scale_first:
        s = s * rule.scale
    dcap = 1.0
    if rule.softcap is not None:
        t = tanh(s * (1.0 / rule.softcap), layout)
        s = rule.softcap * t
        dcap = 1.0 - t * t
    if masked:
        s = attention_mask(s, position, key, end, window.left, window.right)
    return s, dcap


def tanh(x, layout):
    x = jnp.maximum(jnp.minimum(x, LIMIT), -LIMIT)
    x2 = x * x
    return x * _polynomial(P, x2) * reciprocal(_polynomial(Q, x2), layout)


def _polynomial(coefficients, x):
    return functools.reduce(lambda y, c: y * x + c, reversed(coefficients))


# Can go when `approx_math` divides with rcp.approx.
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
