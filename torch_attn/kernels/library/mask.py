"""Masks other than the window: packed sequences, segments, trees, intervals, block masks.

Each is a named tuple of operands and numbers, or None; a kernel takes all of them in one tuple.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.block_mask import (
    Lists,
    find_list,
    kept_row,
    kept_tiles,
    lists_of_keys,
    lists_of_queries,
    with_numbers,
)
from torch_attn.kernels.library.intervals import (
    RowIntervals,
    intervals_of_keys,
    intervals_of_queries,
    tiles_of_intervals,
)
from torch_attn.kernels.library.segments import (
    Segments,
    meeting_tiles,
    segments_of,
    visiting_keys,
    visiting_queries,
)
from torch_attn.kernels.library.sequences import Offsets, offsets_of
from torch_attn.kernels.library.tiles import tile_start, visible_tiles
from torch_attn.kernels.library.tree import Depths, Tree, tree_of
from torch_attn.launch import KernelCall
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec


class Mask(NamedTuple):
    """Tell a kernel which keys a query sees; None for a mask that the problem lacks.

    The lists come first: in loops, Triton 3.6 loses the constants of a nested tuple unless a
    constant of the outer tuple, such as None, follows.

    Attributes:
        lists: the tiles that a block mask keeps.
        offsets: offsets of packed sequences, both None for a dense batch.
        segments: ids, and ranges of the visited tokens' ids.
        tree: ends of keys.
        depths: what a window counts instead of positions.
        intervals: what the resident rows see, instead of a window.
    """

    lists: Lists | None
    offsets: Offsets
    segments: Segments | None
    tree: Tree | None
    depths: Depths | None
    intervals: RowIntervals | None


@triton.jit
def seen_tiles(
    segments,
    ids,
    begins,
    ends,
    start,
    size,
    size_other,
    diagonal,
    left,
    right,
    BLOCK: tl.constexpr,
    BLOCK_OTHER: tl.constexpr,
):
    """Return which tiles of the other axis some rows see, as `visible_tiles` does.

    `ids` [BLOCK] are the rows' segments; without segments, `ids` and `segments` are None. `begins`
    and `ends` [BLOCK] are the bounds of the rows' intervals, or None.
    """
    if begins is not None:
        begin, before, full, after = tiles_of_intervals(begins, ends, BLOCK_OTHER)
    else:
        begin, before, full, after = visible_tiles(
            start, size, size_other, diagonal, left, right, BLOCK, BLOCK_OTHER
        )
    if segments is not None:
        begin, before, full, after = meeting_tiles(
            ids, segments.ranges, size_other, begin, before, full, after, BLOCK_OTHER
        )
    return begin, before, full, after


@triton.jit
def listed_tiles(lists, batch, head, start, begin, before, full, after, BLOCK_OTHER: tl.constexpr):
    """Narrow the result of `seen_tiles` to the tiles of a list; return the list as well.

    The returned list is 0 without lists.
    """
    list_ptr = 0
    if lists is not None:
        list_ptr, count = find_list(lists, batch, head, start // lists.tile)
        begin, before, full, after = kept_tiles(
            list_ptr, count, begin, before, full, after, BLOCK_OTHER, lists.tile_other
        )
    return list_ptr, begin, before, full, after


@triton.jit
def visited_row(
    lists,
    list_ptr,
    index,
    begin,
    before,
    full,
    size_other,
    BLOCK_OTHER: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return the first row of tile `index` of one kind that `listed_tiles` returned."""
    row = tile_start(index, begin, before, full, BLOCK_OTHER, MASKED)
    if lists is not None:
        row = kept_row(list_ptr, row, size_other, lists.tile_other, MASKED)
    return row


def mask_of_keys(operands: AttentionOperands[Tensor], spec: AttentionSpec) -> Mask:
    """Return the mask of a kernel that visits keys."""
    segments, intervals = visiting_keys(segments_of(operands)), intervals_of_keys(operands)
    lists, tree = lists_of_keys(operands), tree_of(operands, spec)
    return Mask(lists, offsets_of(operands), segments, *tree, intervals)


def mask_of_queries(operands: AttentionOperands[Tensor], spec: AttentionSpec) -> Mask:
    """Return the mask of a kernel that visits queries."""
    segments, intervals = visiting_queries(segments_of(operands)), intervals_of_queries(operands)
    lists, tree = lists_of_queries(operands), tree_of(operands, spec)
    return Mask(lists, offsets_of(operands), segments, *tree, intervals)


def mask_argument(call: KernelCall, of_keys: bool) -> dict[str, Any]:
    """Return the mask of keys or of queries, the kernel's last operand, with its lists' numbers."""
    mask = call.layouts[-1]
    return {"mask": mask._replace(lists=with_numbers(mask.lists, call.spec, of_keys))}
