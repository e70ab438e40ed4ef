"""Masks: the operands that say which keys a query sees, and the tiles that a program visits.

Each kind of mask is a tuple of operands, whose fields are None if a problem lacks it: `Offsets` of
packed sequences, `Segments`, `Lists` of a block mask, `Tree`, `Depths`, `RowIntervals`. The window
is a parameter of the problem. `pallas_attn.kernels.library.scores.visible_scores` hides scores
within a tile.
"""

from typing import Any, NamedTuple

from jax import lax

from pallas_attn.kernels.library.block_mask import (
    List,
    Lists,
    find_list,
    kept_row,
    kept_tiles,
    lists_of_keys,
    lists_of_queries,
)
from pallas_attn.kernels.library.intervals import (
    RowIntervals,
    intervals_of_keys,
    intervals_of_queries,
    tiles_of_intervals,
)
from pallas_attn.kernels.library.segments import Segments, meeting_tiles, segment_ranges
from pallas_attn.kernels.library.sequences import Offsets, offsets_of
from pallas_attn.kernels.library.tiles import Visible, count_tiles, tile_start, visible_tiles
from pallas_attn.kernels.library.tree import Depths, Runs, Tree, tree_of, walk_runs
from twin_attention.contract.operands import AttentionOperands, FlashOperands
from twin_attention.contract.spec import AttentionSpec


class Mask(NamedTuple):
    """Hold the operands of a kernel that say which keys a query sees."""

    offsets: Offsets
    segments: Segments
    lists: Lists
    tree: Tree
    depths: Depths
    intervals: RowIntervals


def mask_of_keys(operands: AttentionOperands[Any], spec: AttentionSpec) -> Mask:
    """Return the mask of a kernel whose programs own tiles of queries and visit keys."""
    lists, tree = lists_of_keys(operands), tree_of(operands, spec)
    intervals = intervals_of_keys(operands)
    return Mask(offsets_of(operands), _segments(operands, 1), lists, *tree, intervals)


def mask_of_queries(operands: AttentionOperands[Any], spec: AttentionSpec) -> Mask:
    """Return the mask of a kernel whose programs own tiles of keys and visit queries."""
    lists, tree = lists_of_queries(operands), tree_of(operands, spec)
    intervals = intervals_of_queries(operands)
    return Mask(offsets_of(operands), _segments(operands, 0), lists, *tree, intervals)


def _segments(operands: AttentionOperands[Any], visited: int) -> Segments:
    if not isinstance(operands, FlashOperands):
        return Segments()
    ids = operands.q_segment_ids, operands.kv_segment_ids
    return Segments(*ids, segment_ranges(ids[visited]))


class Visits(NamedTuple):
    """Hold the tiles of the other axis that a program visits.

    Attributes:
        visible: how many tiles there are, and which need a mask.
        block: rows of each tile.
        size: length of the other axis.
        kept: the list that the tiles are taken from, or None.
        runs: the runs of a tree, which replace `visible`, or None.
    """

    visible: Visible
    block: int
    size: Any
    kept: List | None = None
    runs: Runs | None = None

    def keep(self, lists, head, tile, rows):
        """Return the visits narrowed to a list of tiles; see `find_list`."""
        kept = find_list(lists, head, tile, rows)
        return self._replace(visible=kept_tiles(kept, self.visible, self.block), kept=kept)

    def count(self, masked):
        """Return the number of tiles of one kind: at the edges if masked, otherwise full."""
        return count_tiles(self.visible, masked)

    def start(self, index, masked):
        """Return the first row of tile `index` of one kind."""
        if self.runs is not None:
            return self.visible.begin + index * self.block
        row = tile_start(index, self.visible, self.block, masked)
        return row if self.kept is None else kept_row(self.kept, row, self.size, masked)

    def walk(self, masked, visit, carry):
        """Call `visit` for each tile of one kind, as `lax.fori_loop` does."""
        if self.runs is not None:
            return walk_runs(self.runs, masked, visit, carry)
        return lax.fori_loop(0, self.count(masked), visit, carry)


def find_visits(
    start,
    size,
    size_other,
    diagonal,
    left,
    right,
    block,
    block_other,
    ids,
    segments,
    begins,
    ends,
):
    """Return the `Visits` of the rows start .. start + block, before a list narrows them.

    Args:
        start, size, size_other, diagonal, left, right, block, block_other: see `visible_tiles`.
        ids, segments: the segments of the rows, or None, and the kernel's segment operands.
        begins, ends: bounds of the rows' intervals, or None.
    """
    if begins is not None:
        visible = tiles_of_intervals(begins, ends, block_other)
    else:
        visible = visible_tiles(start, size, size_other, diagonal, left, right, block, block_other)
    if segments.ranges is not None:
        visible = meeting_tiles(ids, segments.ranges, size_other, visible, block_other)
    return Visits(visible, block_other, size_other)
