"""Where a program's tile is."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_attn.kernels.library.intervals import load_intervals
from torch_attn.kernels.library.schedule import longest_first
from torch_attn.kernels.library.scores import round_operand
from torch_attn.kernels.library.segments import STAYS, load_segments, segments_of_batch
from torch_attn.kernels.library.sequences import count_sequence_tiles, locate_tile
from torch_attn.kernels.library.tiles import head_base, load_tile


class Rows(NamedTuple):
    """A program's tile of one axis, which visits tiles of the other.

    Own rows are counted from the first row of all sequences, rows of the other axis from the
    sequence's first. What a mask lacks is 0: Triton 3.6 cannot return None in a tuple.

    Attributes:
        batch: batch element of the tensors, 0 for packed sequences.
        element: the batch element, or the packed sequence.
        head: the query head, or a tile of keys' kv head.
        start, end: the tile's first row, and the end of the sequence's rows.
        first: the sequence's first row.
        first_other, size_other: its first row, and how many it has, on the other axis.
        diagonal: position on the other axis of row 0.
        ids, exists: segments of the rows, and which are not padding.
        ids_other, ranges: the other axis's segments and `segment_ranges`.
        begins, ends: intervals that the rows see.
    """

    batch: Any
    element: Any
    head: Any
    start: Any
    end: Any
    first: Any
    first_other: Any
    size_other: Any
    diagonal: Any
    rows: Any
    ids: Any
    exists: Any
    ids_other: Any
    ranges: Any
    begins: Any
    ends: Any


@triton.jit
def own_queries(
    mask, seq_q, seq_kv, diagonal, num_sequences, heads_q, together, BLOCK_Q: tl.constexpr
):
    """Return a program's queries, in the order of `longest_first`."""
    index, tile = longest_first(count_sequence_tiles(seq_q, num_sequences, BLOCK_Q), together)
    head, batch = index % heads_q, (index // heads_q).to(tl.int64)
    element, first, start, first_kv = batch, 0, tile * BLOCK_Q, 0
    if num_sequences is not None:
        element, first, start, seq_q, first_kv, seq_kv = locate_tile(
            mask.offsets.q, mask.offsets.kv, tile, seq_q, seq_kv, num_sequences, BLOCK_Q
        )
        batch, diagonal = tl.cast(0, tl.int64), seq_kv - seq_q
    return rows_at(
        mask, batch, element, head, start, seq_q, first, first_kv, seq_kv, diagonal, BLOCK_Q
    )


@triton.jit
def own_keys(
    mask, seq_q, seq_kv, diagonal, num_sequences, heads_kv, together, BLOCK_KV: tl.constexpr
):
    """Return a program's keys; the first keys, which most queries see, come first."""
    num_tiles = count_sequence_tiles(seq_kv, num_sequences, BLOCK_KV)
    index, tile = longest_first(num_tiles, together)
    tile = num_tiles - 1 - tile
    head, batch = index % heads_kv, (index // heads_kv).to(tl.int64)
    element, first, start, first_q = batch, 0, tile * BLOCK_KV, 0
    if num_sequences is not None:
        element, first, start, seq_kv, first_q, seq_q = locate_tile(
            mask.offsets.kv, mask.offsets.q, tile, seq_kv, seq_q, num_sequences, BLOCK_KV
        )
        batch, diagonal = tl.cast(0, tl.int64), seq_kv - seq_q
    return rows_at(
        mask, batch, element, head, start, seq_kv, first, first_q, seq_q, -diagonal, BLOCK_KV, True
    )


@triton.jit
def rows_at(
    mask, batch, element, head, start, end, first, first_other, size_other, diagonal,
    BLOCK: tl.constexpr, OF_KEYS: tl.constexpr = False,
):  # fmt: skip
    rows = start + tl.arange(0, BLOCK)
    ids, exists, ids_other, ranges, begins, ends = 0, 0, 0, 0, 0, 0
    if mask.segments is not None:
        own, ids_other, ranges = segments_of_batch(mask.segments, batch, end, size_other, OF_KEYS)
        ids, exists = load_segments(own, start, end, BLOCK, STAYS)
    if mask.intervals is not None:
        begins, ends = load_intervals(mask.intervals, start, end, BLOCK)
    return Rows(
        batch, element, head, start, end, first, first_other, size_other, diagonal, rows, ids,
        exists, ids_other, ranges, begins, ends,
    )  # fmt: skip


@triton.jit
def load_own(pointer, strides, mask, rows, rule, SIZE: tl.constexpr):
    exists = None
    if mask.segments is not None:
        exists = rows.exists
    BLOCK: tl.constexpr = rows.rows.shape[0]
    base = head_base(pointer, strides, rows.batch, rows.head)
    x = load_tile(base, rows.start, rows.end, strides.row, BLOCK, SIZE, True, exists)
    return round_operand(x, rule.precision)
