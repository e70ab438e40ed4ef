"""Scores: the way from a product of q and k in registers to what the softmax takes."""

import functools

import jax.numpy as jnp

from pallas_attn.kernels.library.scores import attention_mask
from pallas_attn.kernels.sm80.workarounds import reciprocal
from twin_attention.targets.tanh import LIMIT, P, Q


def visible_scores(s, position, key, end, rule, window_left, window_right, masked, layout):
    """Compute scores from q · kᵀ: scaled where the exponent cannot do it, capped and masked.

    Args:
        s: products, in `layout`.
        position, key: as `s`; the key position of each query, and each key.
        end, rule, window_left, window_right, masked:
            see `pallas_attn.kernels.library.scores.visible_scores`.

    Returns:
        (s, dcap): the scores; and the derivative of the cap, 1 without one.
    """
    if rule.scale_first:
        s = s * rule.scale
    dcap = 1.0
    if rule.softcap is not None:
        t = tanh(s * (1.0 / rule.softcap), layout)
        s = rule.softcap * t
        dcap = 1.0 - t * t
    if masked:
        s = attention_mask(s, position, key, end, window_left, window_right)
    return s, dcap


def tanh(x, layout):
    """Compute tanh as a rational function: `twin_attention.targets.tanh`."""
    x = jnp.maximum(jnp.minimum(x, LIMIT), -LIMIT)
    x2 = x * x
    return x * _polynomial(P, x2) * reciprocal(_polynomial(Q, x2), layout)


def _polynomial(coefficients, x):
    return functools.reduce(lambda y, c: y * x + c, reversed(coefficients))
