"""Scores: from q·k to what the softmax takes."""

import triton
import triton.language as tl

from torch_attn.kernels.portable.softmax import LOG2E


@triton.jit
def attention_scores(
    a, b, scale, softcap, SCALE_FIRST: tl.constexpr, HAS_SOFTCAP: tl.constexpr, more=None
):
    """a · bᵀ in float32, scaled where the exponent cannot do it (SCALE_FIRST), then capped.

    `more` is added to the product: that of further columns.
    """
    s = tl.dot(a, tl.trans(b), more, input_precision="ieee")
    if SCALE_FIRST:
        s = s * scale
    if HAS_SOFTCAP:
        s = softcap * tanh(s / softcap)
    return s


@triton.jit
def add_product(acc, a, b):
    """acc + a · b, accumulated in float32.

    In float32 the product is summed by itself first, so that a sum over a long sequence is rounded
    at acc's magnitude once a tile instead of once a row. It is subtracted, negated, because Triton
    turns an addition back into a product that starts from acc.
    """
    if a.dtype == tl.float32:
        acc = acc - tl.dot(-a, b, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def softcap_derivative(s, softcap):
    """d capped / d score, from the capped score: ``1 - tanh²``."""
    t = s / softcap
    return 1.0 - t * t


@triton.jit
def tanh(x):
    """Hyperbolic tangent to a few float32 ulps; by series near 0, where ``1 - exp`` cancels."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    ratio = (1.0 - e) / (1.0 + e)
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 - x2 * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.15, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def attention_mask(
    s,
    position,
    key,
    end,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Scores of keys that a query at `position` does not see become -inf.

    So do those of keys from `end` on, which do not exist (None: all do, or their rows are not
    stored). Positions and keys may be counted from any one origin.
    """
    if end is not None:
        s = tl.where(key < end, s, float("-inf"))
    if HAS_LEFT:
        s = tl.where(key >= position - window_left, s, float("-inf"))
    if HAS_RIGHT:
        s = tl.where(key <= position + window_right, s, float("-inf"))
    return s
