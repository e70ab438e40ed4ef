"""Tiles in shared memory: how they are laid out, fetched and multiplied.

A tile holds rows of one head, its columns padded with zeros to a multiple of 16. It is stored in
blocks of 8 rows and at most 64 columns, whose 16-byte units are permuted with the row's number, so
that cp.async writes and ldmatrix reads eight rows without a bank conflict.
"""

import jax.numpy as jnp
from jax import lax


def step_start(step, begin, before, full, after, block):
    """Return the first row of the tile of a step: masked ones, before and after, then full ones."""
    masked = before + after
    tile = jnp.where(step < before, step, jnp.where(step < masked, step + full, step - after))
    return begin + lax.convert_element_type(tile, jnp.int32) * block
