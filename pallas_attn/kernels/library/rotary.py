"""Rotary embedding: rotate pairs of a head's dimensions by the angles of the token's position."""

import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from pallas_attn.kernels.library.tiles import arange


def load_rotation(cos_ref, sin_ref, position, pairs, block):
    num_positions = cos_ref.shape[0]
    pair = arange(block)
    exists = (pair < pairs) & (position >= 0) & (position < num_positions)
    row = jnp.broadcast_to(jnp.clip(position, 0, num_positions - 1), (block,))
    cos = plt.load(cos_ref.at[row, pair], mask=exists, other=float("nan"))
    sin = plt.load(sin_ref.at[row, pair], mask=exists, other=float("nan"))
    return cos.astype(jnp.float32)[None, :], sin.astype(jnp.float32)[None, :]


def rotate(x, y, cos, sin):
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return x * cos - y * sin, y * cos + x * sin
