"""The order in which a work item's steps visit its tiles: edge tiles first, then the full ones.

`begin` .. `after` are of `visible_tiles` or `listed_tiles`. A group step counts over all heads of a
GQA group: the edge tiles of all heads, then the full ones.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.library.sequences import count_sequence_tiles
from torch_attn.kernels.library.tiles import split_step
from torch_attn.kernels.tile_lists import ALIKE, HEADER, OTHERS_PADDED, PADDED, ROW


class TileList(NamedTuple):
    """The entry of a list's first step, and PADDED and OTHERS_PADDED of its header."""

    middle: Any
    first: Any
    padding: Any


@gluon.jit
def listed_tiles(
    tiles, batch, tile, size, size_other, num_sequences, BLOCK: gl.constexpr, OTHER: gl.constexpr
):  # fmt: skip
    """Return what `visible_tiles` does for a tile that has a list; `begin` is a `TileList`.

    Where nothing is visible, there is one masked tile that is not counted. tiles: a counter of work
    items, followed by the lists. batch: 0 for packed sequences.
    """
    middle = middle_of_list(tiles, batch, tile, size, size_other, num_sequences, BLOCK, OTHER)
    before, full, padding = gl.load(middle), gl.load(middle + 1), gl.load(middle + 2)
    first = gl.load(_entry(middle, 0, before))
    return TileList(middle, first, padding), before, full, 0


@gluon.jit
def middle_of_list(
    tiles, batch, tile, size, size_other, num_sequences, BLOCK: gl.constexpr, OTHER: gl.constexpr
):  # fmt: skip
    most = gl.maximum(gl.cdiv(size_other, OTHER), 1)
    index = batch * count_sequence_tiles(size, num_sequences, BLOCK) + tile
    offset = index.to(gl.int64) * (2 * most + HEADER) + (1 + most)
    return tiles + offset


@gluon.jit
def step_start(
    step, begin, before, full, after, BLOCK: gl.constexpr, EDGES_LAST: gl.constexpr = False
):
    """Return the first row of a step's tile. EDGES_LAST: full tiles go first."""
    if EDGES_LAST:
        edge = gl.where(step < before + full, step - full, step)
        tile = gl.where(step < full, step + before, edge)
    else:
        edge = gl.where(step < before, step, step + full)
        tile = gl.where(step < before + after, edge, step - after)
    if is_list(begin):
        if is_first(step) and not EDGES_LAST:
            row = begin.first & ROW
        else:
            row = gl.load(_entry(begin.middle, tile, before)) & ROW
    else:
        row = begin + tile * BLOCK
    return row


@gluon.jit
def step_has_padding(step, begin, before):
    """Return whether the edge tile of a step, of `listed_tiles`, has padding."""
    others = begin.padding & OTHERS_PADDED != 0
    return gl.load(_entry(begin.middle, step, before), mask=others, other=0) & PADDED != 0


@gluon.jit
def step_is_alike(step, begin, before, segments):
    """Return whether a full tile and the item's rows have one segment, by the list."""
    alike = False
    if segments is not None:
        if is_first(step):
            alike = begin.first & ALIKE != 0
        else:
            alike = gl.load(_entry(begin.middle, step, before)) & ALIKE != 0
    return alike


@gluon.jit
def rows_have_padding(begin):
    return begin.padding & PADDED != 0


@gluon.jit
def _entry(middle, tile, before):
    return middle + gl.where(tile < before, -1 - tile, HEADER + tile - before)


@triton.constexpr_function
def is_list(begin):
    return isinstance(begin, tuple | tl.tuple)


@triton.constexpr_function
def is_first(step):
    return isinstance(step, int) and step == 0


@gluon.jit
def group_step(step, begin, before, full, after, BLOCK: gl.constexpr, GROUP_SIZE: gl.constexpr):
    """Return the head in its group, and the first row of the tile."""
    member, index = _split_group_step(step, before + after, full, GROUP_SIZE)
    return member, step_start(index, begin, before, full, after, BLOCK)


@gluon.jit
def group_step_has_padding(step, begin, before, full, GROUP_SIZE: gl.constexpr):
    _member, index = _split_group_step(step, before, full, GROUP_SIZE)
    return step_has_padding(index, begin, before)


@gluon.jit
def group_step_is_alike(step, begin, before, full, segments, GROUP_SIZE: gl.constexpr):
    alike = False
    if segments is not None:
        _member, index = _split_group_step(step, before, full, GROUP_SIZE)
        alike = step_is_alike(index, begin, before, segments)
    return alike


@gluon.jit
def _split_group_step(step, edges, full, GROUP_SIZE: gl.constexpr):
    is_edge = step < edges * GROUP_SIZE
    count = gl.where(is_edge, edges, full)
    member, index = split_step(
        gl.where(is_edge, step, step - edges * GROUP_SIZE), count, GROUP_SIZE
    )
    return member, gl.where(is_edge, index, index + edges)
