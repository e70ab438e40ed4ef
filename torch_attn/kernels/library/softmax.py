"""The running softmax.

Scores are kept in base 2: ``exp(x) = exp2(x * log2(e))``, so that one hardware instruction gives p.
`exp2_scale` converts a score to base 2 and includes the scale where it can
(`twin_attention.contract.spec.ScoreRule`): the product folds into the exponent's subtraction.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def online_softmax_update(s, m_i, l_i, exp2_scale):
    """Update the running softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1).

    Invariant: m_i is the row maximum so far (base 2), l_i the sum of ``exp2(s * exp2_scale - m_i)``
    and the caller's acc the product of that with v. A row without a key so far keeps m_i = -inf and
    l_i = 0.

    Returns (p, alpha, m_i, l_i): p of this tile, the factor that rescales acc to the new maximum,
    and the new m_i and l_i.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1) * exp2_scale)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * exp2_scale - m_safe[:, None])
    alpha = tl.exp2(m_i - m_safe)
    l_i = l_i * alpha + tl.sum(p, 1)
    return p, alpha, m_new, l_i


@triton.jit
def row_statistics(m_i, l_i):
    """Return the divisor of a row's acc, and its log-sum-exp (natural log), from a softmax.

    A row without a key has lse -inf, and its acc of 0 is divided by 1.
    """
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    return l_safe, m_i * LN2 + tl.log(l_safe)


@triton.jit
def add_sink(sink, m_i, l_i):
    """Add one more logit, without a value, to a running softmax (Xiao et al. 2023).

    Returns (alpha, m_i, l_i): the factor that rescales acc to the new maximum, and the new m_i and
    l_i.
    """
    sink = sink * LOG2E
    m_new = tl.maximum(m_i, sink)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m_i - m_safe)
    l_i = l_i * alpha + tl.exp2(sink - m_safe)
    return alpha, m_new, l_i


@triton.jit
def add_sink_to_states(sink, m_i, l_i):
    """Do what `add_sink` does, for a maximum that is a natural logarithm."""
    m_new = tl.maximum(m_i, sink)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2((m_i - m_safe) * LOG2E)
    l_i = l_i * alpha + tl.exp2((sink - m_safe) * LOG2E)
    return alpha, m_new, l_i
