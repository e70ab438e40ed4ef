"""Masks: the operands that say which keys a query sees."""

from typing import Any, NamedTuple

from pallas_attn.kernels.library.block_mask import Lists, lists_of_keys, lists_of_queries
from pallas_attn.kernels.library.intervals import (
    RowIntervals,
    intervals_of_keys,
    intervals_of_queries,
)
from pallas_attn.kernels.library.query_ranges import QueryRanges, ranges_of, with_blocks
from pallas_attn.kernels.library.segments import Segments, segment_ranges
from pallas_attn.kernels.library.sequences import Offsets, offsets_of
from pallas_attn.kernels.library.tree import Depths, Tree, tree_of
from pallas_attn.launch import flash_arguments
from twin_attention.contract.operands import AttentionOperands, FlashOperands
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec


class Mask(NamedTuple):
    """Operands that say which keys a query sees, or None.

    A program reads all offsets and intervals, what its batch element has of the others, and its
    head's lists, or those of its group's heads if these have their own.
    """

    offsets: Offsets
    segments: Segments
    lists: Lists
    tree: Tree
    depths: Depths
    q_ranges: QueryRanges
    intervals: RowIntervals


def mask_of_keys(operands: AttentionOperands[Any], spec: AttentionSpec) -> Mask:
    lists, tree = lists_of_keys(operands), tree_of(operands, spec)
    intervals, ranges = intervals_of_keys(operands), ranges_of(operands)
    return Mask(offsets_of(operands), _segments(operands, 1), lists, *tree, ranges, intervals)


def mask_of_queries(operands: AttentionOperands[Any], spec: AttentionSpec) -> Mask:
    lists, tree = lists_of_queries(operands), tree_of(operands, spec)
    intervals, ranges = intervals_of_queries(operands), with_blocks(ranges_of(operands))
    return Mask(offsets_of(operands), _segments(operands, 0), lists, *tree, ranges, intervals)


def _segments(operands: AttentionOperands[Any], visited: int) -> Segments:
    if not isinstance(operands, FlashOperands):
        return Segments()
    ids = operands.q_segment_ids, operands.kv_segment_ids
    return Segments(*ids, segment_ranges(ids[visited]))


def pair_arguments(spec: AttentionSpec, interpreted: bool) -> dict[str, Any]:
    list_tile = (spec.tile_q, spec.tile_kv) if isinstance(spec, BlockSparseSpec) else None
    arguments = flash_arguments(spec, interpreted)
    return arguments | {"dropout": spec.dropout, "list_tile": list_tile}
