"""Runs: the tiles that a program's rows see, where these are not contiguous."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.library.query_ranges import tiles_in_ranges
from pallas_attn.kernels.library.ranges import SCAN_WIDTH, scan
from pallas_attn.kernels.library.tiles import Visible
from pallas_attn.kernels.library.tree import Branches, tiles_in_branches


class Runs(NamedTuple):
    """Tell which tiles are visited, and which without a mask.

    Attributes:
        visible: the tiles to choose from; the full ones need no mask for loads.
        window: those that the window shows, None for all.
        branches: of a tree, or None.
        ranges: of queries, or None.
    """

    visible: Visible
    window: Visible | None
    branches: Branches | None
    ranges: Any
    block: int

    @property
    def count(self):
        return self.visible.before + self.visible.full + self.visible.after


def count_runs(runs, masked):

    def visit(tile, begun):
        is_first = _is_kind(runs, tile, masked) & ~_is_kind(runs, tile - 1, masked)
        return begun + is_first.astype(jnp.int32)

    begun = scan(0, runs.count, visit, jnp.zeros((SCAN_WIDTH,), jnp.int32))
    return jnp.sum(begun, dtype=jnp.int32)


def next_run(runs, tile, masked):
    count = runs.count

    def visit(i, carry):
        first, end = carry
        # None is before `tile`, but Triton 3.6 drops a number that only loop bounds depend on.
        is_kind = _is_kind(runs, i, masked) & (i >= tile)
        is_last = is_kind & ~_is_kind(runs, i + 1, masked)
        first = jnp.minimum(first, jnp.where(is_kind, i, count))
        return first, jnp.minimum(end, jnp.where(is_last, i + 1, count))

    nothing = jnp.full((SCAN_WIDTH,), 0, jnp.int32) + count
    first, end = scan(tile, count, visit, (nothing, nothing))
    return jnp.min(first), jnp.min(end)


def walk_runs(runs, masked, walk, carry):
    """Return the carry after ``carry = walk(first, count, carry)`` for all runs of one kind."""

    def walk_next(_run, state):
        end, carry = state
        first, end = next_run(runs, end, masked)
        return end, walk(first, end - first, carry)

    state = jnp.int32(0), carry
    _end, carry = lax.fori_loop(jnp.int32(0), count_runs(runs, masked), walk_next, state)
    return carry


def _is_kind(runs, tile, masked):
    begin, before, full, _ = runs.visible
    exists = (tile >= 0) & (tile < runs.count)
    row = begin + tile * runs.block
    loaded = exists & (tile >= before) & (tile < before + full)
    visited, whole = exists, loaded
    if runs.window is not None:
        begin, before, full, after = runs.window
        whole_begin = begin + before * runs.block
        whole_end = whole_begin + full * runs.block
        visited = visited & (row >= begin) & (row < whole_end + after * runs.block)
        whole = whole & (row >= whole_begin) & (row < whole_end)
    if runs.branches is not None:
        visited, whole = tiles_in_branches(runs.branches, tile, visited, whole, runs.block)
    if runs.ranges is not None:
        shown, shown_whole = tiles_in_ranges(runs.ranges, row, exists, runs.block)
        visited, whole = visited | (exists & shown), whole | (loaded & shown_whole)
    return visited & ~whole if masked else whole
