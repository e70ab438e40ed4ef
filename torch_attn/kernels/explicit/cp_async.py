"""Tiles in shared memory that cp.async fills: each column piece is a buffer of COUNT tiles.

A row's 16-byte units are swizzled by its number, so that cp.async writes and ldmatrix reads eight
rows without a bank conflict.
"""

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from torch_attn.kernels.explicit.registers import copy_layout
from torch_attn.kernels.library.tiles import strides_of
from torch_attn.layouts import Layout
from twin_attention.targets import sm80

# 3.9 renames these, and keeps the old name of the copy only to raise.
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
commit = async_copy.commit_group
wait = async_copy.wait_group

column_pieces = triton.constexpr_function(sm80.column_pieces)


@triton.constexpr_function
def num_pieces(size):
    return len(column_pieces(size))


@triton.constexpr_function
def piece_width(size, index):
    return column_pieces(size)[index]


@triton.constexpr_function
def piece_start(size, index):
    return column_pieces(size)[0] * index


@triton.constexpr_function
def padded_size(size):
    total = 0
    for width in column_pieces(size):
        total += width
    return total


@triton.constexpr_function
def copied_rows(rows, width, num_warps):
    """Return how many rows `copy_layout` has before it repeats."""
    return min(rows, num_warps * (256 // width))


@triton.constexpr_function
def parts_layout(width, num_warps):
    """Return `copy_layout` with its repetitions as another axis."""
    return gl.BlockedLayout([1, 1, 8], [1, 256 // width, width // 8], [1, num_warps, 1], [2, 1, 0])


@triton.constexpr_function
def shared_layout(width):
    phases = min(8, width // 8)
    return gl.SwizzledSharedLayout(8, 8 // phases, phases, [1, 0])


@gluon.jit
def allocate_tile(DTYPE: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, SIZE: gl.constexpr):
    tile = ()
    for i in gl.static_range(num_pieces(SIZE)):
        tile = tile + (
            gl.allocate_shared_memory(
                DTYPE, [COUNT, ROWS, piece_width(SIZE, i)], shared_layout(piece_width(SIZE, i))
            ),
        )
    return tile


@gluon.jit
def fetch_tile(
    tile, slot, base, start, num_rows, STRIDE: gl.constexpr, SIZE: gl.constexpr,
    MASK_ROWS: gl.constexpr, ASYNC: gl.constexpr, ids_ptr=None,
):  # fmt: skip
    """Copy rows of a [num_rows, SIZE] matrix, from `start` on, to a tile; the caller commits.

    Columns past SIZE become 0. MASK_ROWS: so do rows past `num_rows` and, by segments `ids_ptr`,
    padding, which may be NaN. ASYNC: rows are aligned to 16 bytes; others pass through registers.
    """
    if ids_ptr is not None:
        ids_ptr += start
    base += start.to(gl.int64) * STRIDE
    for i in gl.static_range(num_pieces(SIZE)):
        _fetch_piece(
            tile[i].index(slot), base, start, num_rows, STRIDE, piece_start(SIZE, i), SIZE,
            MASK_ROWS, ASYNC, ids_ptr,
        )  # fmt: skip


@gluon.jit
def _fetch_piece(
    buffer, base, start, num_rows, STRIDE: gl.constexpr, FIRST: gl.constexpr, SIZE: gl.constexpr,
    MASK_ROWS: gl.constexpr, ASYNC: gl.constexpr, ids_ptr,
):  # fmt: skip
    ROWS: gl.constexpr = buffer.shape[0]
    WIDTH: gl.constexpr = buffer.shape[1]
    layout: gl.constexpr = copy_layout(WIDTH, gl.num_warps())
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    cols = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    exists = None
    if MASK_ROWS:
        exists = rows < num_rows - start
        if ids_ptr is not None:
            exists = exists & (gl.load(ids_ptr + rows, mask=exists, other=-1) >= 0)
    if FIRST + WIDTH > SIZE:
        if exists is None:
            exists = cols < SIZE
        else:
            exists = exists & (cols < SIZE)
    pointers = _row_pointers(base + FIRST, STRIDE, ROWS, WIDTH, layout, ASYNC)
    if ASYNC:
        copy_async(buffer, pointers, exists)
    elif exists is None:
        buffer.store(gl.load(pointers))
    else:
        buffer.store(gl.load(pointers, exists, 0.0))


@gluon.jit
def _row_pointers(
    base,
    STRIDE: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr,
    ALIGNED: gl.constexpr,
):
    """Return addresses, constant distances added last: one register plus constants."""
    PART: gl.constexpr = copied_rows(ROWS, WIDTH, gl.num_warps())
    layout: gl.constexpr = parts_layout(WIDTH, gl.num_warps())
    of_part: gl.constexpr = gl.SliceLayout(0, layout)
    rows = gl.arange(0, PART, gl.SliceLayout(1, of_part))[:, None]
    cols = gl.arange(0, WIDTH, gl.SliceLayout(0, of_part))[None, :]
    parts = gl.arange(0, ROWS // PART, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    distance = gl.expand_dims(gl.expand_dims(parts.to(gl.int64) * (PART * STRIDE), 1), 2)
    if STRIDE * PART >= 2**31:
        rows = rows.to(gl.int64)
    pointers = base + (gl.expand_dims((rows * STRIDE + cols).to(gl.int64), 0) + distance)
    pointers = gl.convert_layout(gl.reshape(pointers, [ROWS, WIDTH]), LAYOUT, assert_trivial=True)
    if ALIGNED:
        pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, 16]), [1, 8])
    return pointers


def copy_arguments(**layouts: Layout) -> dict[str, Any]:
    strides = strides_of(**layouts)
    aligned = all(layout.is_aligned for layout in layouts.values())
    return {"strides": strides, "ASYNC": aligned and strides.q.align.value % 8 == 0}
