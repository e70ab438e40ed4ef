"""Scores: the way from q·k to what the softmax takes, without the derivative of a cap."""

import jax.numpy as jnp

from pallas_attn.kernels.portable.softmax import LOG2E
from pallas_attn.kernels.sm80.workarounds import reciprocal
from pallas_attn.kernels.sm90.pipeline import WGMMA


def scaled_scores(s, rule):
    """Scale products q·k, in registers, where the exponent cannot do it, and cap them."""
    if rule.softcap is not None:
        # tanh(x) = 1 - 2 / (1 + exp(2x)): a score of 0 is off by softcap · 1e-7, as its sum is.
        e = jnp.exp2(s * (rule.scale / rule.softcap * (2.0 * LOG2E)))
        s = rule.softcap - 2.0 * rule.softcap * reciprocal(1.0 + e, WGMMA)
    elif rule.scale_first:
        s = s * rule.scale
    return s
