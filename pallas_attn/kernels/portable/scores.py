"""Scores: from q·k to what the softmax takes."""

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.portable.softmax import LOG2E


def attention_scores(a, b, scale, softcap, scale_first, more=None):
    """a · bᵀ in float32, scaled where the exponent cannot do it (scale_first), then capped.

    `more` is added to the product: that of further columns.
    """
    s = dot(a, b.T)
    if more is not None:
        s = more + s
    if scale_first:
        s = s * scale
    if softcap is not None:
        s = softcap * tanh(s / softcap)
    return s


def add_product(acc, a, b):
    """acc + a · b, accumulated in float32.

    In float32 the product is summed by itself first, so that a sum over a long sequence is rounded
    at acc's magnitude once a tile instead of once a row. It is subtracted, negated, because Triton
    turns an addition back into a product that starts from acc.
    """
    if a.dtype == jnp.float32:
        return acc - dot(-a, b)
    return acc + dot(a, b)


def softcap_derivative(s, softcap):
    """d capped / d score, from the capped score: ``1 - tanh²``."""
    t = s / softcap
    return 1.0 - t * t


def tanh(x):
    """Hyperbolic tangent to a few float32 ulps; by series near 0, where ``1 - exp`` cancels."""
    e = jnp.exp2(jnp.abs(x) * (-2.0 * LOG2E))
    ratio = (1.0 - e) / (1.0 + e)
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 - x2 * (17.0 / 315.0))))
    return jnp.where(jnp.abs(x) < 0.15, series, jnp.where(x < 0, -ratio, ratio))


def attention_mask(s, position, key, end, window_left, window_right):
    """Scores of keys that a query at `position` does not see become -inf.

    So do those of keys from `end` on, which do not exist (None: all do, or their rows are not
    stored). Positions and keys may be counted from any one origin.
    """
    if end is not None:
        s = jnp.where(key < end, s, float("-inf"))
    if window_left is not None:
        s = jnp.where(key >= position - window_left, s, float("-inf"))
    if window_right is not None:
        s = jnp.where(key <= position + window_right, s, float("-inf"))
    return s


def dot(a, b):
    """a · b accumulated in float32; float32 operands multiply in IEEE precision."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
