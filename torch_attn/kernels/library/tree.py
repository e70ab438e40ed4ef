"""Trees: keys that have an end, and windows of depths.

Key j is seen by the queries before ``ends[j]`` that `causal` allows. The host computes the greatest
and the least end of every BLOCK_TOKENS keys. A tile of keys is skipped if no end is after the first
query, and needs no mask if all are after the last.

A window of depths is a second end: ``reach[j]`` is the greatest depth of a query that sees key j.
Ends and depths are unchecked data: a program visits only tiles that the window shows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.ranges import BLOCK_TOKENS, LARGEST, SCAN_WIDTH, in_blocks
from twin_attention.contract.operands import AttentionOperands, FlashOperands, VarlenOperands
from twin_attention.contract.spec import DEPTH_MAX, AttentionSpec


class Tree(NamedTuple):
    """Ends of the keys, [B, Skv] or [Tkv], int32.

    `ranges` are `tree_ranges` for kernels that visit keys, or the lists of `kernels.tile_lists`.
    """

    ends: Any
    ranges: Any


class Depths(NamedTuple):
    """Depths of queries [B, Sq] or [Tq], and keys' reach, shaped as `Tree.ends`, int32.

    They are not part of `Tree`: Triton 3.6 takes no None in a nested tuple.
    """

    q: Any
    reach: Any


@triton.jit
def in_branch(mask, rows, others, OF_KEYS: tl.constexpr, ANY_START: tl.constexpr = False):
    """Return which keys end after each query, and reach its depth."""
    own, other = rows.rows[:, None], others.rows[None, :]
    in_own, in_other = own < rows.end, other < rows.size_other
    if ANY_START:
        other = tl.maximum(other, 0)
    row, row_other = rows.batch * rows.end, rows.batch * rows.size_other + rows.first_other
    if OF_KEYS:
        row_q, query, is_query = row_other, other, in_other
        row_kv, key, is_key = row, own, in_own
        position = other + (-rows.diagonal - rows.first)
    else:
        row_q, query, is_query = row, own, in_own
        row_kv, key, is_key = row_other, other, in_other
        position = own + rows.diagonal
    seen = position < tl.load(mask.tree.ends + row_kv + key, mask=is_key, other=0)
    if mask.depths is not None:
        reach = tl.load(mask.depths.reach + row_kv + key, mask=is_key, other=0)
        depth = tl.load(mask.depths.q + row_q + query, mask=is_query, other=0)
        seen = seen & (depth <= reach)
    return seen


@triton.jit
def find_path(mask, rows):
    """Return an element's ranges, and its queries' least and greatest depth, or 0."""
    num_ranges: tl.constexpr = 2 if mask.depths is None else 4
    ranges = mask.tree.ranges + rows.batch * num_ranges * tl.cdiv(rows.size_other, BLOCK_TOKENS)
    least, greatest = 0, 0
    if mask.depths is not None:
        depth_ptr = mask.depths.q + rows.batch * rows.end + rows.rows
        is_query = rows.rows < rows.end
        least = tl.min(tl.load(depth_ptr, mask=is_query, other=LARGEST), 0)
        greatest = tl.max(tl.load(depth_ptr, mask=is_query, other=-LARGEST), 0)
    return ranges, least, greatest


@triton.jit
def tiles_in_branches(mask, rows, tiles, tile, exists, whole, BLOCK: tl.constexpr):
    """Return which tiles have a key that ends behind a query, and which whole ones no other."""
    # Ranges begin with the batch element, or the first packed sequence.
    row = rows.first_other + tiles.begin + tile * BLOCK
    last_row = rows.first_other + rows.size_other - 1
    block, last_block = row // BLOCK_TOKENS, tl.minimum(row + BLOCK - 1, last_row)
    last_block = last_block // BLOCK_TOKENS
    first = rows.start + rows.diagonal
    last = tl.minimum(rows.start + rows.rows.shape[0], rows.end) - 1 + rows.diagonal
    visited = tl.zeros([SCAN_WIDTH], tl.int1)
    num_ranges: tl.constexpr = 2 if mask.depths is None else 4
    for n in tl.static_range((BLOCK + BLOCK_TOKENS - 2) // BLOCK_TOKENS + 1):
        range_ptr = tiles.ranges + tl.minimum(block + n, last_block) * num_ranges
        seen = tl.load(range_ptr, mask=exists, other=0) > first
        whole &= tl.load(range_ptr + 1, mask=exists, other=0) > last
        if mask.depths is not None:
            seen &= tl.load(range_ptr + 2, mask=exists, other=0) >= tiles.least
            whole &= tl.load(range_ptr + 3, mask=exists, other=0) >= tiles.greatest
        visited |= exists & seen
    return visited, whole


@triton.jit
def ending_tiles(mask, keys, begin, before, full, after, BLOCK: tl.constexpr):
    """Narrow the result of `visible_tiles` to queries before the end of some keys."""
    is_key = keys.rows < keys.end
    ends = tl.load(mask.tree.ends + keys.batch * keys.end + keys.rows, mask=is_key, other=0)
    size = keys.end - keys.first
    ends = tl.minimum(tl.maximum(ends, 0), size)
    first_position = -keys.diagonal - keys.first  # of query 0
    end = tl.max(ends, 0) - first_position
    full_end = tl.min(tl.where(is_key, ends, size), 0) - first_position
    visible = tl.cdiv(tl.maximum(end - begin, 0), BLOCK)
    visible = tl.minimum(visible, before + full + after)
    before = tl.minimum(before, visible)
    whole = tl.maximum(full_end - begin, 0) // BLOCK - before
    full = tl.minimum(tl.minimum(tl.maximum(whole, 0), full), visible - before)
    if mask.depths is not None:
        full = 0
    return begin, before, full, visible - before - full


def tree_ranges(ends: Tensor, reach: Tensor | None) -> Tensor:
    """Return ranges for every BLOCK_TOKENS keys [B, Skv] or [Tkv], [B, blocks, 2] int32.

    They are the greatest and the least end, then the same of reach, 4 in all.
    """
    values = [in_blocks(x.view(-1, x.shape[-1]), 0) for x in (ends, reach) if x is not None]
    batch, blocks, _ = values[0].shape
    ranges = ends.new_empty((batch, blocks, 2 * len(values)))
    for n, x in enumerate(values):
        ranges[:, :, 2 * n] = x.amax(2)
        ranges[:, :, 2 * n + 1] = x.amin(2)
    return ranges


def ends_of(operands: AttentionOperands[Tensor]) -> Tensor | None:
    if not isinstance(operands, FlashOperands | VarlenOperands) or operands.kv_ends is None:
        return None
    return operands.kv_ends.contiguous()


def depths_of(operands: AttentionOperands[Tensor], spec: AttentionSpec) -> Depths | None:
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
    ends = ends_of(operands)
    if ends is None:
        return None, None
    depths = depths_of(operands, spec)
    return Tree(ends, tree_ranges(ends, depths and depths.reach)), depths
