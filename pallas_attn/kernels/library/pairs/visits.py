"""Find the tiles of the other axis that a program's rows see, and load one."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_attn.kernels.library.block_mask import List, Lists, find_list, kept_row, kept_tiles
from pallas_attn.kernels.library.intervals import tiles_of_intervals
from pallas_attn.kernels.library.query_ranges import bounds_of_queries, own_keys_of
from pallas_attn.kernels.library.runs import Runs, walk_runs
from pallas_attn.kernels.library.scores import round_operand
from pallas_attn.kernels.library.segments import VISITED, load_segments, meeting_tiles
from pallas_attn.kernels.library.tiles import (
    Visible,
    arange,
    cdiv,
    count_tiles,
    load_tile,
    rows_from,
    split_step,
    tile_start,
    visible_tiles,
)
from pallas_attn.kernels.library.tree import ending_tiles, find_branches
from twin_attention.targets.config import padded_head_dim


class Visited(NamedTuple):
    """A visited tile of the other axis.

    member is the head in references that have several. ids are segments of the rows, and exists
    says which are to be loaded; None for all.
    """

    head: Any
    member: Any
    start: Any
    rows: Any
    ids: Any
    exists: Any


class Visits(NamedTuple):
    """The tiles of the other axis that a program visits; only tiles at the edges are masked.

    kept: the list that the tiles are taken from. runs: where the tiles are not contiguous.
    """

    visible: Visible
    block: int
    size: Any
    kept: List | None = None
    runs: Runs | None = None

    def keep(self, lists, member, tile, rows):
        kept = find_list(lists, member, tile, rows)
        return self._replace(visible=kept_tiles(kept, self.visible, self.block), kept=kept)

    def divide(self, window, branches, ranges):
        """Return visits in runs, if branches or ranges make them necessary."""
        if branches is None and ranges is None:
            return self
        window = None if ranges is None else window
        return self._replace(runs=Runs(self.visible, window, branches, ranges, self.block))

    def start(self, index, masked):
        if self.runs is not None:
            return self.visible.begin + index * self.block
        row = tile_start(index, self.visible, self.block, masked)
        return row if self.kept is None else kept_row(self.kept, row, self.size, masked)

    def walk(self, visit, carry):
        """Return the last ``carry = visit(start, carry, masked)``, called for each tile."""
        return self.walk_members(0, 1, lambda _, *args: visit(*args), carry)

    def walk_members(self, first, members, visit, carry):
        """Call ``visit(member, start, carry, masked)`` for `members` heads from `first` on."""
        for masked in (False, True):

            def walk(begin, count, carry, masked=masked):
                def step(step, carry):
                    member, index = split_step(step, count, members)
                    return visit(first + member, self.start(begin + index, masked), carry, masked)

                # Start at 0: from another number, Triton 3.9 does not always pipeline the loads.
                return lax.fori_loop(0, count * members, step, carry)

            if self.runs is not None:
                carry = walk_runs(self.runs, masked, walk, carry)
            else:
                carry = walk(0, count_tiles(self.visible, masked), carry)
        return carry


class GroupVisits(NamedTuple):
    """The tiles of queries, of a group's heads, that see a tile of keys; of_all: before a list."""

    of_all: Visits
    lists: Lists
    list_tile: tuple[int, int] | None
    start: Any
    group_size: int

    def walk(self, visit, carry):
        """Visit one head after the other if each has lists, otherwise the whole group together."""
        if self.list_tile is None:
            return self.of_all.walk_members(0, self.group_size, visit, carry)
        tile_q, tile_kv = self.list_tile
        num_lists = self.lists.tiles.shape[0]

        def walk_list(first, carry):
            first = jnp.int32(first)
            visits = self.of_all.keep(self.lists, first, self.start // tile_kv, tile_q)
            return visits.walk_members(first, self.group_size // num_lists, visit, carry)

        if num_lists == 1:
            return walk_list(0, carry)
        return lax.fori_loop(0, num_lists, walk_list, carry)


def tiles_of_keys(mask, queries, window, block, list_tile):
    window = _window_tiles(queries, window.left, window.right, block)
    visits = _seen_tiles(mask, queries, window, block)
    if list_tile is not None:
        tile_q, tile_kv = list_tile
        visits = visits.keep(mask.lists, 0, queries.start // tile_q, tile_kv)
    branches = find_branches(mask, queries, visits.visible.begin)
    exists, size = queries.rows < queries.end, queries.size_other
    ranges = bounds_of_queries(mask.q_ranges.bounds, queries.rows, exists, size)
    return visits.divide(window, branches, ranges)


def tiles_of_queries(mask, keys, window, block, list_tile, group_size):
    window = _window_tiles(keys, window.right, window.left, block)
    ranges = own_keys_of(mask, keys)
    if ranges is None:
        visits = _seen_tiles(mask, keys, window, block)
        visits = visits._replace(visible=ending_tiles(mask, keys, visits.visible, block))
    else:
        window = ending_tiles(mask, keys, window, block)
        visits = _seen_tiles(mask, keys, window, block).divide(window, None, ranges)
    return GroupVisits(visits, mask.lists, list_tile, keys.start, group_size)


def _window_tiles(rows, left, right, block):
    if rows.begins is not None:
        return tiles_of_intervals(rows.begins, rows.ends, block)
    own, size = rows.rows.shape[0], rows.size_other
    return visible_tiles(rows.start, rows.end, size, rows.diagonal, left, right, own, block)


def _seen_tiles(mask, rows, visible, block):
    size = rows.size_other
    if mask.q_ranges.bounds is not None:
        visible = Visible(0, 0, cdiv(size, block), 0)
    if mask.segments.ranges is not None:
        visible = meeting_tiles(rows.ids, mask.segments.ranges, size, visible, block)
    return Visits(visible, block, size)


def load_keys(k_ref, mask, queries, start, rule, block, size, masked):
    ids = load_segments(mask.segments.kv_ids, start, queries.size_other, block, VISITED)
    keys = Visited(queries.head, None, start, start + arange(block), *ids)
    return load_values(k_ref, queries, keys, rule, size, masked), keys


def load_queries(q_ref, mask, keys, member, start, rule, block, size, masked):
    ids = load_segments(mask.segments.q_ids, start, keys.size_other, block, VISITED)
    queries = Visited(keys.head + member, member, start, start + arange(block), *ids)
    return load_values(q_ref, keys, queries, rule, size, masked), queries


def load_values(ref, rows, others, rule, size, masked):
    start, end, block = others.start, rows.size_other, others.rows.shape[0]
    ref = rows_from(ref, rows.first_other)
    x = load_tile(ref, start, end, block, size, masked, others.exists, others.member)
    return round_operand(x, rule.precision)


def keys_from_anywhere(mask, queries, member, start, block):
    """Return the `Visited` of keys that may begin before the first; those have row 0."""
    rows, ids = start + arange(block), None
    exists = (rows >= 0) & (rows < queries.size_other)
    rows = jnp.where(exists, rows, 0)
    if mask.segments.kv_ids is not None:
        ids = mask.segments.kv_ids.at[queries.first_other + rows]
        ids = plt.load(ids, mask=exists, other=VISITED)
        ids = jnp.where(ids < 0, VISITED, ids)
        exists = exists & (ids >= 0)
    return Visited(queries.head, member, start, rows, ids, exists)


def load_from_anywhere(ref, queries, keys, rule, size):
    shape = (keys.rows.shape[0], padded_head_dim(size))
    row = jnp.broadcast_to((queries.first_other + keys.rows)[:, None], shape)
    column = jnp.broadcast_to(arange(shape[1])[None, :], shape)
    member = () if keys.member is None else (jnp.broadcast_to(keys.member, shape),)
    exists = keys.exists[:, None] & (column < size)
    x = plt.load(ref.at[(row, *member, column)], mask=exists, other=0.0)
    return round_operand(x, rule.precision)
