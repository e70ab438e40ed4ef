"""Rotary embedding (RoFormer, Su et al. 2021): rotate pairs of dimensions by the position's angles.

Pair i is dimensions i and i + R / 2 (GPT-NeoX), or 2i and 2i + 1 (GPT-J, interleaved).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rotation(NamedTuple):
    """Cosine and sine of positions' angles, [positions, PAIRS]."""

    cos: Any
    sin: Any
    cos_stride: Any = None
    sin_stride: Any = None


@triton.jit
def load_rotation(rotation, position, num_positions, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """Load a position's cosine and sine, [1, BLOCK] float32; NaN out of range."""
    pair = tl.arange(0, BLOCK)[None, :]
    exists = (pair < PAIRS) & (position >= 0) & (position < num_positions)
    row = position.to(tl.int64)
    cos = tl.load(rotation.cos + row * rotation.cos_stride + pair, mask=exists, other=float("nan"))
    sin = tl.load(rotation.sin + row * rotation.sin_stride + pair, mask=exists, other=float("nan"))
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def rotate(x, y, cos, sin):
    """Return both sides of the rotated pairs, float32."""
    x, y = x.to(tl.float32), y.to(tl.float32)
    return x * cos - y * sin, y * cos + x * sin


def rotation_argument(rotation: Rotation | None) -> Rotation | None:
    if rotation is None:
        return None
    return rotation._replace(cos_stride=rotation.cos.strides[0], sin_stride=rotation.sin.strides[0])
