"""Scores: the way from q·k to what the softmax takes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.portable.scores import attention_mask
from torch_attn.kernels.sm80.softmax import add_columns, online_softmax_update
from twin_attention.targets.ptx import cap_constraints, cap_scores

# By how many scores of a tile a thread has.
_CAP = gl.constexpr({n: cap_scores(n, exact=False) for n in (32, 64)})
_CAP_EXACTLY = gl.constexpr({n: cap_scores(n, exact=True) for n in (32, 64)})
_CAP_EXP2 = gl.constexpr({n: cap_scores(n, exact=False, exponential=True) for n in (32, 64)})
_CONSTRAINTS = gl.constexpr({n: cap_constraints(n) for n in (32, 64)})


@gluon.jit
def scaled_scores(s, rule):
    """Scale products q·k where the exponent cannot do it, and cap them."""
    # As a tensor it would be a branch, and Triton 3.6 has kept the side without the product.
    gl.static_assert(not isinstance(rule.scale_first, gl.tensor))
    if rule.softcap is not None:
        s = _cap(s, rule, rule.softcap)
    elif rule.scale_first:
        s = s * rule.scale
    return s


@gluon.jit
def visible_scores(s, position, key, end, rule, window_left, window_right, MASKED: gl.constexpr):
    """Turn products q·k into what the softmax takes: `portable.scores.visible_scores`.

    Returns (s, exp2_scale, dcap): the scores, as parts of the cap where there is one; what takes
    them to base 2; and the derivative of the cap, 1 without one.
    """
    exp2_scale = rule.exp2_scale
    dcap = 1.0
    if rule.softcap is None:
        s = scaled_scores(s, rule)
    else:
        s = _cap(s, rule, 1.0)
        exp2_scale = exp2_scale * rule.softcap
        dcap = 1.0 - s * s
    if MASKED:
        s = attention_mask(s, position, key, end, window_left, window_right)
    return s, exp2_scale, dcap


@gluon.jit
def softmax_update(s, m_i, l_i, rule, MASKED: gl.constexpr, BOUNDED: gl.constexpr):
    """Update the running softmax: `sm80.softmax.online_softmax_update`.

    s: scores if MASKED, otherwise products q·k.
    BOUNDED: a cap bounds the exponentials, so that m_i stays as it is, and alpha is 1.
    """
    if BOUNDED:
        if MASKED:
            p = gl.exp2(s * rule.exp2_scale)
        else:
            p = _cap_with(_CAP_EXP2, s, rule, rule.softcap * rule.exp2_scale)
        alpha = gl.full(m_i.shape, 1.0, gl.float32, m_i.type.layout)
        l_i += add_columns(p)
    else:
        if not MASKED:
            s = scaled_scores(s, rule)
        p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, rule.exp2_scale, MASKED)
    return p, alpha, m_i, l_i


@gluon.jit
def _cap(s, rule, b):
    """Return ``b * tanh(score / softcap)`` of products q·k."""
    return _cap_with(_CAP if rule.small_cap else _CAP_EXACTLY, s, rule, b)


@gluon.jit
def _cap_with(CODE: gl.constexpr, s, rule, b):
    COUNT: gl.constexpr = s.shape[0] * s.shape[1] // 128
    return gl.inline_asm_elementwise(
        CODE[COUNT], _CONSTRAINTS[COUNT], [s, rule.cap_scale, b], dtype=gl.float32,
        is_pure=True, pack=COUNT,
    )  # fmt: skip


@gluon.jit
def hide(s, position, start_kv, end, window_left, window_right):
    """Set the scores of keys that a query does not see to -inf: `portable.scores.attention_mask`.

    The window's end and the last key are one bound, a number for each row. A thread has two keys in
    eight: what it compares with its rows' bounds are the same constants in each tile.
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
        last = gl.minimum(position + window_right, last)
    eights = _where_at_most(first, last - key, eights)
    if window_left is not None:
        eights = _where_at_most(position - window_left - key, first, eights)
    return gl.convert_layout(gl.reshape(eights, s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def _where_at_most(x, bound, s):
    """Return s where x <= bound, else -inf; in PTX, since LLVM would pack the bits into words."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred seen; setp.le.s32 seen, $1, $2; selp.f32 $0, $3, 0fFF800000, seen; }",
        "=f,r,r,f", [x, bound, s], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
