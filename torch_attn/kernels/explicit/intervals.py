"""Intervals: as `torch_attn.kernels.library.intervals`, with scalars and accumulators' rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.library.intervals import LARGEST_ROW
from torch_attn.kernels.library.tiles import tiles_between


@gluon.jit
def tiles_of_rows(intervals, start, num_rows, BLOCK: gl.constexpr, BLOCK_OTHER: gl.constexpr):
    """As the library's. Bounds never decrease: the first and the last row suffice, and no warp
    waits.
    """
    last = gl.minimum(start + BLOCK, num_rows) - 1
    begin, full_begin = gl.load(intervals.begins + start), gl.load(intervals.begins + last)
    full_end, end = gl.load(intervals.ends + start), gl.load(intervals.ends + last)
    end = gl.where(end > begin, end, 0)
    begin = begin // BLOCK_OTHER * BLOCK_OTHER
    return tiles_between(begin, full_begin, full_end, end, BLOCK_OTHER)


@gluon.jit
def load_windows(intervals, rows, num_rows):
    """Return the first row of the other axis that rows see, and how many follow; negative: none."""
    begins = gl.load(intervals.begins + rows, mask=rows < num_rows, other=LARGEST_ROW)
    ends = gl.load(intervals.ends + rows, mask=rows < num_rows, other=0)
    return begins, ends - begins - 1
