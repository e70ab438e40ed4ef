"""Trees: keys that have an end, and windows of depths."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plt

from pallas_attn.integers import quotient
from pallas_attn.kernels.library.ranges import BLOCK_TOKENS, LARGEST, in_blocks
from pallas_attn.kernels.library.tiles import Visible, cdiv, minimum
from twin_attention.contract.operands import AttentionOperands, FlashOperands, VarlenOperands
from twin_attention.contract.spec import DEPTH_MAX, AttentionSpec


class Tree(NamedTuple):
    """Ends of a batch element's keys, [Skv] or [Tkv] int32, and their `tree_ranges`; or None."""

    ends: Any = None
    ranges: Any = None


class Depths(NamedTuple):
    """Depths of a batch element: q of its queries; reach, the greatest that sees each key."""

    q: Any = None
    reach: Any = None


class Branches(NamedTuple):
    """Numbers that tell which tiles of keys some queries see.

    Attributes:
        ranges: ranges of the batch element's keys.
        row, last_row: first row of tile 0, and last row of the sequence, as `ranges` count.
        first, last: positions of the first and of the last query.
        least, greatest: least and greatest depth of the queries, None without depths.
    """

    ranges: Any
    row: Any
    last_row: Any
    first: Any
    last: Any
    least: Any
    greatest: Any


def in_branch(mask, rows, others, of_keys):
    own, other = rows.rows[:, None], others.rows[None, :]
    position, other_row = own + rows.diagonal, rows.first_other + other
    query, is_query, key, is_key = own, own < rows.end, other_row, other < rows.size_other
    if of_keys:
        position = other - (rows.diagonal + rows.first)
        query, is_query, key, is_key = key, is_key, query, is_query
    seen = position < plt.load(mask.tree.ends.at[key], mask=is_key, other=0)
    if mask.depths.reach is not None:
        reach = plt.load(mask.depths.reach.at[key], mask=is_key, other=0)
        depth = plt.load(mask.depths.q.at[query], mask=is_query, other=0)
        seen = seen & (depth <= reach)
    return seen


def find_branches(mask, rows, begin):
    if mask.tree.ends is None:
        return None
    least = greatest = None
    if mask.depths.reach is not None:
        depth, is_query = mask.depths.q.at[rows.rows], rows.rows < rows.end
        least = jnp.min(plt.load(depth, mask=is_query, other=LARGEST))
        greatest = jnp.max(plt.load(depth, mask=is_query, other=-LARGEST))
    last = minimum(rows.start + rows.rows.shape[0], rows.end) - 1
    return Branches(
        mask.tree.ranges, rows.first_other + begin, rows.first_other + rows.size_other - 1,
        rows.start + rows.diagonal, last + rows.diagonal, least, greatest,
    )  # fmt: skip


def tiles_in_branches(branches, tile, exists, whole, block):
    row = branches.row + tile * block
    first_block = quotient(row, BLOCK_TOKENS)
    last_block = quotient(jnp.minimum(row + block - 1, branches.last_row), BLOCK_TOKENS)
    visited = row != row
    for n in range((block + BLOCK_TOKENS - 2) // BLOCK_TOKENS + 1):
        i = jnp.minimum(first_block + n, last_block)
        greatest_end, least_end, *of_reach = (
            plt.load(branches.ranges.at[i, x], mask=exists, other=0)
            for x in range(branches.ranges.shape[1])
        )
        seen = greatest_end > branches.first
        whole = whole & (least_end > branches.last)
        if of_reach:
            seen = seen & (of_reach[0] >= branches.least)
            whole = whole & (of_reach[1] >= branches.greatest)
        visited = visited | (exists & seen)
    return visited, whole


def ending_tiles(mask, keys, visible, block):
    if mask.tree.ends is None:
        return visible
    begin, before, full, after = visible
    size, diagonal, is_key = keys.end - keys.first, keys.diagonal + keys.first, keys.rows < keys.end
    ends = plt.load(mask.tree.ends.at[keys.rows], mask=is_key, other=0)
    ends = jnp.minimum(jnp.maximum(ends, 0), size)
    end = jnp.max(ends) + diagonal
    full_end = jnp.min(jnp.where(is_key, ends, size)) + diagonal
    count = cdiv(jnp.maximum(end - begin, 0), block)
    count = jnp.minimum(count, before + full + after)
    before = jnp.minimum(before, count)
    whole = quotient(jnp.maximum(full_end - begin, 0), block) - before
    full = jnp.minimum(jnp.minimum(jnp.maximum(whole, 0), full), count - before)
    if mask.depths.reach is not None:
        full = jnp.int32(0)
    return Visible(begin, before, full, count - before - full)


def tree_ranges(ends: Array, reach: Array | None) -> Array:
    values = (in_blocks(x, 0) for x in (ends, reach) if x is not None)
    return jnp.stack([extreme for x in values for extreme in (x.max(2), x.min(2))], 2)


def tree_of(operands: AttentionOperands[Array], spec: AttentionSpec) -> tuple[Tree, Depths]:
    if not isinstance(operands, FlashOperands | VarlenOperands) or operands.kv_ends is None:
        return Tree(), Depths()
    ends, depths = operands.kv_ends, Depths()
    if spec.depth_window is not None:
        assert operands.q_depths is not None
        assert operands.kv_depths is not None
        reach = operands.kv_depths + min(spec.depth_window, DEPTH_MAX)
        depths = Depths(*(x.reshape(-1, x.shape[-1]) for x in (operands.q_depths, reach)))
    ends = ends.reshape(-1, ends.shape[-1])
    return Tree(ends, tree_ranges(ends, depths.reach)), depths
