"""Packed sequences: which sequence a tile belongs to, and where its rows are."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plt

from pallas_attn.integers import quotient
from pallas_attn.kernels.library.tiles import arange, cdiv
from twin_attention.contract.operands import AttentionOperands, VarlenOperands
from twin_attention.contract.spec import AttentionSpec, VarlenSpec

# Offsets that one step of the search reads: one step finds one of 127 sequences.
SEARCH_WIDTH = 128


class Offsets(NamedTuple):
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None

    @property
    def num_sequences(self):
        return None if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1


class TileRows(NamedTuple):
    """The rows of a tile, counted from the first row of all sequences.

    first: the sequence's first row. end: of the sequence's rows. first_other, size_other: its first
    row on the other axis, and its rows there.
    """

    sequence: Any
    first: Any
    start: Any
    end: Any
    first_other: Any
    size_other: Any


def count_sequence_tiles(num_rows, num_sequences, block):
    if num_sequences is None:
        return cdiv(num_rows, block)
    return num_rows // block + num_sequences + 1


def locate_tile(
    cu_seqlens_ref, cu_seqlens_other_ref, tile, num_rows, num_rows_other, block, find=None
):
    """Return a tile's `TileRows`; past a sequence's last tile, those of an empty sequence."""
    if cu_seqlens_ref is None:
        return TileRows(0, 0, tile * block, num_rows, 0, num_rows_other)
    sequence = (find or find_sequence)(cu_seqlens_ref, tile, block)
    first, size = rows_of_sequence(cu_seqlens_ref, sequence, num_rows, num_rows)
    first_other, size_other = rows_of_sequence(cu_seqlens_other_ref, sequence, num_rows_other, 0)
    index = jnp.maximum(tile - first_tile(first, sequence, block), 0)
    exists = index < cdiv(size, block)
    start = first + jnp.where(exists, index * block, 0)
    end = first + jnp.where(exists, size, 0)
    size_other = jnp.where(exists, size_other, 0)
    return TileRows(sequence, first, start, end, first_other, size_other)


def locate_tokens(cu_seqlens_ref, tile, num_tokens, rows, block, find=None):
    owner = (find or find_sequence)(cu_seqlens_ref, tile - cu_seqlens_ref.shape[0], block, rows)
    num_sequences = cu_seqlens_ref.shape[0] - 1
    is_first = tile <= num_sequences
    sequence = jnp.where(is_first, tile, owner)
    first, tokens = rows_of_sequence(cu_seqlens_ref, sequence, num_tokens, num_tokens)
    other = tile - num_sequences - 1
    index = jnp.where(is_first, 0, jnp.maximum(other - quotient(first * rows, block), 0) + 1)
    return sequence, first, tokens, index * block


def first_tile(first, sequence, block):
    return quotient(first, block) + sequence


def find_sequence(cu_seqlens_ref, tile, block, rows=None):
    first = np.int32(0)
    count = cu_seqlens_ref.shape[0]
    while count > 1:
        step = cdiv(count, SEARCH_WIDTH)
        sequence = first + arange(SEARCH_WIDTH) * step
        exists = sequence < cu_seqlens_ref.shape[0]
        offset = plt.load(cu_seqlens_ref.at[sequence], mask=exists & (sequence > 0), other=0)
        if rows is None:
            begin = first_tile(offset, sequence, block)
        else:
            begin = quotient(offset * rows, block)
        begun = exists & (begin <= tile)
        passed = jnp.maximum(jnp.sum(begun.astype(jnp.int32), dtype=jnp.int32) - 1, 0)
        first = first + passed * step
        count = step
    return first


def rows_of_sequence(cu_seqlens_ref, sequence, num_rows, end_of_padding):
    num_sequences = cu_seqlens_ref.shape[0] - 1
    first = jnp.where(sequence > 0, cu_seqlens_ref[sequence], 0)
    end = cu_seqlens_ref[jnp.minimum(sequence + 1, num_sequences)]
    end = jnp.where(sequence < num_sequences, end, end_of_padding)
    first = jnp.minimum(jnp.maximum(first, 0), num_rows)
    end = jnp.minimum(jnp.maximum(end, first), num_rows)
    return first, end - first


def num_sequences_of(spec: AttentionSpec) -> int | None:
    return spec.num_sequences if isinstance(spec, VarlenSpec) else None


def offsets_of(operands: AttentionOperands[Any]) -> Offsets:
    if isinstance(operands, VarlenOperands):
        return Offsets(operands.cu_seqlens_q, operands.cu_seqlens_kv)
    return Offsets()


def with_batch(spec: AttentionSpec, *tensors: Any) -> tuple[Any, ...]:
    """Return tensors with a batch axis: packed sequences are a batch of one. None stays None."""
    if not isinstance(spec, VarlenSpec):
        return tensors
    return tuple(None if x is None else jnp.expand_dims(x, 0) for x in tensors)


def without_batch(spec: AttentionSpec, *tensors: Any) -> tuple[Any, ...]:
    if not isinstance(spec, VarlenSpec):
        return tensors
    return tuple(jnp.squeeze(x, 0) for x in tensors)
