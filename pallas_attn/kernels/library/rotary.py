"""Rotary embedding: rotate pairs of a head's dimensions by the angles of the token's position.

RoFormer (Su et al. 2021). Pair i is dimensions i and i + R / 2 (GPT-NeoX), or 2i and 2i + 1
(GPT-J, interleaved), so that each side of all pairs is a tile of evenly spaced columns.
"""

import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from pallas_attn.kernels.library.tiles import arange


def load_rotation(cos_ref, sin_ref, position, pairs, block):
    """Load cosine and sine of each pair's angle at a position, [1, block] each, float32.

    They are NaN if the tables [positions, pairs] have no such position.
    """
    num_positions = cos_ref.shape[0]
    pair = arange(block)
    exists = (pair < pairs) & (position >= 0) & (position < num_positions)
    row = jnp.broadcast_to(jnp.clip(position, 0, num_positions - 1), (block,))
    cos = plt.load(cos_ref.at[row, pair], mask=exists, other=float("nan"))
    sin = plt.load(sin_ref.at[row, pair], mask=exists, other=float("nan"))
    return cos.astype(jnp.float32)[None, :], sin.astype(jnp.float32)[None, :]


def rotate(x, y, cos, sin):
    """Return both sides of the rotated pairs, in float32."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return x * cos - y * sin, y * cos + x * sin
