"""Intervals: each row of one part of a sequence sees an interval of another part's rows.

The bounds are data on the device that never decrease, so a tile's first and last rows say which
tiles it visits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.tiles import tiles_between
from twin_attention.contract.operands import AttentionOperands, PartialOperands

# Begin of a nonexistent row's interval.
LARGEST_ROW = tl.constexpr(2**31 - 1)


class RowIntervals(NamedTuple):
    """Hold what each resident row sees of the other axis, [S] int32."""

    begins: Any
    ends: Any


@triton.jit
def load_intervals(intervals, start, num_rows, BLOCK: tl.constexpr):
    """Load rows' bounds; nonexistent rows see nothing."""
    rows = start + tl.arange(0, BLOCK)
    begins = tl.load(intervals.begins + rows, mask=rows < num_rows, other=LARGEST_ROW)
    ends = tl.load(intervals.ends + rows, mask=rows < num_rows, other=0)
    return begins, ends


@triton.jit
def tiles_of_intervals(rows, BLOCK_OTHER: tl.constexpr):
    begins, ends = rows.begins, rows.ends
    exists = begins < LARGEST_ROW
    begin, end = tl.min(begins, 0), tl.max(ends, 0)
    full_begin = tl.max(tl.where(exists, begins, 0), 0)
    full_end = tl.min(tl.where(exists, ends, LARGEST_ROW), 0)
    end = tl.where(end > begin, end, 0)
    begin = begin // BLOCK_OTHER * BLOCK_OTHER
    return tiles_between(begin, full_begin, full_end, end, BLOCK_OTHER)


@triton.jit
def in_interval(rows, others):
    other = others.rows[None, :]
    return (other >= rows.begins[:, None]) & (other < rows.ends[:, None])


def intervals_of_keys(operands: AttentionOperands[Tensor]) -> RowIntervals | None:
    if not isinstance(operands, PartialOperands):
        return None
    return RowIntervals(operands.key_begins, operands.key_ends)


def intervals_of_queries(operands: AttentionOperands[Tensor]) -> RowIntervals | None:
    if not isinstance(operands, PartialOperands):
        return None
    return RowIntervals(operands.query_begins, operands.query_ends)
