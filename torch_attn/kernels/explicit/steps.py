"""The order in which a work item's steps visit its tiles."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.library.sequences import count_sequence_tiles
from torch_attn.kernels.library.tiles import split_step
from torch_attn.kernels.tile_lists import HEADER


@gluon.jit
def listed_tiles(
    segments, tree, batch, tile, size, size_other, num_sequences, BLOCK: gl.constexpr,
    OTHER: gl.constexpr,
):  # fmt: skip
    """Return what `library.tiles.visible_tiles` does, of a tile of rows that has a list.

    `begin` is a pointer, to the middle of the list. Where nothing is visible, there is one masked
    tile that is not counted.

    Args:
        segments, tree: of a `library.mask.Mask` of `tile_lists.listed_mask`; one may be None.
        batch, tile: element of the batch, 0 of packed sequences, and which of its tiles.
        size, size_other: rows of both axes, of packed sequences all.
        num_sequences: of packed sequences, or None.
        BLOCK, OTHER: rows of a tile, and of a tile of the other axis.
    """
    most = gl.maximum(gl.cdiv(size_other, OTHER), 1)
    index = batch * count_sequence_tiles(size, num_sequences, BLOCK) + tile
    offset = index.to(gl.int64) * (2 * most + HEADER) + (1 + most)
    begin = lists_of(segments, tree) + offset
    return begin, gl.load(begin), gl.load(begin + 1), 0


@gluon.jit
def lists_of(segments, tree):
    """Return the lists among a mask's fields: a counter of work items, and then the lists."""
    if segments is not None:
        lists_ptr = segments.ranges
    else:
        lists_ptr = tree.ranges
    return lists_ptr


@gluon.jit
def step_start(
    step, begin, before, full, after, BLOCK: gl.constexpr, EDGES_LAST: gl.constexpr = False
):
    """Return the first row of the tile of a step: those at the edges first, then the full ones.

    EDGES_LAST: the full ones first. `begin` .. `after` are what `library.tiles.visible_tiles` or
    `listed_tiles` returns.
    """
    if EDGES_LAST:
        edge = gl.where(step < before + full, step - full, step)
        tile = gl.where(step < full, step + before, edge)
    else:
        edge = gl.where(step < before, step, step + full)
        tile = gl.where(step < before + after, edge, step - after)
    if is_list(begin):
        row = gl.load(_entry(begin, tile, before)) & -2
    else:
        row = begin + tile * BLOCK
    return row


@gluon.jit
def step_has_padding(step, begin, before):
    """Return whether the tile of a step has padding, of those at the edges of `listed_tiles`."""
    return gl.load(_entry(begin, step, before)) & 1 != 0


@gluon.jit
def rows_have_padding(begin):
    """Return whether rows that have a list have padding."""
    return gl.load(begin + 2) != 0


@gluon.jit
def _entry(begin, tile, before):
    """Return where a list has a tile: those at the edges are counted before the full ones."""
    return begin + gl.where(tile < before, -1 - tile, HEADER + tile - before)


@triton.constexpr_function
def is_list(begin):
    """Return whether `begin` is what `listed_tiles` returned."""
    return hasattr(begin, "type") and begin.type.is_ptr()


@gluon.jit
def group_step(step, begin, before, full, after, BLOCK: gl.constexpr, GROUP_SIZE: gl.constexpr):
    """Return the head of the group, and the first row of the tile, of a step over all its heads.

    The tiles at the edges of all heads go first, then the full ones.
    """
    member, index = _split_group_step(step, before + after, full, GROUP_SIZE)
    return member, step_start(index, begin, before, full, after, BLOCK)


@gluon.jit
def group_step_has_padding(step, begin, before, full, GROUP_SIZE: gl.constexpr):
    """Return what `step_has_padding` does, of a step over all heads of the group."""
    _member, index = _split_group_step(step, before, full, GROUP_SIZE)
    return step_has_padding(index, begin, before)


@gluon.jit
def _split_group_step(step, edges, full, GROUP_SIZE: gl.constexpr):
    is_edge = step < edges * GROUP_SIZE
    count = gl.where(is_edge, edges, full)
    member, index = split_step(
        gl.where(is_edge, step, step - edges * GROUP_SIZE), count, GROUP_SIZE
    )
    return member, gl.where(is_edge, index, index + edges)
