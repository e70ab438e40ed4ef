"""Masks other than the window, each a named tuple or None."""

from typing import Any, NamedTuple

from torch import Tensor

from torch_attn.kernels.library.block_mask import (
    Lists,
    lists_of_keys,
    lists_of_queries,
    with_numbers,
)
from torch_attn.kernels.library.intervals import (
    RowIntervals,
    intervals_of_keys,
    intervals_of_queries,
)
from torch_attn.kernels.library.query_ranges import (
    QueryRanges,
    blocks_of_queries,
    ranges_of,
    with_number,
)
from torch_attn.kernels.library.segments import (
    Segments,
    segments_of,
    visiting_keys,
    visiting_queries,
)
from torch_attn.kernels.library.sequences import Offsets, offsets_of
from torch_attn.kernels.library.tree import Depths, Tree, tree_of
from torch_attn.launch import KernelCall
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec


class Mask(NamedTuple):
    """Say which keys a query sees; None for a mask that is absent.

    `q_blocks` are of portable kernels that visit queries, `tiles` the lists of `kernels.tile_lists`
    before explicit kernels. `lists` come first: in loops, Triton 3.6 loses a
    nested tuple's constants unless a constant of the outer tuple, such as None, follows.
    """

    lists: Lists | None
    offsets: Offsets
    segments: Segments | None
    tree: Tree | None
    depths: Depths | None
    q_ranges: QueryRanges | None
    q_blocks: Tensor | None
    tiles: Tensor | None
    intervals: RowIntervals | None


def mask_of_keys(operands: AttentionOperands[Tensor], spec: AttentionSpec) -> Mask:
    segments, intervals = visiting_keys(segments_of(operands)), intervals_of_keys(operands)
    lists, tree = lists_of_keys(operands), tree_of(operands, spec)
    ranges = ranges_of(operands)
    return Mask(lists, offsets_of(operands), segments, *tree, ranges, None, None, intervals)


def mask_of_queries(operands: AttentionOperands[Tensor], spec: AttentionSpec) -> Mask:
    segments, intervals = visiting_queries(segments_of(operands)), intervals_of_queries(operands)
    lists, tree = lists_of_queries(operands), tree_of(operands, spec)
    ranges = ranges_of(operands)
    blocks = blocks_of_queries(ranges)
    return Mask(lists, offsets_of(operands), segments, *tree, ranges, blocks, None, intervals)


def mask_argument(call: KernelCall, of_keys: bool) -> dict[str, Any]:
    mask = call.layouts[-1]
    lists = with_numbers(mask.lists, call.spec, of_keys)
    return {"mask": mask._replace(lists=lists, q_ranges=with_number(mask.q_ranges, call.spec))}
