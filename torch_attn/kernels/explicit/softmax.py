"""The running softmax, with row sums that stay in their threads."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

RESCALE_ABOVE = gl.constexpr(8.0)  # in base 2


@gluon.jit
def add_columns(x):
    """Sum a thread's columns, two in every eight, to [rows, 4] partial sums."""
    return gl.sum(gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2]), 1), 2)


@triton.constexpr_function
def rescales_on_demand(columns):
    """Return whether rescaling on demand (Zadouri et al. 2026, FlashAttention-4) pays."""
    return columns > 128


@gluon.jit
def online_softmax_update(
    s, m_i, l_i, exp2_scale, MASKED: gl.constexpr, ON_DEMAND: gl.constexpr = False
):
    """Update the running softmax as the library does; l_i is [rows, 4].

    ON_DEMAND: m_i grows only where a score passes it by RESCALE_ABOVE.
    """
    m_new = gl.maximum(m_i, gl.max(s, 1) * exp2_scale)
    if ON_DEMAND:
        m_new = gl.where(m_new - m_i > RESCALE_ABOVE, m_new, m_i)
    m_safe = m_new
    if MASKED:
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * exp2_scale - m_safe[:, None])
    alpha = gl.exp2(m_i - m_safe)
    rows: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
    l_i = l_i * gl.convert_layout(alpha, rows, assert_trivial=True)[:, None] + add_columns(p)
    return p, alpha, m_new, l_i
