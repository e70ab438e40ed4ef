"""Trees: keys that have an end, and windows of depths.

Key j is seen by the queries at positions before ``ends[j]`` that `causal` allows. For every
BLOCK_TOKENS keys the host computes the greatest and the least end. A tile of keys is skipped if no
end is after the first query, and needs no mask if all ends are after the last query. The remaining
tiles of the window form runs: in depth-first order, one for each stretch of the path from the root.
A program walks one run after the other, each like dense rows. The queries of a tile of keys are one
run.

A window of depths is a second end: ``reach[j]`` is the greatest depth of a query that sees key j.

Ends and depths are unchecked data. Whatever their values, a program visits only tiles that the
window shows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.ranges import BLOCK_TOKENS, LARGEST, SCAN_WIDTH, in_blocks
from twin_attention.contract.operands import AttentionOperands, FlashOperands, VarlenOperands
from twin_attention.contract.spec import DEPTH_MAX, AttentionSpec


class Tree(NamedTuple):
    """Hold the ends of keys, contiguous int32.

    Attributes:
        ends: ends of the keys, [B, Skv], or [Tkv] for packed sequences.
        ranges: `tree_ranges`, which kernels that visit keys read; for the explicit kernels, the
            lists of `kernels.tile_lists`.
    """

    ends: Any
    ranges: Any


class Depths(NamedTuple):
    """Hold the depths that a window counts, contiguous int32.

    They are not part of `Tree`: Triton 3.6 takes no None in a nested tuple.

    Attributes:
        q: depths of the queries, [B, Sq], or [Tq] for packed sequences.
        reach: the greatest depth that sees each key, shaped as `Tree.ends`.
    """

    q: Any
    reach: Any


class Runs(NamedTuple):
    """Hold the numbers that tell which tiles of keys some queries see.

    Attributes:
        ranges: ranges of the batch element's keys.
        row, last_row: first row of the first tile, and last row of the sequence, as `ranges` count.
        before, full, count: `count` tiles that the window shows; after `before`, `full` need no
            mask for it.
        first, last: positions of the first and of the last query.
        least, greatest: least and greatest depth of the queries, 0 without depths.
    """

    ranges: Any
    row: Any
    last_row: Any
    before: Any
    full: Any
    count: Any
    first: Any
    last: Any
    least: Any
    greatest: Any


@triton.jit
def in_branch(tree, depths, row_q, query, size_q, row_kv, key, size_kv, position):
    """Return which keys end after each query, and reach its depth.

    Args:
        tree, depths: `Tree`, and `Depths` or None.
        row_q, row_kv: rows of the sequence's first query and key.
        query, key: rows counted from these, broadcast against each other.
        size_q, size_kv: how many queries and keys there are.
        position: positions of the queries, counted as keys.
    """
    ends = tl.load(tree.ends + row_kv + key, mask=key < size_kv, other=0)
    seen = position < ends
    if depths is not None:
        reach = tl.load(depths.reach + row_kv + key, mask=key < size_kv, other=0)
        depth = tl.load(depths.q + row_q + query, mask=query < size_q, other=0)
        seen = seen & (depth <= reach)
    return seen


@triton.jit
def find_runs(
    tree, depths, batch, row_q, start, size, row_kv, size_kv, diagonal, begin, before, full, after,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the `Runs` of the queries start .. start + BLOCK.

    Args:
        tree, depths: as `in_branch` takes them.
        batch: the batch element, 0 for packed sequences.
        row_q, row_kv: as `in_branch` takes them.
        start, size: the queries' first row, and the end of the sequence's queries.
        size_kv: how many keys the sequence has.
        diagonal: position of query 0.
        begin, before, full, after: as `visible_tiles` returns them.
        BLOCK: rows of the tile.
    """
    ranges = tree.ranges
    least, greatest = 0, 0
    if depths is None:
        ranges += batch * 2 * tl.cdiv(size_kv, BLOCK_TOKENS)
    else:
        ranges += batch * 4 * tl.cdiv(size_kv, BLOCK_TOKENS)
        rows = start + tl.arange(0, BLOCK)
        depth_ptr = depths.q + row_q + rows
        least = tl.min(tl.load(depth_ptr, mask=rows < size, other=LARGEST), 0)
        greatest = tl.max(tl.load(depth_ptr, mask=rows < size, other=-LARGEST), 0)
    last = tl.minimum(start + BLOCK, size) - 1
    # Ranges begin with the batch element, or with the first packed sequence.
    first_row = (row_kv - batch * size_kv).to(tl.int32)
    return Runs(
        ranges, first_row + begin, first_row + size_kv - 1, before, full, before + full + after,
        start + diagonal, last + diagonal, least, greatest,
    )  # fmt: skip


@triton.jit
def count_runs(depths, runs, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Return how many runs of tiles of one kind there are: 1 without a tree."""
    count = 1
    if runs is not None:
        begun = tl.zeros([SCAN_WIDTH], tl.int32)
        for start in tl.range(0, runs.count, SCAN_WIDTH, num_stages=1):
            tile = start + tl.arange(0, SCAN_WIDTH)
            is_first = _is_kind(depths, runs, tile, BLOCK, MASKED)
            is_first &= ~_is_kind(depths, runs, tile - 1, BLOCK, MASKED)
            begun += is_first.to(tl.int32)
        count = tl.sum(begun, 0)
    return count


@triton.jit
def next_run(depths, runs, tile, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Return the first tile, and the end, of the next run of one kind from `tile` on.

    `tile` is 0 or the end of a run.
    """
    first = tl.full([SCAN_WIDTH], 0, tl.int32) + runs.count
    end = first
    for start in tl.range(tile, runs.count, SCAN_WIDTH, num_stages=1):
        i = start + tl.arange(0, SCAN_WIDTH)
        # None is before `tile`, but Triton 3.6 drops a number that only loop bounds depend on.
        is_kind = _is_kind(depths, runs, i, BLOCK, MASKED) & (i >= tile)
        is_last = is_kind & ~_is_kind(depths, runs, i + 1, BLOCK, MASKED)
        first = tl.minimum(first, tl.where(is_kind, i, runs.count))
        end = tl.minimum(end, tl.where(is_last, i + 1, runs.count))
    return tl.min(first, 0), tl.min(end, 0)


@triton.jit
def _is_kind(depths, runs, tile, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Return which tiles are visited with a mask, or which without one."""
    exists = (tile >= 0) & (tile < runs.count)
    row = runs.row + tile * BLOCK
    block, last_block = row // BLOCK_TOKENS, tl.minimum(row + BLOCK - 1, runs.last_row)
    last_block = last_block // BLOCK_TOKENS
    visited = tl.zeros([SCAN_WIDTH], tl.int1)
    whole = exists & (tile >= runs.before) & (tile < runs.before + runs.full)
    num_ranges: tl.constexpr = 2 if depths is None else 4
    for n in tl.static_range((BLOCK + BLOCK_TOKENS - 2) // BLOCK_TOKENS + 1):
        range_ptr = runs.ranges + tl.minimum(block + n, last_block) * num_ranges
        seen = tl.load(range_ptr, mask=exists, other=0) > runs.first
        whole &= tl.load(range_ptr + 1, mask=exists, other=0) > runs.last
        if depths is not None:
            seen &= tl.load(range_ptr + 2, mask=exists, other=0) >= runs.least
            whole &= tl.load(range_ptr + 3, mask=exists, other=0) >= runs.greatest
        visited |= exists & seen
    return visited & ~whole if MASKED else whole


@triton.jit
def ending_tiles(
    tree, depths, row_kv, key, size_kv, diagonal, begin, before, full, after, BLOCK: tl.constexpr
):
    """Narrow the result of `visible_tiles` to the tiles of queries before the end of some keys.

    Args:
        tree, depths, row_kv, key, size_kv: as `in_branch` takes them.
        diagonal: position of query 0.
        begin, before, full, after: as `visible_tiles` returns them.
        BLOCK: rows of a tile of queries.

    Returns (begin, before, full, after) again.
    """
    ends = tl.load(tree.ends + row_kv + key, mask=key < size_kv, other=0)
    ends = tl.minimum(tl.maximum(ends, 0), size_kv)
    end = tl.max(ends, 0) - diagonal
    full_end = tl.min(tl.where(key < size_kv, ends, size_kv), 0) - diagonal
    visible = tl.cdiv(tl.maximum(end - begin, 0), BLOCK)
    visible = tl.minimum(visible, before + full + after)
    before = tl.minimum(before, visible)
    whole = tl.maximum(full_end - begin, 0) // BLOCK - before
    full = tl.minimum(tl.minimum(tl.maximum(whole, 0), full), visible - before)
    if depths is not None:
        full = 0
    return begin, before, full, visible - before - full


def tree_ranges(ends: Tensor, reach: Tensor | None) -> Tensor:
    """Compute the ranges of ends, and of reaches, for every BLOCK_TOKENS keys.

    Args:
        ends: [B, Skv] int32, or [Tkv].
        reach: as `ends`, or None.

    Returns:
        [B, blocks, 2] int32: the greatest and the least end; with `reach`, its greatest and least
        follow, 4 in all. The last block is filled by 0.
    """
    values = [in_blocks(x.view(-1, x.shape[-1]), 0) for x in (ends, reach) if x is not None]
    batch, blocks, _ = values[0].shape
    ranges = ends.new_empty((batch, blocks, 2 * len(values)))
    for n, x in enumerate(values):
        ranges[:, :, 2 * n] = x.amax(2)
        ranges[:, :, 2 * n + 1] = x.amin(2)
    return ranges


def ends_of(operands: AttentionOperands[Tensor]) -> Tensor | None:
    """Return the ends of keys, contiguous; None without them."""
    if not isinstance(operands, FlashOperands | VarlenOperands) or operands.kv_ends is None:
        return None
    return operands.kv_ends.contiguous()


def depths_of(operands: AttentionOperands[Tensor], spec: AttentionSpec) -> Depths | None:
    """Return the depths that the window counts, contiguous; None where it counts none."""
    if spec.depth_window is None:
        return None
    assert isinstance(operands, FlashOperands | VarlenOperands)
    assert operands.q_depths is not None
    assert operands.kv_depths is not None
    reach = operands.kv_depths.contiguous() + min(spec.depth_window, DEPTH_MAX)
    return Depths(operands.q_depths.contiguous(), reach)


def tree_of(
    operands: AttentionOperands[Tensor], spec: AttentionSpec
) -> tuple[Tree | None, Depths | None]:
    """Return the ends of keys, and the depths that the window counts; None without them."""
    ends = ends_of(operands)
    if ends is None:
        return None, None
    depths = depths_of(operands, spec)
    return Tree(ends, tree_ranges(ends, depths and depths.reach)), depths
