"""Ranges of keys that a query sees, whatever its window and the keys' ends hide."""

from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plt

from pallas_attn.integers import quotient
from pallas_attn.kernels.library.ranges import BLOCK_TOKENS, LARGEST, in_blocks
from pallas_attn.kernels.library.tiles import minimum
from twin_attention.contract.operands import AttentionOperands, FlashOperands, VarlenOperands


class QueryRanges(NamedTuple):
    """Ranges of a batch element's queries, [Sq, R, 2] or [Tq, R, 2], and `blocks_of_queries`."""

    bounds: Any = None
    blocks: Any = None


class Bounds(NamedTuple):
    """Bounds of one range of some queries: of any query's keys, then of all queries' keys."""

    begin: Any
    end: Any
    all_begin: Any
    all_end: Any

    def show(self, begin, end):
        """Return which keys begin .. end any query sees, and which all queries see in full."""
        shown = (begin < self.end) & (end > self.begin)
        return shown, (begin >= self.all_begin) & (end <= self.all_end)


class OwnKeys(NamedTuple):
    """A program's keys first .. last; row, end: their sequence's rows, as `blocks` count."""

    blocks: Any
    first: Any
    last: Any
    row: Any
    end: Any


def in_ranges(mask, rows, others, of_keys):
    own, other = rows.rows[:, None], others.rows[None, :]
    in_own, in_other = own < rows.end, other < rows.size_other
    bounds = mask.q_ranges.bounds
    if of_keys:
        query, key = rows.first_other + other, own - rows.first
        return keys_in_ranges(bounds, query, in_other, key, in_own)
    return keys_in_ranges(bounds, own, in_own, other, in_other)


def keys_in_ranges(bounds, query, is_query, key, is_key):
    seen = []
    for i in range(bounds.shape[1]):
        begin, end = (plt.load(bounds.at[query, i, x], mask=is_query, other=0) for x in (0, 1))
        seen.append((key >= begin) & (key < end))
    return reduce(or_, seen) & is_key


def bounds_of_queries(bounds, query, exists, size):
    if bounds is None:
        return None
    found = []
    for i in range(bounds.shape[1]):
        begin = plt.load(bounds.at[query, i, 0], mask=exists, other=LARGEST)
        end = plt.load(bounds.at[query, i, 1], mask=exists, other=0)
        begin, end = jnp.maximum(begin, 0), jnp.minimum(end, size)
        is_some = begin < end
        begin, end = jnp.where(is_some, begin, LARGEST), jnp.where(is_some, end, 0)
        of_all = jnp.where(exists, begin, 0), jnp.where(exists, end, LARGEST)
        found.append(Bounds(jnp.min(begin), jnp.max(end), jnp.max(of_all[0]), jnp.min(of_all[1])))
    return found


def own_keys_of(mask, rows):
    if mask.q_ranges.blocks is None:
        return None
    last = minimum(rows.start + rows.rows.shape[0], rows.end)
    end = rows.first_other + rows.size_other
    return OwnKeys(
        mask.q_ranges.blocks, rows.start - rows.first, last - rows.first, rows.first_other, end
    )


def tiles_in_ranges(ranges, row, exists, block):
    if not isinstance(ranges, OwnKeys):
        shown, whole = zip(*(x.show(row, row + block) for x in ranges), strict=True)
        return reduce(or_, shown), reduce(or_, whole)
    blocks, first, last, first_row, end_row = ranges
    row = first_row + row
    shown, whole = row != row, exists & (row + block <= end_row)
    last_block = (jnp.minimum(row + block, end_row) - 1) // BLOCK_TOKENS
    for n in range((block + BLOCK_TOKENS - 2) // BLOCK_TOKENS + 1):
        i, of_block = jnp.minimum(quotient(row, BLOCK_TOKENS) + n, last_block), row != row
        for x in range(blocks.shape[2]):
            begin, end, all_begin, all_end = (
                plt.load(blocks.at[i, kind, x], mask=exists, other=0) for kind in range(4)
            )
            shown = shown | ((begin < last) & (end > first))
            of_block = of_block | ((all_begin <= first) & (all_end >= last))
        whole = whole & of_block
    return shown, whole


def ranges_of(operands: AttentionOperands[Array]) -> QueryRanges:
    if not isinstance(operands, FlashOperands | VarlenOperands) or operands.q_ranges is None:
        return QueryRanges()
    return QueryRanges(operands.q_ranges.reshape(-1, *operands.q_ranges.shape[-3:]))


def with_blocks(ranges: QueryRanges) -> QueryRanges:
    if ranges.bounds is None:
        return ranges
    batch, size, number, _ = ranges.bounds.shape
    x = in_blocks(ranges.bounds.reshape(batch, size, 2 * number), 0)
    begins, ends = x[..., ::2], x[..., 1::2]
    begins = jnp.where(begins >= ends, LARGEST, begins)
    blocks = jnp.stack((begins.min(2), ends.max(2), begins.max(2), ends.min(2)), 2)
    return ranges._replace(blocks=blocks)
