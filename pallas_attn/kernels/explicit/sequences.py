"""Packed sequences: as `pallas_attn.kernels.library.sequences`, with a search of scalars.

It takes no layout, and no warp waits for another.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.kernels.library.sequences import first_tile, rows_of_tile, tokens_of_tile


def locate_tile(cu_seqlens_ref, cu_seqlens_other_ref, tile, num_rows, num_rows_other, block):
    """Find the sequence that owns a tile: as the library's `locate_tile`."""
    sequence = find_sequence(cu_seqlens_ref, tile, block)
    return rows_of_tile(
        cu_seqlens_ref, cu_seqlens_other_ref, sequence, tile, num_rows, num_rows_other, block
    )


def locate_tokens(cu_seqlens_ref, tile, num_tokens, rows, block):
    """Find the sequence that owns a tile: as the library's `locate_tokens`."""
    owner = find_sequence(cu_seqlens_ref, tile - cu_seqlens_ref.shape[0], block, rows)
    return tokens_of_tile(cu_seqlens_ref, tile, owner, num_tokens, rows, block)


def find_sequence(cu_seqlens_ref, tile, block, rows=None):
    """Return the last sequence whose tiles do not begin behind `tile`, 0 .. N.

    With `rows`, tiles are those behind the sequences' first ones, as in `locate_tokens`.
    """
    num_sequences = cu_seqlens_ref.shape[0] - 1

    def halve(_, range_):
        first, count = range_
        half = count // 2
        middle = first + half
        offset = cu_seqlens_ref[middle]
        begin = first_tile(offset, middle, block) if rows is None else offset * rows // block
        begun = begin <= tile
        return jnp.where(begun, middle, first), jnp.where(begun, count - half, half)

    steps = np.int32(num_sequences.bit_length())
    range_ = jnp.int32(0), jnp.int32(num_sequences + 1)
    return lax.fori_loop(np.int32(0), steps, halve, range_)[0]
