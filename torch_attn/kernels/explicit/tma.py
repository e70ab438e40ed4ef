"""Tiles in shared memory that TMA fills and stores: each column piece is a buffer of COUNT tiles.

Rows and columns that do not exist are loaded as 0, and not stored.
"""

import math
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from torch_attn.kernels.explicit.barriers import barrier
from torch_attn.kernels.explicit.registers import copy_layout
from torch_attn.layouts import Layout
from torch_attn.tensor_maps import TensorMap
from twin_attention.contract.spec import AttentionSpec, PartialSpec, VarlenSpec
from twin_attention.targets import sm90

# 3.9 renames these.
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_descriptor = gl.shared_memory_descriptor
reinterpret = getattr(_descriptor, "reinterpret", None) or _descriptor._reinterpret

column_pieces = triton.constexpr_function(sm90.column_pieces)


@triton.constexpr_function
def num_pieces(size):
    return len(column_pieces(size))


@triton.constexpr_function
def piece_width(size, index):
    return column_pieces(size)[index]


@triton.constexpr_function
def piece_start(size, index):
    return sum(column_pieces(size)[:index])


@triton.constexpr_function
def tile_bytes(rows, size, first=0, end=None):
    return 2 * rows * sum(column_pieces(size)[first:end])


@triton.constexpr_function
def box_layout(width, bits=16, rank=4):
    """Return the layout of a piece, which TMA and wgmma share."""
    return gl.NVMMASharedLayout(min(128, width * bits // 8), bits, rank)


@gluon.jit
def allocate_tile(DTYPE: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, SIZE: gl.constexpr):
    tile = ()
    for i in gl.static_range(num_pieces(SIZE)):
        tile = tile + (
            gl.allocate_shared_memory(
                DTYPE, [COUNT, 1, 1, ROWS, piece_width(SIZE, i)], box_layout(piece_width(SIZE, i))
            ),
        )
    return tile


@gluon.jit
def piece(buffer, slot):
    return buffer.index(slot).reshape([buffer.shape[3], buffer.shape[4]])


@gluon.jit
def load_tile(maps, tile, slot, batch, head, row, full, SIZE: gl.constexpr):
    mbarrier.expect(full, tile_bytes(tile[0].shape[3], SIZE))
    for i in gl.static_range(num_pieces(SIZE)):
        load_box(maps[i], [batch, head, row, piece_start(SIZE, i)], full, tile[i].index(slot))


@gluon.jit
def store_tile(
    maps, tile, slot, batch, head, row, SIZE: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr
):
    for i in gl.static_range(FIRST, FIRST + COUNT):
        store_box(maps[i], [batch, head, row, piece_start(SIZE, i)], tile[i].index(slot))


@gluon.jit
def write_rows(tile, slot, x, FIRST: gl.constexpr):
    for i in gl.static_range(len(x)):
        piece(tile[FIRST + i], slot).store(x[i].to(tile[FIRST + i].dtype))


@gluon.jit
def clear_rows(tile, slot, count, full, phase, BEFORE: gl.constexpr = False):
    """Set the rows from `count` on of a tile to 0, or those BEFORE it, once `full` has completed.

    They may be NaN, which a product with 0 keeps. Each consumer clears them for itself: what
    another one reads meanwhile becomes 0 or does not change.
    """
    if count > 0 if BEFORE else count < tile[0].shape[3]:
        mbarrier.wait(full, phase)
        for i in gl.static_range(len(tile)):
            for j in gl.static_range(tile[0].shape[3] // 16):
                rows = piece(tile[i], slot).slice(16 * j, 16, dim=0)
                _clear_sixteen(rows, count - 16 * j, BEFORE)
        fence_async_shared()
        barrier()


@gluon.jit
def _clear_sixteen(rows, count, BEFORE: gl.constexpr):
    if count > 0 if BEFORE else count < 16:
        layout: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
        x = rows.load(layout)
        row = gl.arange(0, 16, gl.SliceLayout(1, layout))
        kept = row >= count if BEFORE else row < count
        rows.store(gl.where(kept[:, None], x, 0.0))


@gluon.jit
def clear_padding(tile, slot, ids_ptr, start, num_rows, has_padding, full, phase):
    """Set padding in a tile to 0, as `clear_rows` does; rows past `num_rows` are 0 already."""
    if has_padding:
        mbarrier.wait(full, phase)
        for i in gl.static_range(len(tile)):
            for j in gl.static_range(tile[0].shape[3] // 16):
                rows = piece(tile[i], slot).slice(16 * j, 16, dim=0)
                _clear_padding_of_sixteen(rows, ids_ptr, start + 16 * j, num_rows)
        fence_async_shared()
        barrier()


@gluon.jit
def _clear_padding_of_sixteen(rows, ids_ptr, start, num_rows):
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    row = start + gl.arange(0, 16, gl.SliceLayout(1, layout))
    ids = gl.load(ids_ptr + row, mask=row < num_rows, other=0)
    rows.store(gl.where((ids >= 0)[:, None], rows.load(layout), 0.0))


@gluon.jit
def store_result(
    maps, tile, slot, x, batch, head, first, end, heads, IS_PACKED: gl.constexpr,
    SIZE: gl.constexpr, FIRST: gl.constexpr = 0,
):  # fmt: skip
    """Start to store 64 rows of a result through a tile in shared memory that nobody reads.

    maps: descriptors; for packed sequences behind a pointer, or only that: TMA would store all 64,
    and rows from `end` on belong to another sequence. x: column pieces, from the FIRST one on.
    """
    write_rows(tile, slot, x, FIRST)
    fence_async_shared()
    if IS_PACKED:
        HAS_MAPS: gl.constexpr = len(maps) > 1
        if HAS_MAPS and end - first >= 64:
            store_tile(maps[1:], tile, slot, batch, head, first, SIZE, FIRST, len(x))
        else:
            barrier()
            for i in gl.static_range(FIRST, FIRST + len(x)):
                _store_rows(maps[0], piece(tile[i], slot), head, first, end, heads, i, SIZE)
    else:
        store_tile(maps, tile, slot, batch, head, first, SIZE, FIRST, len(x))


@gluon.jit
def _store_rows(out_ptr, rows, head, first, end, heads, INDEX: gl.constexpr, SIZE: gl.constexpr):
    layout: gl.constexpr = copy_layout(rows.shape[1], 4)
    row = first + gl.arange(0, rows.shape[0], gl.SliceLayout(1, layout))
    column = piece_start(SIZE, INDEX) + gl.arange(0, rows.shape[1], gl.SliceLayout(0, layout))
    offset = (row.to(gl.int64) * heads + head) * SIZE
    exists = (row < end)[:, None] & (column < SIZE)[None, :]
    gl.store(out_ptr + offset[:, None] + column[None, :], rows.load(layout), exists)


def maps_of(layout: Layout, rows: int) -> tuple[TensorMap, ...]:
    return tuple(map_of(layout, rows, width) for width in sm90.column_pieces(layout.shape[-1]))


def map_of(layout: Layout, rows: int, width: int) -> TensorMap:
    shape, strides = layout.shape, layout.strides
    if len(shape) == 3:  # packed sequences are a batch of one
        shape, strides = (1, *shape), (0, *strides)
    return TensorMap.of(layout.operand, shape, strides, (rows, width), box_layout(width))


def stored_maps_of(
    spec: AttentionSpec, layout: Layout, rows: int, by_rows: bool = False
) -> tuple[Any, ...]:
    """Return the `maps` of `store_result`.

    There is only the pointer for all parts except the last (see `carry`), and for packed sequences
    with several descriptors, as JAX passes at most two addresses of a result. by_rows: for all
    packed sequences, which takes fewer registers.
    """
    if isinstance(spec, PartialSpec) and not spec.last:
        return (layout,)
    maps = maps_of(layout, rows)
    if isinstance(spec, VarlenSpec):
        return (layout,) if by_rows or len(maps) > 1 else (layout, *maps)
    return maps


@gluon.jit
def load_pieces(maps, tile, slot, batch, head, row, full, SIZE: gl.constexpr):
    for i in gl.static_range(num_pieces(SIZE)):
        load_box(maps[i], [batch, head, row, piece_start(SIZE, i)], full, tile[i].index(slot))


@gluon.jit
def allocate_row(COUNT: gl.constexpr, SIZE: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, [COUNT, 1, SIZE], row_layout())


@triton.constexpr_function
def row_layout():
    return gl.NVMMASharedLayout(0, 32, 2)


@gluon.jit
def read_row(row, slot, LAYOUT: gl.constexpr):
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x = reinterpret(row.index(slot), gl.float32, [row.shape[2]], flat)
    return x.load(gl.SliceLayout(0, LAYOUT))


def rows_map(layout: Layout | None, size: int) -> TensorMap | None:
    return None if layout is None else row_map(layout, size)


def row_map(layout: Layout, size: int) -> TensorMap:
    shape = [math.prod(layout.shape) // size, size]
    fields = {
        "shape": shape,
        "strides": [size, 1],
        "block_shape": [1, size],
        "layout": row_layout(),
    }
    return TensorMap(layout.operand, fields)
