"""Scores of wgmma: from q·k to the input of the softmax, and on to p."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.explicit.registers import pack
from torch_attn.kernels.explicit.softmax import add_columns, online_softmax_update
from torch_attn.kernels.explicit.terms import add_terms, adds_terms
from torch_attn.kernels.library.scores import attention_mask
from torch_attn.kernels.library.softmax import LOG2E
from twin_attention.targets.ptx import (
    cap_constraints,
    cap_scores,
    capped_exponentials,
    exponentials_constraints,
)

# PTX by how many scores of a tile a thread has.
_CAP = gl.constexpr({n: cap_scores(n, exact=False) for n in (16, 32, 64)})
_CAP_OF_TERMS = gl.constexpr({n: cap_scores(n, exact=False, close=True) for n in (16, 32, 64)})
_CAP_EXACTLY = gl.constexpr({n: cap_scores(n, exact=True) for n in (16, 32, 64)})
_CONSTRAINTS = gl.constexpr({n: cap_constraints(n) for n in (16, 32, 64)})
# PTX by how many pairs of scores a thread has.
_EXP2 = gl.constexpr({n: capped_exponentials(n) for n in (8, 16, 32)})
_EXP2_CONSTRAINTS = gl.constexpr({n: exponentials_constraints(n) for n in (8, 16, 32)})


@gluon.jit
def scaled_scores(s, rule):
    """Scale products q·k unless the exponent scales, and cap them."""
    # As a tensor it would be a branch, of which Triton 3.6 has kept the side without the product.
    gl.static_assert(not isinstance(rule.scale_first, gl.tensor))
    if rule.softcap is not None:
        s = _cap(s, rule, rule.cap_scale, rule.softcap)
    elif rule.scale_first:
        s = s * rule.scale
    return s


@gluon.jit
def scores_with_terms(s, terms, own, rule, offset, bias):
    """Return products q·k scaled, with the terms of `terms.add_terms`, and capped."""
    s = add_terms(s, terms, own, rule, offset, bias)
    if rule.softcap is not None:
        s = _cap(s, rule, 1.0 / rule.softcap, rule.softcap, True)
    return s


@gluon.jit
def visible_scores(
    s, position, key, end, rule, window_left, window_right, MASKED: gl.constexpr, terms, own, tile,
    TRANSPOSED: gl.constexpr = False, FAR: gl.constexpr = False,
):  # fmt: skip
    """Turn products q·k into (s, scale, dcap), as `library.scores.visible_scores`.

    s: the scores, or parts of the cap; scale: their factor in `exponents`.
    """
    exp2_scale = rule.exp2_scale
    dcap = 1.0
    ADDS: gl.constexpr = adds_terms(terms.bias.entries, terms.relative, terms.slopes)
    if ADDS:
        s = add_terms(s, terms, own, rule, tile.offset, tile.bias, TRANSPOSED, FAR)
    elif rule.softcap is None:
        s = scaled_scores(s, rule)
    if rule.softcap is not None:
        s = _cap(s, rule, 1.0 / rule.softcap if ADDS else rule.cap_scale, 1.0)
        exp2_scale = exp2_scale * rule.softcap
        dcap = 1.0 - s * s
        if ADDS and MASKED:
            dcap = gl.maximum(dcap, 0.0)  # what is added to a hidden pair may be NaN
    if ADDS:
        exp2_scale = 1.0 if rule.softcap is None else rule.softcap
    if MASKED:
        s = attention_mask(s, position, key, end, window_left, window_right)
    return s, exp2_scale, dcap


@gluon.jit
def exponents(s, scale, lse2, rest2, ADDED: gl.constexpr):
    """Return p's exponents in base 2, of `visible_scores`; rest2 if terms are ADDED."""
    if ADDED:
        power = (s * scale - lse2) * LOG2E - rest2
    else:
        power = s * scale - lse2
    return power


@gluon.jit
def softmax_update(s, m_i, l_i, rule, MASKED: gl.constexpr, ON_DEMAND: gl.constexpr = False):
    """Update the running softmax with scores if MASKED, otherwise with products q·k."""
    if not MASKED:
        s = scaled_scores(s, rule)
    return online_softmax_update(s, m_i, l_i, rule.exp2_scale, MASKED, ON_DEMAND)


@gluon.jit
def bounded_update(s, l_i, rule, MASKED: gl.constexpr):
    """Return packed p and l_i where a cap bounds p, so that no maximum is subtracted."""
    if MASKED:
        p = gl.exp2(s * rule.exp2_scale)
        sums = add_columns(p)
        packed = pack(p, gl.bfloat16)
    else:
        PAIRS: gl.constexpr = s.shape[0] * s.shape[1] // 256
        first, second = gl.split(gl.reshape(s, [s.shape[0], s.shape[1] // 2, 2]))
        packed, sums = gl.inline_asm_elementwise(
            _EXP2[PAIRS], _EXP2_CONSTRAINTS[PAIRS],
            [first, second, rule.cap_scale, rule.softcap * rule.exp2_scale],
            dtype=(gl.int32, gl.float32), is_pure=True, pack=PAIRS,
        )  # fmt: skip
        # A thread has its row's sum once for each of its pairs.
        sums = gl.reduce(gl.reshape(sums, [s.shape[0], s.shape[1] // 8, 4]), 1, _first)
    return packed, l_i + gl.convert_layout(sums, l_i.type.layout, assert_trivial=True)


@gluon.jit
def rounding_of_one_key(l_i, position, seq_kv, window_left, window_right, dtype: gl.constexpr):
    """Return the factor of out in a row that sees one key, 1 in other rows.

    Without a maximum, p of that key, which is its l_i, is not 1, and p·v uses its rounded value.
    With it, out is exactly v, and the row's ds is 0.
    """
    first, last = position * 0, position * 0 + (seq_kv - 1)
    if window_left is not None:
        first = gl.maximum(position - window_left, 0)
    if window_right is not None:
        last = gl.minimum(position + window_right, seq_kv - 1)
    rounded = l_i.to(dtype).to(gl.float32)
    return gl.where((first == last) & (l_i > 0.0), l_i / rounded, 1.0)


@gluon.jit
def _first(a, b):
    return a


@gluon.jit
def _cap(s, rule, a, b, HAS_TERMS: gl.constexpr = False):
    """Return ``b * tanh(a * s)``; with terms all scores of a row may be below 0."""
    OF_SMALL: gl.constexpr = _CAP_OF_TERMS if HAS_TERMS else _CAP
    CODE: gl.constexpr = OF_SMALL if rule.small_cap else _CAP_EXACTLY
    COUNT: gl.constexpr = s.shape[0] * s.shape[1] // 128
    return gl.inline_asm_elementwise(
        CODE[COUNT], _CONSTRAINTS[COUNT], [s, a, b], dtype=gl.float32,
        is_pure=True, pack=COUNT,
    )  # fmt: skip


@gluon.jit
def hide(s, position, start_kv, end, window_left, window_right):
    """Set the scores of keys that a query does not see to -inf: `library.scores.attention_mask`.

    The window's end and the last key make one bound for each row. A thread has two keys in every
    eight, and compares its bounds with the same constants in each tile. window_right may be a
    number for each row.
    """
    eights = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8])
    of_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, eights.type.layout))
    of_eight: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, eights.type.layout))
    of_key: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, eights.type.layout))
    first = gl.arange(0, s.shape[1] // 8, of_eight)[None, :, None] * 8
    key = start_kv + gl.arange(0, 8, of_key)[None, None, :]
    position = gl.convert_layout(position, of_row, assert_trivial=True)[:, None, None]
    last = end - 1
    if window_right is not None:
        last = gl.minimum(position + _of_rows(window_right, of_row), last)
    eights = _where_at_most(first, last - key, eights)
    if window_left is not None:
        eights = _where_at_most(position - window_left - key, first, eights)
    return gl.convert_layout(gl.reshape(eights, s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def _of_rows(x, LAYOUT: gl.constexpr):
    if isinstance(x, gl.tensor):  # noqa: SIM102 (Triton evaluates both sides of an "and")
        if len(x.shape) > 0:
            x = gl.convert_layout(x, LAYOUT, assert_trivial=True)[:, None, None]
    return x


@gluon.jit
def _where_at_most(x, bound, s):
    """Return s where x <= bound, else -inf; in PTX, since LLVM would pack the bits into words."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred seen; setp.le.s32 seen, $1, $2; selp.f32 $0, $3, 0fFF800000, seen; }",
        "=f,r,r,f", [x, bound, s], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
