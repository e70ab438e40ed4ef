"""Packed sequences: as `pallas_attn.kernels.library.sequences`, with a scalar search."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.kernels.library import sequences
from pallas_attn.kernels.library.sequences import first_tile


def find_sequence(cu_seqlens_ref, tile, block, rows=None):
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


locate_tile = functools.partial(sequences.locate_tile, find=find_sequence)
locate_tokens = functools.partial(sequences.locate_tokens, find=find_sequence)
