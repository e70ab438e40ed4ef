"""Intervals: each row of one part of a sequence sees an interval of another part's rows."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_attn.integers import quotient
from pallas_attn.kernels.library.tiles import load_rows, tiles_between
from twin_attention.contract.operands import AttentionOperands, PartialOperands

# Where the interval of a nonexistent row begins.
LARGEST_ROW = 2**31 - 1


class RowIntervals(NamedTuple):
    begins: Any = None
    ends: Any = None


def load_intervals(intervals, start, num_rows, block):
    if intervals.begins is None:
        return None, None
    begins = load_rows(intervals.begins, start, num_rows, block, LARGEST_ROW)
    ends = load_rows(intervals.ends, start, num_rows, block, 0)
    return begins, ends


def tiles_of_intervals(begins, ends, block_other):
    exists = begins < LARGEST_ROW
    begin, end = jnp.min(begins), jnp.max(ends)
    full_begin = jnp.max(jnp.where(exists, begins, 0))
    full_end = jnp.min(jnp.where(exists, ends, LARGEST_ROW))
    end = jnp.where(end > begin, end, 0)
    begin = quotient(begin, block_other) * block_other
    return tiles_between(begin, full_begin, full_end, end, block_other)


def in_interval(rows, others):
    other = others.rows[None, :]
    return (other >= rows.begins[:, None]) & (other < rows.ends[:, None])


def intervals_of_keys(operands: AttentionOperands[Any]) -> RowIntervals:
    if not isinstance(operands, PartialOperands):
        return RowIntervals()
    return RowIntervals(operands.key_begins, operands.key_ends)


def intervals_of_queries(operands: AttentionOperands[Any]) -> RowIntervals:
    if not isinstance(operands, PartialOperands):
        return RowIntervals()
    return RowIntervals(operands.query_begins, operands.query_ends)
