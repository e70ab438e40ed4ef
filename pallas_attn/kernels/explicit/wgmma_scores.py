"""Scores: from a product of wgmma to the input of the softmax."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.registers import as_rows, iota
from pallas_attn.kernels.explicit.softmax import RESCALE_ABOVE
from pallas_attn.kernels.explicit.wgmma import WGMMA
from pallas_attn.kernels.library.scores import attention_mask
from pallas_attn.private import ir, llvm, mgpu
from twin_attention.targets import ptx


def scaled_scores(s, rule):
    if rule.softcap is not None:
        s = cap_products(s, rule, rule.softcap)
    elif rule.scale_first:
        s = s * rule.scale
    return s


def visible_scores(s, position, key, end, rule, window, masked):
    exp2_scale = rule.exp2_scale
    dcap = 1.0
    if rule.softcap is None:
        s = scaled_scores(s, rule)
    else:
        s = cap_products(s, rule, 1.0)
        exp2_scale = exp2_scale * rule.softcap
        dcap = 1.0 - s * s
    if masked:
        s = attention_mask(s, position, key, end, window.left, window.right)
    return s, exp2_scale, dcap


def cap_products(s, rule, b, exponential=False):
    """Return ``b * tanh(score / softcap)`` of products q·k, or 2 to the power of that."""
    return cap(s, rule.cap_scale, b, exact=not rule.small_cap, exponential=exponential)


def hide_keys(s, position, start_kv, end, window, rows_of_query=1):
    """Set the scores of hidden keys to -inf; a query has rows_of_query consecutive rows of s."""
    row = iota((s.shape[0], 8), 0, WGMMA)
    if rows_of_query > 1:
        row = lax.div(row, rows_of_query)
    row = row + (position - start_kv)
    column = iota((s.shape[0], 8), 1, WGMMA)
    upper = lower = None
    if window.right is not None:
        upper = row + window.right - column
    if end is not None:
        last = (end - 1 - start_kv) - column
        upper = last if upper is None else jnp.minimum(upper, last)
    if window.left is not None:
        lower = row - window.left - column
    return hide(s, upper, lower)


def hide_queries(s, first_key, start_q, end, window, end_q=None):
    """Do what `hide_keys` does, transposed; first_key: the first key, in query coordinates."""
    row = iota((s.shape[0], 8), 0, WGMMA)
    column = iota((s.shape[0], 8), 1, WGMMA)
    key = row + (first_key - start_q) - column
    upper = None if window.left is None else key + window.left
    lower = None if window.right is None else key - window.right
    if end_q is not None:
        last = (end_q - 1 - start_q) - column
        upper = last if upper is None else jnp.minimum(upper, last)
    if end is not None:
        exists = row < end - first_key
        lower = jnp.where(exists, -(2**30) if lower is None else lower, 2**30)
    return hide(s, upper, lower)


# Can go when LLVM no longer packs the predicates of a select into words.
def hide(s, upper, lower):
    """Set numbers of s [64, columns] to -inf in columns above `upper` or below `lower`.

    upper, lower: [64, 8] int32, or None for no bound: each row's bound minus a column's place
        among eight, so that a thread compares with the same constants in each tile.
    """
    bounds = [x for x in (upper, lower) if x is not None]
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout,) * (1 + len(bounds)),
        return_type=plgpu.ShapeDtypeStruct(s.shape, s.dtype, layout),
    )
    def select(_, s, *bounds):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        comparisons = [c for c, x in (("ge", upper), ("le", lower)) if x is not None]
        registers = np.empty_like(s.registers)
        for index, pair in np.ndenumerate(s.registers):
            # A register's row tile, column tile and row half are its indices 0, 1 and 4.
            of_rows = (index[0], 0, *index[2:])
            for parity in (0, 1):
                place = mgpu.c(parity, i32)
                x = llvm.extractelement(pair, place)
                for comparison, bound in zip(comparisons, bounds, strict=True):
                    limit = llvm.extractelement(bound.registers[of_rows], place)
                    text = (
                        f"{{ .reg .pred seen; setp.{comparison}.s32 seen, $1, {8 * index[1]}; "
                        "selp.f32 $0, $2, 0fFF800000, seen; }"
                    )
                    x = llvm.inline_asm(f32, [limit, x], text, "=f,r,f")
                pair = llvm.insertelement(pair, x, place)
            registers[index] = pair
        return mgpu.FragmentedArray(_registers=registers, _layout=s.layout, _is_signed=None)

    return select(s, *bounds)


# Can go when a kernel can branch where all lanes of a warp agree.
def cap(s, a, b, *, exact, exponential):
    """Return ``b * tanh(a * s)``, or 2 to the power of it: `targets.ptx.cap_scores`."""
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(s.shape, s.dtype, layout)
    )
    def replace(_, s):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        places = [mgpu.c(i, i32) for i in (0, 1)]
        numbers = [llvm.extractelement(pair, i) for pair in s.registers.flat for i in places]
        count = len(numbers)
        text = ptx.cap_scores(count, exact=exact, exponential=exponential)
        operands = [*numbers, *[mgpu.c(a, f32)] * count, *[mgpu.c(b, f32)] * count]
        struct = llvm.StructType.get_literal([f32] * count)
        capped = llvm.inline_asm(struct, operands, text, ptx.cap_constraints(count))
        results = iter([llvm.extractvalue(f32, capped, [i]) for i in range(count)])
        registers = np.empty_like(s.registers)
        for index, pair in np.ndenumerate(s.registers):
            for place in places:
                pair = llvm.insertelement(pair, next(results), place)
            registers[index] = pair
        return mgpu.FragmentedArray(_registers=registers, _layout=s.layout, _is_signed=None)

    return replace(s)


def softmax_update(s, m_i, rule, masked, bounded):
    """Return p, the new maximum, and the factor of acc and l_i: none if a cap bounds p."""
    if bounded:
        if masked:
            p = jnp.exp2(s * rule.exp2_scale)
        else:
            p = cap_products(s, rule, rule.softcap * rule.exp2_scale, exponential=True)
        return p, m_i, None
    if not masked:
        s = scaled_scores(s, rule)
    m_new = s.max(axis=1) * rule.exp2_scale
    m_new = jnp.where(m_new - m_i > RESCALE_ABOVE, m_new, m_i)
    m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new) if masked else m_new
    p = jnp.exp2(s * rule.exp2_scale - as_rows(m_safe, s))
    return p, m_new, jnp.exp2(m_i - m_safe)


def rounding_of_one_key(l_i, position, seq_kv, window, dtype):
    row = iota(l_i.shape, 0, WGMMA.reduce(1)) + position
    first, last = row * 0, row * 0 + (seq_kv - 1)
    if window.left is not None:
        first = jnp.maximum(row - window.left, 0)
    if window.right is not None:
        last = jnp.minimum(row + window.right, seq_kv - 1)
    rounded = l_i.astype(dtype).astype(jnp.float32)
    has_one = (first == last) & (l_i > 0.0)
    return jnp.where(has_one, l_i / jnp.where(has_one, rounded, 1.0), 1.0)
