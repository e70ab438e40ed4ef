"""The sums of `batch_invariant` over a row's keys: docs/semantics.md.

All its kernels take these functions, whose sums of p have an order in any layout of threads.
Explicit multiply-adds keep a compiler from fusing others in another kernel.
"""

import triton
import triton.language as tl

from torch_attn.kernels.library.softmax import LN2, LOG2E
from twin_attention.targets import invariant

SPAN = tl.constexpr(invariant.SPAN)
PARTS = tl.constexpr(16)  # of a row's sum: what threads and warps hold in every layout


@triton.jit
def update_maximum(s, m_i, exp2_scale, MASKED: tl.constexpr):
    """Return p, the factor of what was summed before, and the maximum of a block's scores too."""
    m_new = tl.maximum(m_i, tl.max(s, 1) * exp2_scale)
    m_safe = m_new
    if MASKED:
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(tl.fma(s, exp2_scale, -m_safe[:, None]))
    return p, tl.exp2(m_i - m_safe), m_new


@triton.jit
def add_block(sums, alpha, p):
    """Add a block's p [rows, BLOCK] to a row's sums, in PARTS: pairs of keys, theirs, and theirs.

    A thread has all that it adds, and its factors, in the layout of p.
    """
    alpha = _parts(tl.broadcast_to(alpha[:, None], p.shape))
    return tl.fma(sums, tl.max(tl.max(tl.max(alpha, 4), 2), 1), sum_block(p))


@triton.jit
def sum_block(p):
    return tl.sum(tl.sum(tl.sum(_parts(p), 4), 2), 1)


@triton.jit
def _parts(x):
    tl.static_assert(x.shape[1] == 8 * PARTS)
    return tl.reshape(x, [x.shape[0], 2, 2, PARTS, 2])


@triton.jit
def add_parts(x):
    """Sum a row's PARTS, [rows, PARTS], by halves."""
    x = tl.reshape(x, [x.shape[0], 2, 2, 2, 2])
    return tl.sum(tl.sum(tl.sum(tl.sum(x, 1), 1), 1), 1)


@triton.jit
def join_rows(m_i, l_i, m_span, l_span):
    """Return the statistics of both, and the factors of the sums before and of the span's."""
    m_new = tl.maximum(m_i, m_span)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, beta = tl.exp2(m_i - m_safe), tl.exp2(m_span - m_safe)
    return m_new, tl.fma(l_i, alpha, l_span * beta), alpha, beta


@triton.jit
def finish_rows(m_i, l_i, sink):
    """Return the factor of a row's sum of values, and lse; sink: a number for each row, or None."""
    factor, has_keys = 1.0, m_i != float("-inf")
    if sink is not None:
        m_new = tl.maximum(m_i, sink * LOG2E)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        factor = tl.exp2(m_i - m_safe)
        l_i = tl.fma(l_i, factor, tl.exp2(tl.fma(sink, LOG2E, -m_safe)))
        m_i = m_new
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    lse = tl.fma(m_i, LN2, tl.log(l_safe))
    if sink is not None:  # without keys it is the sink, as where no kernel runs
        lse = tl.where(has_keys, lse, sink)
    return factor / l_safe, lse
