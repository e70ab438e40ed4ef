"""Packed sequences: as `torch_attn.kernels.library.sequences`, of scalars.

They take no layout, so that Gluon kernels can call them.
"""

import triton
import triton.language as tl

from torch_attn.kernels.library.sequences import tokens_of_tile


@triton.jit
def locate_tokens(
    cu_seqlens_ptr, tile, num_tokens, num_sequences, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Find the sequence that owns a tile: as the portable `locate_tokens`, by a binary search."""
    first = 0
    count = num_sequences + 1
    while count > 1:
        half = count // 2
        begin = tl.load(cu_seqlens_ptr + first + half) * ROWS // BLOCK
        begun = begin <= tile - num_sequences - 1
        first = tl.where(begun, first + half, first)
        count = tl.where(begun, count - half, half)
    return tokens_of_tile(cu_seqlens_ptr, tile, first, num_tokens, num_sequences, ROWS, BLOCK)
