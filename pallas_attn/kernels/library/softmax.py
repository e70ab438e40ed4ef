"""The running softmax."""

import jax.numpy as jnp

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def online_softmax_update(s, m_i, l_i, exp2_scale, added=False):
    if added:
        m_new = jnp.maximum(m_i, jnp.max(s, 1))
        m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new)
        p = jnp.exp2((s - m_safe[:, None]) * exp2_scale)
        alpha = jnp.exp2((m_i - m_safe) * exp2_scale)
    else:
        m_new = jnp.maximum(m_i, jnp.max(s, 1) * exp2_scale)
        m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new)
        p = jnp.exp2(s * exp2_scale - m_safe[:, None])
        alpha = jnp.exp2(m_i - m_safe)
    l_i = l_i * alpha + jnp.sum(p, 1)
    return p, alpha, m_new, l_i


def add_sink(sink, m_i, l_i, in_base_2=True):
    scale = 1.0 if in_base_2 else LOG2E
    sink = sink * LOG2E if in_base_2 else sink
    m_new = jnp.maximum(m_i, sink)
    m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new)
    alpha = jnp.exp2((m_i - m_safe) * scale)
    l_i = l_i * alpha + jnp.exp2((sink - m_safe) * scale)
    return alpha, m_new, l_i


def row_statistics(m_i, l_i, in_base_2=True):
    l_safe = jnp.where(l_i == 0.0, 1.0, l_i)
    maximum = m_i * LN2 if in_base_2 else m_i
    return l_safe, maximum + jnp.log(l_safe)


def rest_of_lse(lse, m_i, l_safe):
    log_l = jnp.log(l_safe)
    kept = lse - m_i
    rest = (m_i - (lse - kept)) + (log_l - kept)
    return jnp.where(lse == float("-inf"), 0.0, rest)


def probabilities(s, lse2, rest2, exp2_scale):
    """Compute p = exp(s - lse) from statistics of the rows, broadcast against s."""
    if rest2 is None:
        return jnp.exp2(s * exp2_scale - lse2)
    return jnp.exp2((s - lse2) * exp2_scale - rest2)


def lse_to_subtract(lse, in_base_2=True):
    lse = jnp.where(lse == float("-inf"), float("inf"), lse)
    return lse * LOG2E if in_base_2 else lse
