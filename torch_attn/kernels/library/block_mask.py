"""Block masks: the tiles that a list keeps, out of those visible to some rows.

A list (`twin_attention.contract.block_mask.BlockMask`) is in increasing order, so the tiles that
the window shows are adjacent. A program walks their concatenated rows like dense rows. Lists are
unchecked data: counts are clamped to them, tiles to the tensors.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from twin_attention.contract.operands import AttentionOperands, BlockSparseOperands
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec

# Tiles of a list that a search reads at once.
LIST_SCAN_WIDTH = tl.constexpr(256)
NO_TILE = tl.constexpr(2**31 - 1)


class Lists(NamedTuple):
    """The lists of a block mask, of keys for each tile of queries, or the other way round.

    Attributes:
        counts, tiles: tiles of each list, and the lists of `width` tiles, int32.
        batch_stride, head_stride: lists per sequence and per head, 0 if all share theirs.
        tile, tile_other: rows of a tile that has a list, and of a listed tile.
        of_group: lists of a kv head's query heads: one each, or one for all.
    """

    counts: Any
    tiles: Any
    batch_stride: Any = None
    head_stride: Any = None
    width: Any = None
    tile: Any = None
    tile_other: Any = None
    of_group: Any = None


@triton.jit
def find_list(lists, batch, head, tile):
    of_batch = tl.cast(batch, tl.int64) * lists.batch_stride
    index = of_batch + tl.cast(head, tl.int64) * lists.head_stride + tile
    list_ptr = lists.tiles + index * lists.width
    return list_ptr, tl.minimum(tl.load(lists.counts + index), lists.width)


@triton.jit
def kept_tiles(lists, rows, head, begin, before, full, after, BLOCK: tl.constexpr):
    """Narrow the result of `visible_tiles` to the tiles that a head's list keeps.

    BLOCK divides `lists.tile_other`. Return the list, or 0; and (begin, before, full, after) of the
    listed tiles' concatenated rows.
    """
    list_ptr = 0
    if lists is not None:
        list_ptr, count = find_list(lists, rows.batch, head, rows.start // lists.tile)
        begin, before, full, after = _count_kept(
            list_ptr, count, begin, before, full, after, BLOCK, lists.tile_other
        )
    return list_ptr, begin, before, full, after


@triton.jit
def _count_kept(
    list_ptr, count, begin, before, full, after, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    # Tiles from `whole` to `whole_end` are visible in full.
    first = begin // TILE
    whole = tl.cdiv(begin + before * BLOCK, TILE)
    whole_end = tl.maximum((begin + (before + full) * BLOCK) // TILE, whole)
    end = tl.cdiv(begin + (before + full + after) * BLOCK, TILE)
    # Count the listed tiles before each bound.
    n_first = tl.zeros([LIST_SCAN_WIDTH], tl.int32)
    n_whole = tl.zeros([LIST_SCAN_WIDTH], tl.int32)
    n_whole_end = tl.zeros([LIST_SCAN_WIDTH], tl.int32)
    n_end = tl.zeros([LIST_SCAN_WIDTH], tl.int32)
    for start in tl.range(0, count, LIST_SCAN_WIDTH, num_stages=1):
        i = start + tl.arange(0, LIST_SCAN_WIDTH)
        tile = tl.load(list_ptr + i, mask=i < count, other=NO_TILE)
        n_first += (tile < first).to(tl.int32)
        n_whole += (tile < whole).to(tl.int32)
        n_whole_end += (tile < whole_end).to(tl.int32)
        n_end += (tile < end).to(tl.int32)
    first, whole = tl.sum(n_first, 0), tl.sum(n_whole, 0)
    whole_end, end = tl.sum(n_whole_end, 0), tl.sum(n_end, 0)
    per_tile: tl.constexpr = TILE // BLOCK
    return (
        first * TILE,
        (whole - first) * per_tile,
        (whole_end - whole) * per_tile,
        (end - whole_end) * per_tile,
    )


@triton.jit
def kept_row(list_ptr, row, size_other, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Return a listed row's row on the other axis; without `MASKED` its tile is within it."""
    num_tiles = size_other // TILE
    if MASKED:
        num_tiles = tl.cdiv(size_other, TILE)
    tile = tl.load(list_ptr + row // TILE)
    return tl.minimum(tl.maximum(tile, 0), num_tiles - 1) * TILE + row % TILE


def lists_of_keys(operands: AttentionOperands[Tensor]) -> Lists | None:
    if not isinstance(operands, BlockSparseOperands):
        return None
    return Lists(operands.kv_counts.contiguous(), operands.kv_tiles.contiguous())


def lists_of_queries(operands: AttentionOperands[Tensor]) -> Lists | None:
    if not isinstance(operands, BlockSparseOperands):
        return None
    return Lists(operands.q_counts.contiguous(), operands.q_tiles.contiguous())


def with_numbers(lists: Lists | None, spec: AttentionSpec, of_keys: bool) -> Lists | None:
    if lists is None:
        return None
    assert isinstance(spec, BlockSparseSpec)
    batch, heads, rows, width = lists.tiles.shape
    return lists._replace(
        batch_stride=0 if batch == 1 else heads * rows,
        head_stride=0 if heads == 1 else rows,
        width=width,
        tile=tl.constexpr(spec.tile_q if of_keys else spec.tile_kv),
        tile_other=tl.constexpr(spec.tile_kv if of_keys else spec.tile_q),
        of_group=tl.constexpr(spec.group_size if spec.mask_heads > 1 else 1),
    )
