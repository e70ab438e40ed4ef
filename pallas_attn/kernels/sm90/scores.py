"""Scores: the way from q·k to what the softmax takes."""

import jax.numpy as jnp

from pallas_attn.kernels.explicit.registers import as_rows, iota
from pallas_attn.kernels.explicit.softmax import RESCALE_ABOVE
from pallas_attn.kernels.explicit.wgmma import WGMMA
from pallas_attn.kernels.explicit.wgmma_scores import cap_products, scaled_scores


def softmax_update(s, m_i, rule, masked, bounded):
    """Return p, the new maximum, and the factor of what refers to the old one.

    s: scores if masked, otherwise products q·k.
    bounded: a cap bounds the exponentials, so that m_i stays as it is, and there is no factor.
    """
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


def rounding_of_one_key(l_i, position, seq_kv, window_left, window_right, dtype):
    """Return what out of a row that sees one key is multiplied with, 1 in other rows.

    Without a maximum p of that key is not 1, and p·v has it rounded. So out becomes v exactly, and
    the row's ds is 0.

    Args:
        l_i: row sums [64], here p itself.
        position: the key position of the first row.
    """
    row = iota(l_i.shape, 0, WGMMA.reduce(1)) + position
    first, last = row * 0, row * 0 + (seq_kv - 1)
    if window_left is not None:
        first = jnp.maximum(row - window_left, 0)
    if window_right is not None:
        last = jnp.minimum(row + window_right, seq_kv - 1)
    rounded = l_i.astype(dtype).astype(jnp.float32)
    has_one = (first == last) & (l_i > 0.0)
    return jnp.where(has_one, l_i / jnp.where(has_one, rounded, 1.0), 1.0)
