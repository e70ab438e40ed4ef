"""Runs: the tiles that rows see, where these are not contiguous.

Ends of keys hide tiles of the window, and ranges show others. Tiles visited with a mask, or without
one, form runs.
"""

import triton
import triton.language as tl

from torch_attn.kernels.library.query_ranges import tiles_in_ranges
from torch_attn.kernels.library.ranges import SCAN_WIDTH
from torch_attn.kernels.library.tiles import count_tiles
from torch_attn.kernels.library.tree import tiles_in_branches


@triton.jit
def count_runs(
    mask, rows, tiles, BLOCK: tl.constexpr, MASKED: tl.constexpr, OF_KEYS: tl.constexpr = False
):
    """Return the number of runs of tiles with a mask, or without; 1 of contiguous tiles."""
    count = 1
    if mask.q_ranges is not None or (mask.tree is not None and not OF_KEYS):
        begun = tl.zeros([SCAN_WIDTH], tl.int32)
        for start in tl.range(0, tiles.before + tiles.full + tiles.after, SCAN_WIDTH, num_stages=1):
            tile = start + tl.arange(0, SCAN_WIDTH)
            is_first = _is_kind(mask, rows, tiles, tile, BLOCK, MASKED, OF_KEYS)
            is_first &= ~_is_kind(mask, rows, tiles, tile - 1, BLOCK, MASKED, OF_KEYS)
            begun += is_first.to(tl.int32)
        count = tl.sum(begun, 0)
    return count


@triton.jit
def next_run(
    mask, rows, tiles, tile, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    OF_KEYS: tl.constexpr = False,
):  # fmt: skip
    """Return begin and end of the next run from `tile` on, 0 or the end of a run."""
    if mask.q_ranges is None and (mask.tree is None or OF_KEYS):
        begin, stop = 0, count_tiles(tiles.before, tiles.full, tiles.after, MASKED)
    else:
        count = tiles.before + tiles.full + tiles.after
        first = tl.full([SCAN_WIDTH], 0, tl.int32) + count
        end = first
        for start in tl.range(tile, count, SCAN_WIDTH, num_stages=1):
            i = start + tl.arange(0, SCAN_WIDTH)
            # None is before `tile`, but Triton 3.6 drops a number that only loop bounds depend on.
            is_kind = _is_kind(mask, rows, tiles, i, BLOCK, MASKED, OF_KEYS) & (i >= tile)
            is_last = is_kind & ~_is_kind(mask, rows, tiles, i + 1, BLOCK, MASKED, OF_KEYS)
            first = tl.minimum(first, tl.where(is_kind, i, count))
            end = tl.minimum(end, tl.where(is_last, i + 1, count))
        begin, stop = tl.min(first, 0), tl.min(end, 0)
    return begin, stop


@triton.jit
def _is_kind(
    mask, rows, tiles, tile, BLOCK: tl.constexpr, MASKED: tl.constexpr, OF_KEYS: tl.constexpr
):
    exists = (tile >= 0) & (tile < tiles.before + tiles.full + tiles.after)
    row = tiles.begin + tile * BLOCK
    whole = exists & (tile >= tiles.before) & (tile < tiles.before + tiles.full)
    visited, loaded_whole = exists, whole
    if mask.q_ranges is not None:
        visited &= (row >= tiles.window_begin) & (row < tiles.window_end)
        whole &= (row >= tiles.whole_begin) & (row < tiles.whole_end)
    if mask.tree is not None and not OF_KEYS:
        visited, whole = tiles_in_branches(mask, rows, tiles, tile, visited, whole, BLOCK)
    if mask.q_ranges is not None:
        shown, shown_whole = tiles_in_ranges(mask, rows, tiles, row, exists, BLOCK, OF_KEYS)
        visited |= exists & shown
        whole |= loaded_whole & shown_whole
    return visited & ~whole if MASKED else whole
