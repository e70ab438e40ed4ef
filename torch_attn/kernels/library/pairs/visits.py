"""Find the tiles of the other axis that rows see, and load one."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_attn.kernels.library.block_mask import kept_row, kept_tiles
from torch_attn.kernels.library.intervals import tiles_of_intervals
from torch_attn.kernels.library.query_ranges import bounds_of_queries
from torch_attn.kernels.library.scores import round_operand
from torch_attn.kernels.library.segments import VISITED, load_segments, meeting_tiles
from torch_attn.kernels.library.tiles import load_tile, tile_start, visible_tiles
from torch_attn.kernels.library.tree import ending_tiles, find_path


class Tiles(NamedTuple):
    """The tiles of the other axis that some rows see, as `visible_tiles` returns them.

    `list_ptr` is a block mask's list; ranges, least and greatest are of `tree.find_path`; or 0.
    With `q_ranges` they are all tiles. window_begin to whole_end are rows of the tiles of the
    window, and of its full ones; range_begin to all_end are of `bounds_of_queries`.
    """

    begin: Any
    before: Any
    full: Any
    after: Any
    list_ptr: Any
    ranges: Any
    least: Any
    greatest: Any
    window_begin: Any
    window_end: Any
    whole_begin: Any
    whole_end: Any
    range_begin: Any
    range_end: Any
    all_begin: Any
    all_end: Any


class Visited(NamedTuple):
    """A visited tile of the other axis.

    `ids` and `exists` are the rows' segments, and which are to be loaded; 0 without segments.
    `stored` is its first row in the tensors, `stored_end` the end of the sequence's rows.
    """

    head: Any
    start: Any
    rows: Any
    ids: Any
    exists: Any
    stored: Any
    stored_end: Any


@triton.jit
def tiles_of_keys(mask, queries, left, right, BLOCK_KV: tl.constexpr):
    """Return the keys that queries see, which `count_runs` divides."""
    begin, before, full, after, window_begin, window_end, whole_begin, whole_end = _seen_tiles(
        mask, queries, left, right, BLOCK_KV, False
    )
    list_ptr, begin, before, full, after = kept_tiles(
        mask.lists, queries, queries.head, begin, before, full, after, BLOCK_KV
    )
    ranges, least, greatest = 0, 0, 0
    if mask.tree is not None:
        ranges, least, greatest = find_path(mask, queries)
    range_begin, range_end, all_begin, all_end = 0, 0, 0, 0
    if mask.q_ranges is not None:
        range_begin, range_end, all_begin, all_end = bounds_of_queries(
            mask.q_ranges, queries.batch * queries.end + queries.rows, queries.rows < queries.end,
            queries.size_other,
        )  # fmt: skip
    return Tiles(
        begin, before, full, after, list_ptr, ranges, least, greatest, window_begin, window_end,
        whole_begin, whole_end, range_begin, range_end, all_begin, all_end,
    )  # fmt: skip


@triton.jit
def tiles_of_queries(mask, keys, head_q, left, right, BLOCK_Q: tl.constexpr):
    """Return a head's queries that see keys, which `count_runs` divides."""
    begin, before, full, after, window_begin, window_end, whole_begin, whole_end = _seen_tiles(
        mask, keys, right, left, BLOCK_Q, True
    )
    if mask.tree is not None and mask.q_ranges is None:
        begin, before, full, after = ending_tiles(mask, keys, begin, before, full, after, BLOCK_Q)
    list_ptr, begin, before, full, after = kept_tiles(
        mask.lists, keys, head_q, begin, before, full, after, BLOCK_Q
    )
    return Tiles(
        begin, before, full, after, list_ptr, 0, 0, 0, window_begin, window_end, whole_begin,
        whole_end, 0, 0, 0, 0,
    )  # fmt: skip


@triton.jit
def _seen_tiles(mask, rows, left, right, BLOCK_OTHER: tl.constexpr, OF_KEYS: tl.constexpr):
    if mask.intervals is not None:
        begin, before, full, after = tiles_of_intervals(rows, BLOCK_OTHER)
    else:
        begin, before, full, after = visible_tiles(
            rows.start, rows.end, rows.size_other, rows.diagonal, left, right, rows.rows.shape[0],
            BLOCK_OTHER,
        )  # fmt: skip
    window_begin, window_end, whole_begin, whole_end = 0, 0, 0, 0
    if mask.q_ranges is not None:
        if OF_KEYS and mask.tree is not None:
            begin, before, full, after = ending_tiles(
                mask, rows, begin, before, full, after, BLOCK_OTHER
            )
        window_begin, whole_begin = begin, begin + before * BLOCK_OTHER
        whole_end = whole_begin + full * BLOCK_OTHER
        window_end = whole_end + after * BLOCK_OTHER
        begin, before, full, after = 0, 0, tl.cdiv(rows.size_other, BLOCK_OTHER), 0
    if mask.segments is not None:
        begin, before, full, after = meeting_tiles(rows, begin, before, full, after, BLOCK_OTHER)
    return begin, before, full, after, window_begin, window_end, whole_begin, whole_end


@triton.jit
def first_key(mask, queries, tiles, index, BLOCK_KV: tl.constexpr, MASKED: tl.constexpr):
    if mask.tree is None and mask.q_ranges is None:
        row = first_row(mask, queries, tiles, index, BLOCK_KV, MASKED)
    else:
        row = tiles.begin + index * BLOCK_KV
    return row


@triton.jit
def first_row(mask, rows, tiles, index, BLOCK_OTHER: tl.constexpr, MASKED: tl.constexpr):
    row = tiles.begin + index * BLOCK_OTHER
    if mask.q_ranges is None:
        row = tile_start(index, tiles.begin, tiles.before, tiles.full, BLOCK_OTHER, MASKED)
    if mask.lists is not None:
        row = kept_row(tiles.list_ptr, row, rows.size_other, mask.lists.tile_other, MASKED)
    return row


@triton.jit
def load_keys(
    k_base, STRIDE: tl.constexpr, mask, queries, start_kv, rule, BLOCK_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, ANY_START: tl.constexpr = False,
):  # fmt: skip
    keys = _visited(mask, queries, queries.head, start_kv, 0, BLOCK_KV, ANY_START)
    k = load_values(k_base, STRIDE, mask, keys, rule, HEAD_DIM, MASKED, ANY_START)
    return k, keys


@triton.jit
def load_queries(
    q_base, STRIDE: tl.constexpr, mask, keys, head, start_q, rule, BLOCK_Q: tl.constexpr,
    HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    queries = _visited(mask, keys, head, start_q, keys.first_other, BLOCK_Q)
    return load_values(q_base, STRIDE, mask, queries, rule, HEAD_DIM, MASKED), queries


@triton.jit
def _visited(mask, rows, head, start, first, BLOCK: tl.constexpr, ANY_START: tl.constexpr = False):
    others = start + tl.arange(0, BLOCK)
    ids, exists = 0, 0
    if ANY_START:
        exists = (others >= 0) & (others < rows.size_other)
    if mask.segments is not None:
        ids, exists = load_segments(
            rows.ids_other, start, rows.size_other, BLOCK, VISITED, ANY_START
        )
    return Visited(head, start, others, ids, exists, first + start, first + rows.size_other)


@triton.jit
def load_values(
    base,
    STRIDE: tl.constexpr,
    mask,
    others,
    rule,
    SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    ANY_START: tl.constexpr = False,
):
    exists = None
    if ANY_START or mask.segments is not None:
        exists = others.exists
    BLOCK: tl.constexpr = others.rows.shape[0]
    x = load_tile(base, others.stored, others.stored_end, STRIDE, BLOCK, SIZE, MASKED, exists)
    return round_operand(x, rule.precision)
