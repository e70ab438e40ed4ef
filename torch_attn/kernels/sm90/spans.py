"""`batch_invariant`: the running softmax over the spans before, of a consumer's 64 rows.

Its sum of values is in shared memory, since registers do not hold two, where out is staged later.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from torch_attn.kernels.explicit.barriers import barrier
from torch_attn.kernels.explicit.tma import reinterpret
from torch_attn.kernels.library.spans import SPAN, add_block, add_parts, join_rows, update_maximum


class Spans(NamedTuple):
    """Hold the statistics [64] of the spans before, and how many these are."""

    m_i: Any
    l_i: Any
    count: Any


@gluon.jit
def no_spans(m_i):
    return Spans(gl.full_like(m_i, float("-inf")), gl.zeros_like(m_i), 0)


@gluon.jit
def update_in_span(s, m_i, l_i, exp2_scale, MASKED: gl.constexpr):
    """Update the running softmax, l_i in parts."""
    e, alpha, m_i = update_maximum(s, m_i, exp2_scale, MASKED)
    return e, alpha, m_i, add_block(l_i, alpha, e)


@gluon.jit
def from_left(visits):
    """Return visits whose steps take tiles from left to right, however they are masked."""
    begin, before, full, after = visits
    return begin, 0, before + full + after, 0


@gluon.jit
def tiles_to_span(start, BLOCK: gl.constexpr):
    """Return how many tiles from a first key on there are to the next span."""
    gl.static_assert(SPAN % BLOCK == 0)
    return (SPAN - start % SPAN) // BLOCK


@gluon.jit
def join_span(spans, m_i, l_i):
    """Return the statistics of a span and of those before, and the factors of both."""
    l_i = gl.convert_layout(add_parts(l_i), m_i.type.layout)
    m_i, l_i, alpha, beta = join_rows(spans.m_i, spans.l_i, m_i, l_i)
    return Spans(m_i, l_i, spans.count + 1), alpha, beta


@gluon.jit
def add_sums(tile, spans, acc, alpha, beta, CONSUMER: gl.constexpr):
    """Return the sum of values of a span and of those before; tile: of out, twice."""
    result = ()
    for i in gl.static_range(len(acc)):
        result = result + (_add_piece(_sums(tile[i], CONSUMER), spans, acc[i], alpha, beta),)
    return result


@gluon.jit
def end_span(tile, spans, acc, alpha, beta, CONSUMER: gl.constexpr):
    """Add a span to those before; return the sum of values of the next one."""
    acc = add_sums(tile, spans, acc, alpha, beta, CONSUMER)
    if spans.count == 1:  # out of the last item
        tma.store_wait(0)
        barrier()
    nothing = ()
    for i in gl.static_range(len(acc)):
        _sums(tile[i], CONSUMER).store(acc[i])
        nothing = nothing + (gl.zeros_like(acc[i]),)
    return nothing


@gluon.jit
def _add_piece(before, spans, x, alpha, beta):
    of_row: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    alpha = gl.convert_layout(alpha, of_row, assert_trivial=True)[:, None]
    beta = gl.convert_layout(beta, of_row, assert_trivial=True)[:, None]
    if spans.count > 1:
        x = gl.fma(before.load(x.type.layout), alpha, x * beta)
    return x


@gluon.jit
def normalise(acc, factor):
    """Multiply rows; 0 is positive."""
    result = ()
    for i in gl.static_range(len(acc)):
        result = result + (_normalise_piece(acc[i], factor),)
    return result


@gluon.jit
def _normalise_piece(x, factor):
    of_row: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return gl.fma(x, gl.convert_layout(factor, of_row, assert_trivial=True)[:, None], 0.0)


@gluon.jit
def _sums(tile, CONSUMER: gl.constexpr):
    SHAPE: gl.constexpr = [tile.shape[0] // 2, 64, tile.shape[4]]
    return reinterpret(tile, gl.float32, SHAPE, _sums_layout(tile.shape[4])).index(CONSUMER)


@triton.constexpr_function
def _sums_layout(width):
    """Return a layout of which a thread's pairs of columns take no bank twice."""
    return gl.SwizzledSharedLayout(8, 1, min(8, width // 8), [1, 0])
