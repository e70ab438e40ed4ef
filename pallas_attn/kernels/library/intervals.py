"""Intervals: a part of a sequence whose rows see an interval of another part's rows each.

The bounds are data on the device and never decrease from one row to the next, so that the tiles
which a program visits follow from those of its first and last row.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_attn.kernels.library.tiles import load_rows, tiles_between
from twin_attention.contract.operands import AttentionOperands, PartialOperands

# Where the interval of a row that does not exist begins.
LARGEST_ROW = 2**31 - 1


class RowIntervals(NamedTuple):
    """Bounds of what each row that stays sees of the other axis, [S] int32; None without them."""

    begins: Any = None
    ends: Any = None


def load_intervals(intervals, start, num_rows, block):
    """Load the bounds of rows start .. start + block: nothing for those past `num_rows`.

    Returns them as (begins, ends); None for both without intervals.
    """
    if intervals.begins is None:
        return None, None
    begins = load_rows(intervals.begins, start, num_rows, block, LARGEST_ROW)
    ends = load_rows(intervals.ends, start, num_rows, block, 0)
    return begins, ends


def tiles_of_intervals(begins, ends, block_other):
    """Return the `Visible` tiles of the other axis of rows with these bounds."""
    exists = begins < LARGEST_ROW
    begin, end = jnp.min(begins), jnp.max(ends)
    full_begin = jnp.max(jnp.where(exists, begins, 0))
    full_end = jnp.min(jnp.where(exists, ends, LARGEST_ROW))
    end = jnp.where(end > begin, end, 0)
    begin = begin // block_other * block_other
    return tiles_between(begin, full_begin, full_end, end, block_other)


def in_interval(begins, ends, rows):
    """Return which rows of the other axis each row that stays sees, [block, block_other]."""
    return (rows[None, :] >= begins[:, None]) & (rows[None, :] < ends[:, None])


def intervals_of_keys(operands: AttentionOperands[Any]) -> RowIntervals:
    """Return what each query sees of the keys; nothing where a window says so."""
    if not isinstance(operands, PartialOperands):
        return RowIntervals()
    return RowIntervals(operands.key_begins, operands.key_ends)


def intervals_of_queries(operands: AttentionOperands[Any]) -> RowIntervals:
    """Return which queries see each key; nothing where a window says so."""
    if not isinstance(operands, PartialOperands):
        return RowIntervals()
    return RowIntervals(operands.query_begins, operands.query_ends)
