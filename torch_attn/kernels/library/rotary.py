"""Rotary embedding: rotate pairs of a head's dimensions by the angles of the token's position.

RoFormer (Su et al. 2021). Pair i is dimensions i and i + R / 2 (GPT-NeoX), or 2i and 2i + 1
(GPT-J, interleaved), so that each side of all pairs is a tile of evenly spaced columns.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rotation(NamedTuple):
    """Hold the angles of positions.

    Attributes:
        cos, sin: [positions, PAIRS].
        cos_stride, sin_stride: strides of their rows, set in a kernel's argument.
    """

    cos: Any
    sin: Any
    cos_stride: Any = None
    sin_stride: Any = None


@triton.jit
def load_rotation(rotation, position, num_positions, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """Load cosine and sine of each pair's angle at a position, [1, BLOCK] each, float32.

    They are NaN if there is no such position.
    """
    pair = tl.arange(0, BLOCK)[None, :]
    exists = (pair < PAIRS) & (position >= 0) & (position < num_positions)
    row = position.to(tl.int64)
    cos = tl.load(rotation.cos + row * rotation.cos_stride + pair, mask=exists, other=float("nan"))
    sin = tl.load(rotation.sin + row * rotation.sin_stride + pair, mask=exists, other=float("nan"))
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def rotate(x, y, cos, sin):
    """Return both sides of the rotated pairs, in float32."""
    x, y = x.to(tl.float32), y.to(tl.float32)
    return x * cos - y * sin, y * cos + x * sin


def rotation_argument(rotation: Rotation | None) -> Rotation | None:
    """Return the angles as a kernel takes them, from their layouts."""
    if rotation is None:
        return None
    return rotation._replace(cos_stride=rotation.cos.strides[0], sin_stride=rotation.sin.strides[0])
