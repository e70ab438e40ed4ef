"""Segment ids: which tiles may hold a query's segment, and which tokens do.

Ids come in any order. The host computes their range for every BLOCK_TOKENS tokens. A program visits
the tiles from the first to the last block whose range overlaps its own, and masks all by ids.
Padding has negative ids and may hold NaN, so it is loaded as 0; tiles before it are loaded without
a mask, and do not wait for ids.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.ranges import BLOCK_TOKENS, LARGEST, SCAN_WIDTH, in_blocks
from twin_attention.contract.operands import AttentionOperands, FlashOperands

# Ids of padding, which never match.
STAYS, VISITED = tl.constexpr(-2), tl.constexpr(-1)


class Segments(NamedTuple):
    """Segment ids q [B, Sq] and kv [B, Skv], int32.

    `ranges` are the visited tokens' `segment_ranges`, or the lists of `kernels.tile_lists`.
    """

    q: Any
    kv: Any
    ranges: Any = None


@triton.jit
def segments_of_batch(segments, batch, size, size_other, OF_KEYS: tl.constexpr):
    """Return a batch element's own ids, the others', and the others' ranges."""
    if OF_KEYS:
        own, other = segments.kv + batch * size, segments.q + batch * size_other
    else:
        own, other = segments.q + batch * size, segments.kv + batch * size_other
    return own, other, segments.ranges + batch * 3 * tl.cdiv(size_other, BLOCK_TOKENS)


@triton.jit
def load_segments(
    ids_ptr, start, num_rows, BLOCK: tl.constexpr, PADDING: tl.constexpr,
    ANY_START: tl.constexpr = False,
):  # fmt: skip
    """Load rows' ids, and which are not padding; ANY_START: start may be negative."""
    rows = start + tl.arange(0, BLOCK)
    in_axis = rows < num_rows
    if ANY_START:
        in_axis &= rows >= 0
    ids = tl.load(ids_ptr + rows, mask=in_axis, other=PADDING)
    ids = tl.where(ids < 0, PADDING, ids)
    return ids, ids >= 0


@triton.jit
def meeting_tiles(rows, begin, before, full, after, BLOCK: tl.constexpr):
    """Narrow `visible_tiles` to the rows' segments; full tiles load without a mask."""
    ids, ranges_ptr = rows.ids, rows.ranges
    least = tl.min(tl.where(ids < 0, LARGEST, ids), 0)
    greatest = tl.max(ids, 0)
    num_blocks = tl.cdiv(rows.size_other, BLOCK_TOKENS)
    end = tl.minimum(tl.cdiv(begin + (before + full + after) * BLOCK, BLOCK_TOKENS), num_blocks)
    # Find the first and the last block that may hold these segments.
    block = tl.arange(0, SCAN_WIDTH)
    first = tl.full([SCAN_WIDTH], 0, tl.int32) + num_blocks
    stop = tl.zeros([SCAN_WIDTH], tl.int32)
    for start in tl.range(begin // BLOCK_TOKENS, end, SCAN_WIDTH, num_stages=1):
        i = start + block
        low = tl.load(ranges_ptr + i, mask=i < end, other=LARGEST)
        high = tl.load(ranges_ptr + num_blocks + i, mask=i < end, other=VISITED)
        meets = (low <= greatest) & (high >= least)
        first = tl.minimum(first, tl.where(meets, i, num_blocks))
        stop = tl.maximum(stop, tl.where(meets, i + 1, 0))
    begin = tl.maximum(begin, tl.min(first, 0) * BLOCK_TOKENS // BLOCK * BLOCK)
    end = tl.max(stop, 0)
    visible = tl.cdiv(tl.maximum(end * BLOCK_TOKENS - begin, 0), BLOCK)
    # Find the first block with padding.
    padded = tl.full([SCAN_WIDTH], 0, tl.int32) + end
    for start in tl.range(begin // BLOCK_TOKENS, end, SCAN_WIDTH, num_stages=1):
        i = start + block
        any_id = tl.load(ranges_ptr + 2 * num_blocks + i, mask=i < end, other=0)
        padded = tl.minimum(padded, tl.where(any_id < 0, i, end))
    full = tl.maximum(tl.min(padded, 0) * BLOCK_TOKENS - begin, 0) // BLOCK
    return begin, 0, full, visible - full


def segment_ranges(ids: Tensor) -> Tensor:
    """Return the ranges of ids [B, S] for every BLOCK_TOKENS tokens, [B, 3, blocks] int32.

    They are the least nonnegative id, or LARGEST; the greatest; and the least, negative in a block
    with padding.
    """
    ids = in_blocks(ids, VISITED.value)
    batch, blocks, _ = ids.shape
    ranges = ids.new_empty((batch, 3, blocks))
    ranges[:, 0] = ids.masked_fill(ids < 0, LARGEST.value).amin(2)
    ranges[:, 1] = ids.amax(2)
    ranges[:, 2] = ids.amin(2)
    return ranges


def segments_of(operands: AttentionOperands[Tensor]) -> Segments | None:
    if not isinstance(operands, FlashOperands) or operands.q_segment_ids is None:
        return None
    assert operands.kv_segment_ids is not None
    return Segments(operands.q_segment_ids.contiguous(), operands.kv_segment_ids.contiguous())


def visiting_keys(segments: Segments | None) -> Segments | None:
    return segments and segments._replace(ranges=segment_ranges(segments.kv))


def visiting_queries(segments: Segments | None) -> Segments | None:
    return segments and segments._replace(ranges=segment_ranges(segments.q))
