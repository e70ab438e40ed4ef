"""Rotary embedding: pairs of a head's dimensions, rotated by the angles of the token's position.

RoFormer (Su et al. 2021). Pair i is dimensions i and i + R / 2 (GPT-NeoX), or 2i and 2i + 1
(GPT-J, interleaved), so that each side of all pairs is a tile of evenly spaced columns.
"""

import triton
import triton.language as tl


@triton.jit
def load_rotation(
    cos_ptr, sin_ptr, strides, position, num_positions, PAIRS: tl.constexpr, BLOCK: tl.constexpr
):
    """Load cosine and sine of each pair's angle at a position, [1, BLOCK] each, float32.

    They are NaN where the tables [num_positions, PAIRS] have no such position.
    """
    cos_stride, sin_stride = strides
    pair = tl.arange(0, BLOCK)[None, :]
    exists = (pair < PAIRS) & (position >= 0) & (position < num_positions)
    row = position.to(tl.int64)
    cos = tl.load(cos_ptr + row * cos_stride + pair, mask=exists, other=float("nan"))
    sin = tl.load(sin_ptr + row * sin_stride + pair, mask=exists, other=float("nan"))
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def rotate(x, y, cos, sin):
    """Return both sides of pairs, rotated, in float32."""
    x, y = x.to(tl.float32), y.to(tl.float32)
    return x * cos - y * sin, y * cos + x * sin
