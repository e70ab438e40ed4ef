"""Packed sequences: as `torch_attn.kernels.library.sequences`, with a search of scalars.

It takes no layout, and no warp waits for another.
"""

import triton
import triton.language as tl

from torch_attn.kernels.library.sequences import first_tile, rows_of_tile


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
    """Find the sequence that owns a tile: as the portable `locate_tile`."""
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
