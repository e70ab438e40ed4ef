"""Scores: from q·k to the input of the softmax."""

import triton
import triton.language as tl

from torch_attn.kernels.library.softmax import LOG2E


@triton.jit
def attention_scores(
    a, b, scale, softcap, SCALE_FIRST: tl.constexpr, PRECISION: tl.constexpr, more=None, added=None
):
    """Compute a · bᵀ + more, scaled unless the exponent scales; then terms, then the cap."""
    s = tl.dot(a, tl.trans(b), more, input_precision=PRECISION)
    if SCALE_FIRST:
        s = s * scale
    if added is not None:
        for i in tl.static_range(len(added)):
            s = s + added[i]
    if softcap is not None:
        s = softcap * tanh(s / softcap)
    return s


@triton.jit
def add_product(acc, a, b, PRECISION: tl.constexpr):
    """Compute acc + a · b, accumulated in float32.

    In IEEE float32 each product is summed by itself: a long sum is rounded at acc's magnitude once
    per tile, not once per row. Its negative is subtracted, because Triton turns an addition back
    into a product that starts from acc.
    """
    if a.dtype == tl.float32 and PRECISION == "ieee":
        acc = acc - tl.dot(-a, b, input_precision=PRECISION)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def round_operand(x, PRECISION: tl.constexpr):
    """Round an operand for TF32: tensor cores cut its mantissa to 10 bits.

    Adding half of the last kept bit rounds to nearest, ties away from 0, as ``cvt.rna.tf32`` does.
    """
    if x.dtype == tl.float32 and PRECISION == "tf32":
        power = (x.to(tl.int32, bitcast=True) & -(1 << 23)).to(tl.float32, bitcast=True)
        x = x + power * 0.00048828125  # 2^-11
    return x


@triton.jit
def as_multiplied(x, PRECISION: tl.constexpr):
    """Return an operand as tensor cores take it."""
    x = round_operand(x, PRECISION)
    if x.dtype == tl.float32 and PRECISION == "tf32":
        x = (x.to(tl.int32, bitcast=True) & -(1 << 13)).to(tl.float32, bitcast=True)
    return x


@triton.jit
def softcap_derivative(s, softcap):
    """Compute d capped / d score from the capped score: ``1 - tanh²``."""
    t = s / softcap
    return 1.0 - t * t


@triton.jit
def tanh(x):
    """Compute tanh to a few float32 ulps, by series near 0, where ``1 - exp`` cancels."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    ratio = (1.0 - e) / (1.0 + e)
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 - x2 * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.15, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def attention_mask(s, position, key, end, window_left, window_right):
    """Hide keys that a query at `position` does not see, or from `end` on (or None)."""
    if end is not None:
        s = tl.where(key < end, s, float("-inf"))
    if window_left is not None:
        s = tl.where(key >= position - window_left, s, float("-inf"))
    if window_right is not None:
        s = tl.where(key <= position + window_right, s, float("-inf"))
    return s
