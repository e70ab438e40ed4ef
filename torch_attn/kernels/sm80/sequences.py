"""Packed sequences: as `torch_attn.kernels.portable.sequences`, with a search of scalars.

It takes no layout, and no warp waits for another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.portable.sequences import first_tile, rows_of_tile


@gluon.jit
def locate_tile(
    cu_seqlens_ptr,
    cu_seqlens_other_ptr,
    tile,
    num_rows,
    num_rows_other,
    num_sequences,
    BLOCK: gl.constexpr,
):
    """Find the sequence that owns a tile: as the portable `locate_tile`."""
    sequence = find_sequence(cu_seqlens_ptr, tile, num_sequences, BLOCK)
    return rows_of_tile(
        cu_seqlens_ptr, cu_seqlens_other_ptr, sequence, tile, num_rows, num_rows_other,
        num_sequences, BLOCK,
    )  # fmt: skip


@gluon.jit
def find_sequence(cu_seqlens_ptr, tile, num_sequences, BLOCK: gl.constexpr):
    """Return the last sequence whose tiles do not begin behind `tile`, 0 .. N."""
    first = 0
    count = num_sequences + 1
    while count > 1:
        half = count // 2
        middle = first + half
        begun = first_tile(gl.load(cu_seqlens_ptr + middle), middle, BLOCK) <= tile
        first = gl.where(begun, middle, first)
        count = gl.where(begun, count - half, half)
    return first
