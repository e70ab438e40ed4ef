"""Rows of a consumer of the SM90 forward: how they start, and how they are stored."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from torch_attn.kernels.explicit.barriers import barrier
from torch_attn.kernels.explicit.carry import head_rows, load_carry, store_carry
from torch_attn.kernels.explicit.softmax import add_columns
from torch_attn.kernels.explicit.wgmma import product_layout, zeros
from torch_attn.kernels.explicit.wgmma_terms import rounding_of_maximum
from torch_attn.kernels.library.softmax import LN2, LOG2E, add_sink, rest_of_lse, row_statistics
from torch_attn.kernels.library.spans import finish_rows, sum_block
from torch_attn.kernels.sm90.halves import first_columns
from torch_attn.kernels.sm90.work import first_of_head, store_rows


class Results(NamedTuple):
    """Hold what the kernel writes; absent results are None.

    Attributes:
        lse, row_max: [B, Hq, Sq] float32, natural logarithm, and the largest score.
        carry: [B, Sq, Hq, Dv] float32, the result over other keys, with its lse in `lse`.
        place: from where a tile of out is stored: "staged", shared memory of its own; "in q", that
            of the queries; "in sums", that of the spans before (`batch_invariant`); or "part",
            registers, in float32 by its pointer.
        rest: as lse, `rest_of_lse`.
    """

    out: Any
    lse: Any
    row_max: Any
    carry: Any
    place: Any = None
    rest: Any = None


@gluon.jit
def start_rows(kernel, queries, softmax, BLOCK_KV: gl.constexpr):
    """Return the first m_i, l_i and acc, and which rows start from a carry, or 0."""
    layout: gl.constexpr = product_layout(BLOCK_KV)
    start = 0.0 if softmax.bounded else float("-inf")
    m_i = gl.full([64], start, gl.float32, queries.rows.type.layout)
    no_scores = gl.zeros([64, BLOCK_KV], gl.float32, layout)
    if softmax.in_spans:
        l_i = sum_block(no_scores)
    else:
        l_i = add_columns(no_scores)
    if kernel.sinks_ptr is not None and not softmax.sink_last:
        # Start the maximum at the sink, so that acc is not rescaled for it at the end.
        sink = gl.load(kernel.sinks_ptr + queries.work.head)
        if kernel.results.rest is None:
            sink *= LOG2E
        m_i = gl.maximum(m_i, sink)
    has_carry = 0
    if kernel.results.carry is not None:
        m_i, l_i, acc, has_carry = _load_part(kernel, queries, m_i, l_i)
    else:
        acc = zeros(64, first_columns(kernel.head_dim_v))
    return m_i, l_i, acc, has_carry


@gluon.jit
def _load_part(kernel, queries, m_i, l_i):
    work, heads = queries.work, kernel.problem.heads_q
    end, rows = work.rows.end, queries.rows
    carried = kernel.results.lse + (work.batch * heads + work.head).to(gl.int64) * end + rows
    m_carry = gl.load(carried, mask=rows < end, other=float("-inf"))
    has_carry = m_carry != float("-inf")
    carried = head_rows(
        kernel.results.carry, work.batch, end, queries.first, work.head, heads, kernel.head_dim_v
    )
    # Read all rows, so that the loads do not wait for lse.
    acc = load_carry(carried, rows < end, heads, kernel.head_dim_v)
    m_i = gl.maximum(m_i, m_carry * LOG2E)
    quarter = gl.where(has_carry, 0.25, 0.0)  # of each of a row's four sums
    of_sums: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
    l_i += gl.convert_layout(quarter, of_sums, assert_trivial=True)[:, None]
    return m_i, l_i, acc, has_carry


@gluon.jit
def store_statistics(kernel, queries, m_i, l_i, factor, SINK_LAST: gl.constexpr):
    """Store a row's statistics; return acc's factor, applied in any case, and divisor."""
    work, rows = queries.work, queries.rows
    ADDED: gl.constexpr = kernel.results.rest is not None
    IN_SPANS: gl.constexpr = kernel.results.place == "in sums"
    row_max = m_i
    if ADDED:
        exact = gl.exp2(-rounding_of_maximum(m_i))
        l_i, factor = l_i * exact, factor * exact
    if kernel.sinks_ptr is not None and not IN_SPANS:
        alpha, m_i, l_i = add_sink(gl.load(kernel.sinks_ptr + work.head), m_i, l_i, ADDED)
        if SINK_LAST:
            factor = factor * alpha
    if kernel.terms.seed is not None:
        factor = factor * kernel.terms.dropout.scale
    l_safe = 1.0
    if IN_SPANS:
        sink = None
        if kernel.sinks_ptr is not None:
            sink = gl.load(kernel.sinks_ptr + work.head)
        factor, lse = finish_rows(m_i, l_i, sink)
    else:
        l_safe, lse = row_statistics(m_i, l_i, ADDED)
    first = first_of_head(kernel, queries)
    exists = rows < work.rows.end
    if ADDED:
        gl.store(kernel.results.rest + first + rows, rest_of_lse(lse, m_i, l_safe), mask=exists)
    else:
        row_max *= LN2
    gl.store(kernel.results.lse + first + rows, lse, mask=exists)
    if kernel.results.row_max is not None:
        gl.store(kernel.results.row_max + first + rows, row_max, mask=exists)
    return factor, l_safe


@gluon.jit
def store_out(kernel, queries, acc, CONSUMER: gl.constexpr, FIRST: gl.constexpr = 0):
    """Store a consumer's rows; acc: column pieces, from the FIRST one on."""
    work, heads = queries.work, kernel.problem.heads_q
    end = work.rows.end
    if kernel.results.place == "part":
        carried = head_rows(
            kernel.results.out[0], work.batch, end, queries.first, work.head, heads,
            kernel.head_dim_v,
        )  # fmt: skip
        store_carry(carried, acc, queries.rows < end, heads, kernel.head_dim_v)
    else:
        if kernel.results.place != "in q":
            tma.store_wait(0)
            barrier()
        SLOTS: gl.constexpr = kernel.tiles[3][0].shape[0] // (kernel.block_q // 64)
        store_rows(
            kernel, queries, kernel.results.out, kernel.tiles[3], CONSUMER * SLOTS, acc,
            kernel.head_dim_v, FIRST,
        )  # fmt: skip
