"""Packed sequences: as `pallas_attn.kernels.library.sequences`, of scalars."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.kernels.library.sequences import tokens_of_tile


def locate_tokens(cu_seqlens_ref, tile, num_tokens, rows, block):
    """Find the sequence that owns a tile: as the portable `locate_tokens`, by a binary search."""
    offsets = cu_seqlens_ref.shape[0]

    def halve(_, range_):
        first, count = range_
        half = count // 2
        begun = cu_seqlens_ref[first + half] * rows // block <= tile - offsets
        first = jnp.where(begun & (count > 1), first + half, first)
        return first, jnp.where(begun, count - half, jnp.maximum(half, 1))

    steps = np.int32(offsets.bit_length())
    owner, _ = lax.fori_loop(np.int32(0), steps, halve, (jnp.int32(0), jnp.int32(offsets)))
    return tokens_of_tile(cu_seqlens_ref, tile, owner, num_tokens, rows, block)
