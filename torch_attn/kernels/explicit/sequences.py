"""Packed sequences: as `torch_attn.kernels.library.sequences`, with searches of scalars.

They take no layout, so that Gluon kernels can call them, and no warp waits for another.
"""

import triton
import triton.language as tl

from torch_attn.kernels.library.sequences import first_tile, rows_of_tile, tokens_of_tile


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
    """Find the sequence that owns a tile: as the library's `locate_tile`."""
    sequence = find_sequence(cu_seqlens_ptr, tile, num_sequences, BLOCK)
    return rows_of_tile(
        cu_seqlens_ptr, cu_seqlens_other_ptr, sequence, tile, num_rows, num_rows_other,
        num_sequences, BLOCK,
    )  # fmt: skip


@triton.jit
def find_sequence(cu_seqlens_ptr, tile, num_sequences, BLOCK: tl.constexpr):
    """Return the last sequence whose tiles do not begin behind `tile`, 0 .. N."""
    first = 0
    count = num_sequences + 1
    while count > 1:
        half = count // 2
        middle = first + half
        begun = first_tile(tl.load(cu_seqlens_ptr + middle), middle, BLOCK) <= tile
        first = tl.where(begun, middle, first)
        count = tl.where(begun, count - half, half)
    return first


@triton.jit
def locate_tokens(
    cu_seqlens_ptr, tile, num_tokens, num_sequences, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Find the sequence that owns a tile: as the library's `locate_tokens`, by a binary search."""
    first = 0
    count = num_sequences + 1
    while count > 1:
        half = count // 2
        begin = tl.load(cu_seqlens_ptr + first + half) * ROWS // BLOCK
        begun = begin <= tile - num_sequences - 1
        first = tl.where(begun, first + half, first)
        count = tl.where(begun, count - half, half)
    return tokens_of_tile(cu_seqlens_ptr, tile, first, num_tokens, num_sequences, ROWS, BLOCK)
