"""Scores and the running softmax, with row sums that stay in their threads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.portable.scores import attention_mask, softcap_derivative, tanh


@gluon.jit
def visible_scores(s, position, key, end, rule, window_left, window_right, MASKED: gl.constexpr):
    """Turn products q·k into what the softmax takes: `portable.scores.visible_scores`.

    Returns (s, dcap): the scores and the derivative of the cap, 1 without one.
    """
    if rule.scale_first:
        s = s * rule.scale
    dcap = 1.0
    if rule.softcap is not None:
        s = rule.softcap * tanh(s / rule.softcap)
        dcap = softcap_derivative(s, rule.softcap)
    if MASKED:
        s = attention_mask(s, position, key, end, window_left, window_right)
    return s, dcap


@gluon.jit
def sum_in_thread(x):
    """Sum the columns of a thread: one in eight, so that [rows, 8] partial sums remain."""
    return gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), 1)


@gluon.jit
def online_softmax_update(s, m_i, l_i, exp2_scale):
    """Update the running softmax: `portable.softmax.online_softmax_update`.

    l_i is [rows, 8], the partial sums of `sum_in_thread`: a row's lanes are added once, at the end.
    """
    m_new = gl.maximum(m_i, gl.max(s, 1) * exp2_scale)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * exp2_scale - m_safe[:, None])
    alpha = gl.exp2(m_i - m_safe)
    rows: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
    l_i = l_i * gl.convert_layout(alpha, rows, assert_trivial=True)[:, None] + sum_in_thread(p)
    return p, alpha, m_new, l_i
