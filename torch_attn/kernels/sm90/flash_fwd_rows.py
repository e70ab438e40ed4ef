"""Rows of a consumer of the SM90 forward: how they start, and how they are stored."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from torch_attn.kernels.explicit.barriers import barrier
from torch_attn.kernels.explicit.carry import head_rows, load_carry, store_carry
from torch_attn.kernels.explicit.softmax import add_columns
from torch_attn.kernels.explicit.tma import store_result
from torch_attn.kernels.explicit.wgmma import product_layout, zeros
from torch_attn.kernels.explicit.wgmma_terms import rounding_of_maximum
from torch_attn.kernels.library.softmax import LN2, LOG2E, add_sink, rest_of_lse, row_statistics


class Results(NamedTuple):
    """Hold what the kernel writes.

    Attributes:
        out: in the kernel, what `stored_maps_of` returns.
        lse: [B, Hq, Sq] float32, natural logarithm.
        row_max: [B, Hq, Sq] float32, each row's largest score; or None.
        carry: [B, Sq, Hq, Dv] float32, the result over other keys, with its lse in `lse`; or None.
        place: from where a tile of out is stored, a constant: "staged", shared memory of its own;
            "in q", that of the queries, where there is no more; or "part", registers, in float32 by
            its pointer.
        rest: as lse, `rest_of_lse`; None without terms.
    """

    out: Any
    lse: Any
    row_max: Any
    carry: Any
    place: Any = None
    rest: Any = None


@gluon.jit
def start_rows(
    results,
    problem,
    batch,
    head,
    first_row,
    rows,
    seq_q,
    sinks_ptr,
    BLOCK_KV: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BOUNDED: gl.constexpr,
    SINK_LAST: gl.constexpr,
):
    """Return m_i, l_i and acc of rows before their first tile of keys, and which rows have a carry.

    A row with a carry starts from it. Without carries the last result is 0.
    """
    layout: gl.constexpr = product_layout(BLOCK_KV)
    m_i = gl.full([64], 0.0 if BOUNDED else float("-inf"), gl.float32, rows.type.layout)
    l_i = add_columns(gl.zeros([64, BLOCK_KV], gl.float32, layout))
    if sinks_ptr is not None and not SINK_LAST:
        # Start the maximum at the sink, so that acc is not rescaled for it at the end.
        sink = gl.load(sinks_ptr + head)
        if results.rest is None:
            sink *= LOG2E
        m_i = gl.maximum(m_i, sink)
    has_carry = 0
    if results.carry is not None:
        m_i, l_i, acc, has_carry = _load_part(
            results, problem, batch, head, first_row, rows, seq_q, m_i, l_i, HEAD_DIM_V
        )
    else:
        acc = zeros(64, HEAD_DIM_V)
    return m_i, l_i, acc, has_carry


@gluon.jit
def _load_part(
    results, problem, batch, head, first_row, rows, seq_q, m_i, l_i, HEAD_DIM_V: gl.constexpr
):  # fmt: skip
    """Start rows from a result over other keys; return m_i, l_i, acc and which rows have one."""
    carried = results.lse + (batch * problem.heads_q + head).to(gl.int64) * seq_q + rows
    m_carry = gl.load(carried, mask=rows < seq_q, other=float("-inf"))
    has_carry = m_carry != float("-inf")
    carried = head_rows(results.carry, batch, seq_q, first_row, head, problem.heads_q, HEAD_DIM_V)
    # Read all rows, so that the loads do not wait for lse.
    acc = load_carry(carried, rows < seq_q, problem.heads_q, HEAD_DIM_V)
    m_i = gl.maximum(m_i, m_carry * LOG2E)
    quarter = gl.where(has_carry, 0.25, 0.0)  # of each of a row's four sums
    of_sums: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
    l_i += gl.convert_layout(quarter, of_sums, assert_trivial=True)[:, None]
    return m_i, l_i, acc, has_carry


@gluon.jit
def store_statistics(
    results,
    problem,
    batch,
    head,
    rows,
    seq_q,
    sinks_ptr,
    terms,
    m_i,
    l_i,
    factor,
    SINK_LAST: gl.constexpr,
):
    """Store a row's statistics; return the factor and the divisor of acc.

    Args:
        factor: what acc is to be multiplied by anyway.
        SINK_LAST: the maximum of acc excludes the sink.
    """
    ADDED: gl.constexpr = results.rest is not None
    row_max = m_i
    if ADDED:
        exact = gl.exp2(-rounding_of_maximum(m_i))
        l_i, factor = l_i * exact, factor * exact
    if sinks_ptr is not None:
        alpha, m_i, l_i = add_sink(gl.load(sinks_ptr + head), m_i, l_i, ADDED)
        if SINK_LAST:
            factor = factor * alpha
    if terms.seed is not None:
        factor = factor * terms.dropout.scale
    l_safe, lse = row_statistics(m_i, l_i, ADDED)
    lse_row = (batch * problem.heads_q + head).to(gl.int64) * problem.size
    if ADDED:
        rest = rest_of_lse(lse, m_i, l_safe)
        gl.store(results.rest + lse_row + rows, rest, mask=rows < seq_q)
    else:
        row_max *= LN2
    gl.store(results.lse + lse_row + rows, lse, mask=rows < seq_q)
    if results.row_max is not None:
        gl.store(results.row_max + lse_row + rows, row_max, mask=rows < seq_q)
    return factor, l_safe


@gluon.jit
def store_out(
    results,
    out_tile,
    acc,
    problem,
    batch,
    head,
    start_q,
    rows,
    seq_q,
    CONSUMER: gl.constexpr,
    OUT: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    """Store a consumer's rows, or start to store them."""
    first = start_q + CONSUMER * 64
    if OUT == "part":
        carried = head_rows(results.out[0], batch, seq_q, first, head, problem.heads_q, HEAD_DIM_V)
        store_carry(carried, acc, rows < seq_q, problem.heads_q, HEAD_DIM_V)
    else:
        if OUT != "in q":
            tma.store_wait(0)
            barrier()
        store_result(
            results.out, out_tile, CONSUMER, acc, batch, head, first, seq_q, problem.heads_q,
            problem.num_sequences is not None, HEAD_DIM_V,
        )  # fmt: skip
