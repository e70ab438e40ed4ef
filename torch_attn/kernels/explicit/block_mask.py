"""Block masks: as `torch_attn.kernels.library.block_mask`, with scalars and binary searches.

They need no layout, and no warp waits for another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.explicit.steps import step_start
from torch_attn.kernels.library.block_mask import find_list


@gluon.jit
def kept_tiles(
    lists, batch, head, start_q, visible, window_left, window_right, BLOCK: gl.constexpr
):
    """Narrow the result of `visible_tiles` to listed tiles; BLOCK divides the mask's."""
    begin, before, full, after = visible
    TILE: gl.constexpr = lists.tile_other
    tiles_ptr, count = _list(lists, batch, head, start_q)
    whole_tile = gl.cdiv(begin + before * BLOCK, TILE)
    first, whole, end = 0, 0, count
    if window_left is not None:
        first = _count_before(tiles_ptr, count, begin // TILE)
        whole = _count_before(tiles_ptr, count, whole_tile)
    whole_end = gl.maximum((begin + (before + full) * BLOCK) // TILE, whole_tile)
    whole_end = _count_before(tiles_ptr, count, whole_end)
    if window_right is not None:
        end = _count_before(
            tiles_ptr, count, gl.cdiv(begin + (before + full + after) * BLOCK, TILE)
        )
    PER_TILE: gl.constexpr = TILE // BLOCK
    return (
        first * TILE,
        (whole - first) * PER_TILE,
        (whole_end - whole) * PER_TILE,
        (end - whole_end) * PER_TILE,
    )


@gluon.jit
def kept_start(lists, batch, head, start_q, step, visible, BLOCK: gl.constexpr):
    """Return the first key of a step's tile; past all keys for the one step of an empty list."""
    begin, before, full, after = visible
    row = step_start(step, begin, before, full, after, BLOCK)
    if lists is not None:
        TILE: gl.constexpr = lists.tile_other
        tiles_ptr, count = _list(lists, batch, head, start_q)
        index = row // TILE
        tile = gl.load(tiles_ptr + index, mask=index < count, other=2**30 // TILE)
        row = tile * TILE + row % TILE
    return row


@gluon.jit
def _list(lists, batch, head, start_q):
    tiles_ptr, count = find_list(lists, batch, head, start_q // lists.tile)
    return tiles_ptr, gl.maximum(count, 0)


@gluon.jit
def _count_before(tiles_ptr, count, tile):
    first = 0
    while first < count:
        middle = (first + count) // 2
        is_before = gl.load(tiles_ptr + middle) < tile
        first = gl.where(is_before, middle + 1, first)
        count = gl.where(is_before, count, middle)
    return first
