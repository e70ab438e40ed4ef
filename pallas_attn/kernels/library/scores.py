"""Scores: from q·k to the input of the softmax."""

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.library.softmax import LOG2E


def visible_scores(
    a,
    b,
    position,
    key,
    end,
    rule,
    window,
    masked,
    segment_a=None,
    segment_b=None,
    seen=None,
    added=(),
):
    """Compute the scores of a tile, from the operands of q·k to the input of the softmax.

    Everything that changes or hides a score is applied here.

    Args:
        a, b: rows of q and rows of k, or the other way round for transposed scores.
        position, key: key position of each query, and of each key, broadcast against a · bᵀ and
            counted from any one origin.
        end: first key that does not exist; None where rows past the end are not stored.
        rule: `twin_attention.contract.spec.ScoreRule`.
        window: keys seen on each side of a position, `twin_attention.contract.spec.Window`.
        masked: the tile has hidden keys.
        segment_a, segment_b: segments of the rows of a and of b, which a nonexistent row never
            shares; None hides nothing.
        seen: the keys that a tree or an interval lets each query see, broadcast as a · bᵀ; None
            hides nothing.
        added: of `terms.added_scores`, what is added to the scaled scores.

    Returns:
        (s, dcap): a · bᵀ scaled, with `added`, capped and masked, float32; and the derivative of
        the cap, 1 without one.
    """
    s = attention_scores(
        a, b, rule.scale, rule.softcap, rule.scale_first, None, rule.precision, added
    )
    dcap = 1.0
    if rule.softcap is not None:
        dcap = softcap_derivative(s, rule.softcap)
        if added is not None:
            dcap = jnp.where(dcap > 0.0, dcap, 0.0)  # what is added to a hidden pair may be NaN
    if segment_a is not None:
        s = attention_mask(s, position, key, None, window.left, window.right)
        s = jnp.where(segment_a[:, None] == segment_b[None, :], s, float("-inf"))
    elif masked:
        s = attention_mask(s, position, key, end, window.left, window.right)
    if masked and seen is not None:
        s = jnp.where(seen, s, float("-inf"))
    return s, dcap


def attention_scores(a, b, scale, softcap, scale_first, more=None, precision="ieee", added=()):
    """Compute a · bᵀ in float32, scaled if the exponent cannot scale it, then capped.

    `more`, the product of further columns, is added to the product. `added` is added after the
    scale, which is then not left to the exponent.
    """
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
    """Compute acc + a · b, accumulated in float32.

    In IEEE float32 the product is first summed by itself, so that a sum over a long sequence is
    rounded at acc's magnitude once per tile instead of once per row. Its negative is subtracted,
    because Triton turns an addition back into a product that starts from acc.
    """
    if a.dtype == jnp.float32 and precision == "ieee":
        return acc - dot(-a, b, precision)
    return acc + dot(a, b, precision)


def round_operand(x, precision):
    """Round an operand of a product for TF32: tensor cores cut its mantissa to 10 bits.

    Adding half of the last kept bit rounds to nearest, ties away from 0, as ``cvt.rna.tf32`` does.
    Infinities and NaN are unchanged.
    """
    if x.dtype == jnp.float32 and precision == "tf32":
        bits = lax.bitcast_convert_type(x, jnp.int32)
        x = x + lax.bitcast_convert_type(bits & -(1 << 23), jnp.float32) * 2**-11
    return x


def as_multiplied(x, precision):
    """Return an operand of a product as tensor cores take it: see `round_operand`."""
    x = round_operand(x, precision)
    if x.dtype == jnp.float32 and precision == "tf32":
        bits = lax.bitcast_convert_type(x, jnp.int32)
        x = lax.bitcast_convert_type(bits & -(1 << 13), jnp.float32)
    return x


def softcap_derivative(s, softcap):
    """Compute d capped / d score from the capped score: ``1 - tanh²``."""
    t = s / softcap
    return 1.0 - t * t


def tanh(x):
    """Compute tanh to a few float32 ulps, by series near 0, where ``1 - exp`` cancels."""
    e = jnp.exp2(jnp.abs(x) * (-2.0 * LOG2E))
    ratio = (1.0 - e) / (1.0 + e)
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 - x2 * (17.0 / 315.0))))
    return jnp.where(jnp.abs(x) < 0.15, series, jnp.where(x < 0, -ratio, ratio))


def attention_mask(s, position, key, end, window_left, window_right):
    """Set to -inf the scores of keys that a query at `position` does not see.

    The same holds for keys from `end` on, which do not exist; None means that all keys exist, or
    that their rows are not stored. Positions and keys may be counted from any one origin.
    """
    if end is not None:
        s = jnp.where(key < end, s, float("-inf"))
    if window_left is not None:
        s = jnp.where(key >= position - window_left, s, float("-inf"))
    if window_right is not None:
        s = jnp.where(key <= position + window_right, s, float("-inf"))
    return s


def dot(a, b, precision="ieee"):
    """Compute a · b, accumulated in float32; float32 operands multiply in the given precision."""
    chosen = {"ieee": lax.Precision.HIGHEST, "tf32": lax.Precision.HIGH}[precision]
    chosen = chosen if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=chosen, preferred_element_type=jnp.float32)
