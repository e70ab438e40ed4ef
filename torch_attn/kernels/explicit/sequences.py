"""Packed sequences: as `torch_attn.kernels.library.sequences`, with scalar searches.

They need no layout, and no warp waits for another.
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
    sequence = find_sequence(cu_seqlens_ptr, tile, num_sequences, BLOCK)
    return rows_of_tile(
        cu_seqlens_ptr, cu_seqlens_other_ptr, sequence, tile, num_rows, num_rows_other,
        num_sequences, BLOCK,
    )  # fmt: skip


@triton.jit
def locate_tokens(
    cu_seqlens_ptr, tile, num_tokens, num_sequences, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    owner = find_sequence(cu_seqlens_ptr, tile - num_sequences - 1, num_sequences, BLOCK, ROWS)
    return tokens_of_tile(cu_seqlens_ptr, tile, owner, num_tokens, num_sequences, ROWS, BLOCK)


@triton.jit
def find_sequence(
    cu_seqlens_ptr, tile, num_sequences, BLOCK: tl.constexpr, ROWS: tl.constexpr = None
):
    """Return the last sequence whose tiles do not begin after `tile`; ROWS: of `locate_tokens`."""
    first = 0
    count = num_sequences + 1
    while count > 1:
        half = count // 2
        middle = first + half
        offset = tl.load(cu_seqlens_ptr + middle)
        if ROWS is None:
            begin = first_tile(offset, middle, BLOCK)
        else:
            begin = offset * ROWS // BLOCK
        begun = begin <= tile
        first = tl.where(begun, middle, first)
        count = tl.where(begun, count - half, half)
    return first
