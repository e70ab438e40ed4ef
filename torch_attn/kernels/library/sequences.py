"""Packed sequences: which sequence a tile belongs to, and where its rows are.

A tile never holds two sequences, so each gives the same bits as alone. The host does not know the
lengths, so sequence n owns the tiles from ``cu_seqlens[n] // BLOCK + n`` on, at least as many as it
needs. Rows after the last offset are padding, and count as sequence N, whose other axis is empty.
Offsets are unchecked data, clamped to the tensors; the first counts as 0.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_attn.kernels.library.tiles import ROW_PADDING
from twin_attention.contract.operands import AttentionOperands, VarlenOperands
from twin_attention.contract.spec import AttentionSpec, VarlenSpec

# Offsets that a search reads at once.
SEARCH_WIDTH = tl.constexpr(128)


class Offsets(NamedTuple):
    """Offsets, [num_sequences + 1] int32; None for a dense batch."""

    q: Any = None
    kv: Any = None


@triton.jit
def count_sequence_tiles(num_rows, num_sequences, BLOCK: tl.constexpr):
    """Return how many tiles an axis has; `num_sequences` is None for a dense axis."""
    if num_sequences is None:
        count = tl.cdiv(num_rows, BLOCK)
    else:
        count = num_rows // BLOCK + num_sequences + 1
    return count


@triton.jit
def locate_tile(
    cu_seqlens_ptr,
    cu_seqlens_other_ptr,
    tile,
    num_rows,
    num_rows_other,
    num_sequences,
    BLOCK: tl.constexpr,
):
    """Find the sequence that owns a tile.

    Return (sequence, first, start, end, first_other, size_other): the sequence's first row, the
    tile's first row and the end of the sequence's rows; the sequence's first row on the other axis,
    and how many it has there. A tile after its sequence's last one belongs to an empty sequence:
    start and end are first, and size_other is 0.
    """
    sequence = find_sequence(cu_seqlens_ptr, tile, num_sequences, BLOCK)
    return rows_of_tile(
        cu_seqlens_ptr, cu_seqlens_other_ptr, sequence, tile, num_rows, num_rows_other,
        num_sequences, BLOCK,
    )  # fmt: skip


@triton.jit
def rows_of_tile(
    cu_seqlens_ptr,
    cu_seqlens_other_ptr,
    sequence,
    tile,
    num_rows,
    num_rows_other,
    num_sequences,
    BLOCK: tl.constexpr,
):
    """Do what `locate_tile` does, for a tile that `sequence` owns."""
    first, size = rows_of_sequence(cu_seqlens_ptr, sequence, num_rows, num_sequences, num_rows)
    first_other, size_other = rows_of_sequence(
        cu_seqlens_other_ptr, sequence, num_rows_other, num_sequences, 0
    )
    index = tl.maximum(tile - first_tile(first, sequence, BLOCK), 0)
    exists = index < tl.cdiv(size, BLOCK)
    start = first + tl.where(exists, index * BLOCK, 0)
    end = first + tl.where(exists, size, 0)
    size_other = tl.where(exists, size_other, 0)
    return sequence, first, start, end, first_other, size_other


@triton.jit
def locate_tokens(
    cu_seqlens_ptr, tile, num_tokens, num_sequences, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Find the sequence that owns a tile, where each token has ROWS consecutive rows.

    All sequences' first tiles come first: in a batch of single tokens these have all the work. Of
    the others, sequence n owns the tiles from ``cu_seqlens[n] * ROWS // BLOCK`` on. Return
    (sequence, first, tokens, start): the sequence's first token and how many it has; the tile's
    first row, counted from the sequence's, which for a tile too many is after its last.
    """
    owner = find_sequence(cu_seqlens_ptr, tile - num_sequences - 1, num_sequences, BLOCK, ROWS)
    return tokens_of_tile(cu_seqlens_ptr, tile, owner, num_tokens, num_sequences, ROWS, BLOCK)


@triton.jit
def tokens_of_tile(
    cu_seqlens_ptr, tile, owner, num_tokens, num_sequences, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Do what `locate_tokens` does; `owner` owns the tile unless it is a sequence's first."""
    is_first = tile <= num_sequences
    sequence = tl.where(is_first, tile, owner)
    first, tokens = rows_of_sequence(
        cu_seqlens_ptr, sequence, num_tokens, num_sequences, num_tokens
    )
    other = tile - num_sequences - 1
    index = tl.where(is_first, 0, tl.maximum(other - first * ROWS // BLOCK, 0) + 1)
    return sequence, first, tokens, index * BLOCK


@triton.jit
def first_tile(first, sequence, BLOCK: tl.constexpr):
    return first // BLOCK + sequence


@triton.jit
def padded_row(head, num_rows, num_sequences, first, sequence):
    """Return where a sequence begins in padded lse2 and delta; head, of all elements, is int64."""
    row = head * count_sequence_tiles(num_rows, num_sequences, ROW_PADDING) * ROW_PADDING
    if num_sequences is not None:
        row += first_tile(first, sequence, ROW_PADDING).to(tl.int64) * ROW_PADDING
    return row


@triton.jit
def find_sequence(
    cu_seqlens_ptr, tile, num_sequences, BLOCK: tl.constexpr, ROWS: tl.constexpr = None
):
    """Return the last sequence whose tiles begin at or before `tile`; ROWS: of `locate_tokens`."""
    first = 0
    count = num_sequences + 1
    while count > 1:
        step = tl.cdiv(count, SEARCH_WIDTH)
        sequence = tl.arange(0, SEARCH_WIDTH) * step
        exists = sequence < count
        sequence += first
        offset = tl.load(cu_seqlens_ptr + sequence, mask=exists & (sequence > 0), other=0)
        if ROWS is None:
            begin = first_tile(offset, sequence, BLOCK)
        else:
            begin = offset * ROWS // BLOCK
        begun = exists & (begin <= tile)
        passed = tl.maximum(tl.sum(begun.to(tl.int32), 0) - 1, 0) * step
        first += passed
        count = tl.minimum(count - passed, step)
    return first


@triton.jit
def rows_of_sequence(cu_seqlens_ptr, sequence, num_rows, num_sequences, end_of_padding):
    first = tl.load(cu_seqlens_ptr + sequence, mask=sequence > 0, other=0)
    end = tl.load(
        cu_seqlens_ptr + sequence + 1, mask=sequence < num_sequences, other=end_of_padding
    )
    first = tl.minimum(tl.maximum(first, 0), num_rows)
    end = tl.minimum(tl.maximum(end, first), num_rows)
    return first, end - first


def num_sequence_tiles(spec: AttentionSpec, num_rows: int, block: int) -> int:
    if isinstance(spec, VarlenSpec):
        return num_rows // block + spec.num_sequences + 1
    return triton.cdiv(num_rows, block)


def num_padded_rows(spec: AttentionSpec) -> int:
    return num_sequence_tiles(spec, spec.seq_q, ROW_PADDING.value) * ROW_PADDING.value


def offsets_of(operands: AttentionOperands[Any]) -> Offsets:
    if not isinstance(operands, VarlenOperands):
        return Offsets()
    return Offsets(operands.cu_seqlens_q, operands.cu_seqlens_kv)
