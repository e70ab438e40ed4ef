"""The running softmax.

Scores are kept in base 2: ``exp(x) = exp2(x * log2(e))``, so that one hardware instruction gives p.
`exp2_scale` converts a score to base 2 and includes the scale where it can
(`twin_attention.contract.spec.ScoreRule`): the product folds into the exponent's subtraction.
"""

import jax.numpy as jnp

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def online_softmax_update(s, m_i, l_i, exp2_scale):
    """Update the running softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1).

    Invariant: m_i is the row maximum so far (base 2), l_i the sum of ``exp2(s * exp2_scale - m_i)``
    and the caller's acc the product of that with v. A row without a key so far keeps m_i = -inf and
    l_i = 0.

    Returns (p, alpha, m_i, l_i): p of this tile, the factor that rescales acc to the new maximum,
    and the new m_i and l_i.
    """
    m_new = jnp.maximum(m_i, jnp.max(s, 1) * exp2_scale)
    m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new)
    p = jnp.exp2(s * exp2_scale - m_safe[:, None])
    alpha = jnp.exp2(m_i - m_safe)
    l_i = l_i * alpha + jnp.sum(p, 1)
    return p, alpha, m_new, l_i


def add_sink(sink, m_i, l_i):
    """Add one more logit, without a value, to a running softmax (Xiao et al. 2023).

    Returns (alpha, m_i, l_i): the factor that rescales acc to the new maximum, and the new m_i and
    l_i.
    """
    sink = sink * LOG2E
    m_new = jnp.maximum(m_i, sink)
    m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new)
    alpha = jnp.exp2(m_i - m_safe)
    l_i = l_i * alpha + jnp.exp2(sink - m_safe)
    return alpha, m_new, l_i


def row_statistics(m_i, l_i, in_base_2=True):
    """Return the divisor of a row's sums, and its log-sum-exp.

    A row without a key or a sink has divisor 1 and lse -inf.

    in_base_2: m_i is in base 2, otherwise a natural logarithm.
    """
    l_safe = jnp.where(l_i == 0.0, 1.0, l_i)
    maximum = m_i * LN2 if in_base_2 else m_i
    return l_safe, maximum + jnp.log(l_safe)


def lse_in_base_2(lse):
    """Return lse2, which the backward subtracts: ``exp2(s - lse2)`` is 0 where a row saw no key."""
    return jnp.where(lse == float("-inf"), float("inf"), lse) * LOG2E


def add_sink_to_states(sink, m_i, l_i):
    """Do what `add_sink` does, for a maximum that is a natural logarithm."""
    m_new = jnp.maximum(m_i, sink)
    m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new)
    alpha = jnp.exp2((m_i - m_safe) * LOG2E)
    l_i = l_i * alpha + jnp.exp2((sink - m_safe) * LOG2E)
    return alpha, m_new, l_i
