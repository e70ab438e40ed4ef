"""Scores: from q·k to the input of the softmax."""

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.library.softmax import LOG2E


def attention_scores(a, b, scale, softcap, scale_first, more=None, precision="ieee", added=()):
    s = dot(a, b.T, precision)
    if more is not None:
        s = more + s
    if scale_first:
        s = s * scale
    for x in added:
        s = s + x
    if softcap is not None:
        s = softcap * tanh(s / softcap)
    return s


def add_product(acc, a, b, precision):
    if a.dtype == jnp.float32 and precision == "ieee":
        return acc - dot(-a, b, precision)
    return acc + dot(a, b, precision)


def round_operand(x, precision):
    if x.dtype == jnp.float32 and precision == "tf32":
        bits = lax.bitcast_convert_type(x, jnp.int32)
        x = x + lax.bitcast_convert_type(bits & -(1 << 23), jnp.float32) * 2**-11
    return x


def as_multiplied(x, precision):
    x = round_operand(x, precision)
    if x.dtype == jnp.float32 and precision == "tf32":
        bits = lax.bitcast_convert_type(x, jnp.int32)
        x = lax.bitcast_convert_type(bits & -(1 << 13), jnp.float32)
    return x


def softcap_derivative(s, softcap):
    t = s / softcap
    return 1.0 - t * t


def tanh(x):
    e = jnp.exp2(jnp.abs(x) * (-2.0 * LOG2E))
    ratio = (1.0 - e) / (1.0 + e)
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 - x2 * (17.0 / 315.0))))
    return jnp.where(jnp.abs(x) < 0.15, series, jnp.where(x < 0, -ratio, ratio))


def attention_mask(s, position, key, end, window_left, window_right):
    if end is not None:
        s = jnp.where(key < end, s, float("-inf"))
    if window_left is not None:
        s = jnp.where(key >= position - window_left, s, float("-inf"))
    if window_right is not None:
        s = jnp.where(key <= position + window_right, s, float("-inf"))
    return s


def dot(a, b, precision="ieee"):
    """Compute a · b in float32; float32 operands multiply in the given precision."""
    chosen = {"ieee": lax.Precision.HIGHEST, "tf32": lax.Precision.HIGH}[precision]
    chosen = chosen if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=chosen, preferred_element_type=jnp.float32)
