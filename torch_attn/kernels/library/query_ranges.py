"""Ranges of keys that a query sees, whatever its window and the keys' ends hide.

A tile is skipped if neither the window nor a range shows it, and needs no mask if a range of each
query has all of it. Kernels that visit queries read bounds of the ranges of every BLOCK_TOKENS
queries, from the host. Ranges are unchecked data, clamped to the keys.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.ranges import BLOCK_TOKENS, LARGEST, SCAN_WIDTH, in_blocks
from twin_attention.contract.operands import AttentionOperands, FlashOperands, VarlenOperands
from twin_attention.contract.spec import AttentionSpec


class QueryRanges(NamedTuple):
    """Ranges of queries, [B, Sq, R, 2] or [Tq, R, 2], int32, contiguous; `number` is R."""

    bounds: Any
    number: Any = None


@triton.jit
def in_ranges(mask, rows, others, OF_KEYS: tl.constexpr, ANY_START: tl.constexpr = False):
    """Return which keys are in a range of each query."""
    own, other = rows.rows[:, None], others.rows[None, :]
    in_own, in_other = own < rows.end, other < rows.size_other
    if ANY_START:
        in_other &= other >= 0
    if OF_KEYS:
        row = rows.batch * rows.size_other + rows.first_other + other
        seen = keys_in_ranges(mask.q_ranges, row, in_other, own - rows.first, in_own)
    else:
        row = rows.batch * rows.end + own
        seen = keys_in_ranges(mask.q_ranges, row, in_own, other, in_other)
    return seen


@triton.jit
def keys_in_ranges(ranges, query, is_query, key, is_key):
    """Return which pairs are in a range; `query` is its row in the ranges."""
    seen = is_query & is_key & False
    for i in tl.static_range(ranges.number):
        range_ptr = ranges.bounds + (query * ranges.number + i) * 2
        begin = tl.load(range_ptr, mask=is_query, other=0)
        end = tl.load(range_ptr + 1, mask=is_query, other=0)
        seen |= (key >= begin) & (key < end)
    return seen & is_key


@triton.jit
def bounds_of_queries(ranges, query, exists, size):
    """Return bounds of some queries' ranges, [number] each: any query's, then all's."""
    number: tl.constexpr = ranges.number
    range_ptr = ranges.bounds + (query[:, None] * number + tl.arange(0, number)[None, :]) * 2
    exists = exists[:, None]
    begin = tl.maximum(tl.load(range_ptr, mask=exists, other=LARGEST), 0)
    end = tl.minimum(tl.load(range_ptr + 1, mask=exists, other=0), size)
    is_some = begin < end
    least, greatest = tl.where(is_some, begin, LARGEST), tl.where(is_some, end, 0)
    begin, end = tl.where(exists, least, 0), tl.where(exists, greatest, LARGEST)
    return tl.min(least, 0), tl.max(greatest, 0), tl.max(begin, 0), tl.min(end, 0)


@triton.jit
def tiles_in_ranges(mask, rows, tiles, row, exists, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr):
    """Return which tiles at `row` of the other axis ranges show, in part and in full."""
    if OF_KEYS:
        shown, whole = _tiles_of_queries(mask, rows, row, exists, BLOCK)
    else:
        bounds = tiles.range_begin, tiles.range_end, tiles.all_begin, tiles.all_end
        shown, whole = tiles_in_bounds(bounds, row, BLOCK)
    return shown, whole


@triton.jit
def tiles_in_bounds(bounds, row, BLOCK: tl.constexpr):
    """Return which tiles of keys ranges show, in part and in full, by `bounds_of_queries`."""
    range_begin, range_end, all_begin, all_end = bounds
    begin, last = row[:, None], row[:, None] + BLOCK
    shown = (begin < range_end[None, :]) & (last > range_begin[None, :])
    whole = (begin >= all_begin[None, :]) & (last <= all_end[None, :])
    return _any(shown), _any(whole)


@triton.jit
def _tiles_of_queries(mask, rows, row, exists, BLOCK: tl.constexpr):
    number: tl.constexpr = mask.q_ranges.number
    first = rows.start - rows.first
    last = tl.minimum(rows.start + rows.rows.shape[0], rows.end) - rows.first
    # Blocks begin with the batch element, or the first packed sequence.
    num_blocks = tl.cdiv(rows.first_other + rows.size_other, BLOCK_TOKENS)
    blocks = mask.q_blocks + rows.batch * num_blocks * (4 * number) + tl.arange(0, number)[None, :]
    row += rows.first_other
    last_block = tl.minimum(row + BLOCK, rows.first_other + rows.size_other) - 1
    shown = tl.zeros([SCAN_WIDTH], tl.int1)
    whole = exists & (row + BLOCK <= rows.first_other + rows.size_other)
    for n in tl.static_range((BLOCK + BLOCK_TOKENS - 2) // BLOCK_TOKENS + 1):
        block = tl.minimum(row // BLOCK_TOKENS + n, last_block // BLOCK_TOKENS)
        block_ptr = blocks + block[:, None] * (4 * number)
        begin = tl.load(block_ptr, mask=exists[:, None], other=LARGEST)
        end = tl.load(block_ptr + number, mask=exists[:, None], other=0)
        all_begin = tl.load(block_ptr + 2 * number, mask=exists[:, None], other=LARGEST)
        all_end = tl.load(block_ptr + 3 * number, mask=exists[:, None], other=0)
        shown |= _any((begin < last) & (end > first))
        whole &= _any((all_begin <= first) & (all_end >= last))
    return shown, whole


@triton.jit
def _any(x):
    return tl.max(x.to(tl.int32), 1) > 0


def ranges_of(operands: AttentionOperands[Tensor]) -> QueryRanges | None:
    if not isinstance(operands, FlashOperands | VarlenOperands) or operands.q_ranges is None:
        return None
    return QueryRanges(operands.q_ranges.contiguous())


def with_number(ranges: QueryRanges | None, spec: AttentionSpec) -> QueryRanges | None:
    return ranges and ranges._replace(number=tl.constexpr(spec.ranges))


def blocks_of_queries(ranges: QueryRanges | None) -> Tensor | None:
    """Return bounds for every BLOCK_TOKENS queries, [B, blocks, 4, R] int32, or None.

    They are the least begin and the greatest end of nonempty ranges, then the greatest begin and
    the least end of all.
    """
    if ranges is None:
        return None
    bounds = ranges.bounds
    size, number, _ = bounds.shape[-3:]
    batch = bounds.shape[0] if bounds.ndim == 4 else 1
    x = in_blocks(bounds.view(batch, size, 2 * number), 0)
    begins, ends = x[..., ::2], x[..., 1::2]
    begins = begins.masked_fill(begins >= ends, LARGEST.value)
    blocks = bounds.new_empty((*x.shape[:2], 4, number))
    blocks[:, :, 0] = begins.amin(2)
    blocks[:, :, 1] = ends.amax(2)
    blocks[:, :, 2] = begins.amax(2)
    blocks[:, :, 3] = ends.amin(2)
    return blocks
