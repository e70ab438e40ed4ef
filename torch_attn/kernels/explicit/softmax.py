"""The running softmax, with row sums that stay in their threads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def add_columns(x):
    """Sum the columns of a thread, two in eight, so that [rows, 4] partial sums remain."""
    return gl.sum(gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2]), 1), 2)


@gluon.jit
def online_softmax_update(s, m_i, l_i, exp2_scale, MASKED: gl.constexpr):
    """Update the running softmax: `library.softmax.online_softmax_update`.

    l_i is [rows, 4], the partial sums of `add_columns`: a row's lanes are added once, at the end.
    """
    m_new = gl.maximum(m_i, gl.max(s, 1) * exp2_scale)
    m_safe = m_new
    if MASKED:
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * exp2_scale - m_safe[:, None])
    alpha = gl.exp2(m_i - m_safe)
    rows: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
    l_i = l_i * gl.convert_layout(alpha, rows, assert_trivial=True)[:, None] + add_columns(p)
    return p, alpha, m_new, l_i
