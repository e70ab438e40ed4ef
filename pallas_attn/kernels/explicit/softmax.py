"""The running softmax, in registers."""

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.registers import as_rows, of_registers
from pallas_attn.private import arith, ir, llvm, mgpu, scf

RESCALE_ABOVE = 8.0  # in base 2


def online_softmax_update(s, m_i, l_i, acc, exp2_scale, layout, masked=True):
    """Return p, and the running softmax with s: maxima, 8 sums a row, and rescaled tiles of acc."""
    m_new = s.max(axis=1) * exp2_scale
    m_new = jnp.where(m_new - m_i > RESCALE_ABOVE, m_new, m_i)
    m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new) if masked else m_new
    alpha = as_rows(jnp.exp2(m_i - m_safe), l_i)
    rescaled = [rescale(x, l_i, alpha, layout) for x in acc]
    p = jnp.exp2(s * exp2_scale - as_rows(m_safe, s))
    return p, m_new, rescaled[0][1] + add_columns(p), [x for x, _ in rescaled]


def add_columns(x):
    """Add up the columns that each thread has: [rows, n] becomes 8 sums a row."""
    parts = [x[:, start : start + 8] for start in range(0, x.shape[1], 8)]
    while len(parts) > 1:
        odd = parts[len(parts) // 2 * 2 :]
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


# Can go when a kernel can branch on a vote of a warp.
def rescale(acc, l_i, alpha, layout):
    """Return acc · alpha and l_i · alpha; a warp whose rows all have alpha 1 skips it."""

    @plgpu.inline_mgpu(
        arg_types=(layout,) * 3,
        return_type=tuple(plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout) for x in (acc, l_i)),
    )
    def multiply(_, acc, l_i, alpha):
        i32 = ir.IntegerType.get_signless(32)
        one, zero = mgpu.c(1.0, ir.F32Type.get()), mgpu.c(0, i32)
        changed = None
        for pair in alpha.registers.flat:
            differs = arith.cmpf(arith.CmpFPredicate.UNE, llvm.extractelement(pair, zero), one)
            changed = differs if changed is None else arith.ori(changed, differs)
        text = (
            "{ .reg .pred q; setp.ne.u32 q, $1, 0; vote.sync.any.pred q, q, 0xffffffff; "
            "selp.u32 $0, 1, 0, q; }"
        )
        changed = arith.extui(i32, changed)
        changed = llvm.inline_asm(i32, [changed], text, "=r,r", has_side_effects=True)
        changed = arith.cmpi(arith.CmpIPredicate.ne, changed, zero)
        arrays = acc, l_i
        old = [x for array in arrays for x in array.registers.flat]
        # A register's row tile and row half are its indices 0 and 4.
        factors = [
            alpha.registers[index[0], 0, 0, 0, index[4], 0, 0, 0, 0]
            for array in arrays
            for index in np.ndindex(array.registers.shape)
        ]
        choice = scf.IfOp(changed, [x.type for x in old], has_else=True)
        with ir.InsertionPoint(choice.then_block):
            scf.yield_([arith.mulf(x, factor) for x, factor in zip(old, factors, strict=True)])
        with ir.InsertionPoint(choice.else_block):
            scf.yield_(old)
        new = iter(choice.results)
        return tuple(
            of_registers(array, [next(new) for _ in range(array.registers.size)])
            for array in arrays
        )

    return multiply(acc, l_i, alpha)
