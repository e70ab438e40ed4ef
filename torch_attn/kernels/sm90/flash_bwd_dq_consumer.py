"""A warpgroup that computes 64 rows of dq of each work item of the SM90 backward."""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from torch_attn.kernels.explicit.barriers import (
    K_READ,
    P_READ,
    P_WRITTEN,
    READERS,
    V_READ,
    arrive,
    wait_for_all,
    wait_for_step,
)
from torch_attn.kernels.explicit.carry import add_carry, head_rows
from torch_attn.kernels.explicit.hidden import load_keys
from torch_attn.kernels.explicit.items import own_item
from torch_attn.kernels.explicit.registers import copy_layout, pack, scale_all, unpack
from torch_attn.kernels.explicit.steps import rows_have_padding, step_start
from torch_attn.kernels.explicit.terms import adds_terms, drop_scaled, store_bias
from torch_attn.kernels.explicit.tma import (
    clear_padding,
    clear_rows,
    num_pieces,
    piece,
    piece_start,
)
from torch_attn.kernels.explicit.wgmma import (
    add_product,
    product_layout,
    product_scores,
    wait_product,
    zeros,
)
from torch_attn.kernels.library.sequences import count_sequence_tiles, first_tile
from torch_attn.kernels.library.softmax import LOG2E
from torch_attn.kernels.library.tiles import ROW_PADDING, head_base
from torch_attn.kernels.sm90.halves import add_handed, first_columns, hand_over
from torch_attn.kernels.sm90.work import (
    RowStatistics,
    clear_visited,
    first_of_head,
    own_queries,
    probabilities,
    store_rows,
    terms_of_tile,
)


class Kernel(NamedTuple):
    """Hold what a consumer needs for all items, constants last; no dq has lists."""

    tiles: Any
    barriers: Any
    shared: Any
    out: Any
    out_strides: Any
    statistics: Any
    dq: Any
    problem: Any
    rule: Any
    terms: Any
    left: Any
    right: Any
    lists: Any
    q_ranges: Any
    halves: Any
    block_q: Any
    head_dim: Any
    head_dim_v: Any
    edges: Any


@gluon.jit
def consume(kernel, CONSUMER: gl.constexpr):
    if kernel.halves is not None and CONSUMER == 1:
        _consume_ds(kernel)
    else:
        _consume_keys(kernel, CONSUMER)


@gluon.jit
def _consume_keys(kernel, CONSUMER: gl.constexpr):
    q_tile, _do_tile, _out_tile, k_tile, _v_tile = kernel.tiles
    Q_STAGES: gl.constexpr = stages_of_queries(q_tile)
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    step = 0  # counted over all items
    turn = 0
    item, place = own_item(turn, kernel.problem, kernel.shared, CONSUMER)
    while item < kernel.problem.num_items:
        queries = own_queries(kernel, item, place, CONSUMER, BLOCK_KV)
        slot_q = turn % Q_STAGES * 2 + CONSUMER
        statistics, ds = _visit_first(kernel, queries, place, slot_q, step, turn)
        dq = zeros(64, first_columns(kernel.head_dim))

        # Visit the other tiles of keys that these queries see; only tiles at the edges are masked.
        _begin, before, full, after = queries.work.visits
        index = 1
        step += 1
        for masked in gl.static_range(1 if kernel.edges else 0, -1, -1):
            end = before + after if masked else before + full + after
            while index < end:
                ds, dq = _visit(kernel, queries, statistics, slot_q, index, step, ds, dq, masked)
                index += 1
                step += 1

        _finish_rows(kernel, queries, slot_q, step, ds, dq, CONSUMER)
        turn += 1
        item, place = own_item(turn, kernel.problem, kernel.shared, CONSUMER)
    tma.store_wait(0)


@gluon.jit
def _visit_first(kernel, queries, place, slot_q, step, turn):
    """Return the rows' `RowStatistics`, which q·kᵀ overlaps, and packed ds of the first tile."""
    q_tile, do_tile, _out_tile, k_tile, v_tile = kernel.tiles
    q_full, do_full, _out_full, q_read, k_full, v_full = kernel.barriers
    Q_STAGES: gl.constexpr = stages_of_queries(q_tile)
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    layout: gl.constexpr = product_layout(BLOCK_KV)
    lse = _load_lse(kernel, queries)
    start = step_start(0, *queries.work.visits, BLOCK_KV)
    of_keys = load_keys(
        kernel.problem, queries.marks, start, queries.work.keys.size, BLOCK_KV, layout
    )
    phase = turn // Q_STAGES & 1
    mbarrier.wait(q_full.index(slot_q), phase)
    wait_for_step(k_full, step)
    clear_visited((k_tile, v_tile), (k_full, v_full), step, kernel.problem, queries, 0, start)
    _clear_own(q_tile, q_full, kernel.problem, queries, place, slot_q, phase)
    _clear_own(do_tile, do_full, kernel.problem, queries, place, slot_q, phase)
    if Q_STAGES > 1:
        tma.store_wait(0)
        mbarrier.arrive(q_read.index(slot_q ^ 2), count=1, pred=turn > 0)
    s = product_scores(q_tile, slot_q, k_tile, step % k_tile[0].shape[0], kernel.head_dim, layout)
    of_tile = terms_of_tile(kernel, queries, start, BLOCK_KV)
    mbarrier.wait(do_full.index(slot_q), phase)
    statistics = _row_statistics(kernel, queries, place, lse, slot_q, phase)
    wait_for_step(v_full, step)
    slot_v = step % v_tile[0].shape[0]
    dp = product_scores(do_tile, slot_q, v_tile, slot_v, kernel.head_dim_v, layout)
    s = warpgroup_mma_wait(num_pieces(kernel.head_dim_v), deps=(s,))
    p, dcap = probabilities(kernel, queries, statistics, s, start, of_keys, of_tile, kernel.edges)
    ds = _finish_ds(kernel, queries, statistics, p * dcap, dp, start, of_tile, slot_v, "first")
    return statistics, ds


@gluon.jit
def _visit(kernel, queries, statistics, slot_q, index, step, ds, dq, MASKED: gl.constexpr):
    """Compute packed ds of a tile of keys while ds·k of the previous one runs; return it and dq."""
    q_tile, do_tile, out_tile, k_tile, v_tile = kernel.tiles
    _q_full, _do_full, _out_full, _q_read, k_full, v_full = kernel.barriers
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    layout: gl.constexpr = product_layout(BLOCK_KV)
    slot, slot_v = step % NUM_STAGES, step % v_tile[0].shape[0]
    previous = (step - 1) % NUM_STAGES
    if len(out_tile) == 0:
        # 0, unknown to the compiler: else it hoists the descriptors of q and dout, beyond the
        # registers.
        slot_q += step >> 30
    start = step_start(index, *queries.work.visits, BLOCK_KV)
    if MASKED:
        clear_visited(
            (k_tile, v_tile), (k_full, v_full), step, kernel.problem, queries, index, start
        )
    # dq += ds k for the previous tile, and s = scale · q kᵀ
    left = unpack(ds, q_tile[0].dtype, layout, "loop")
    dq = add_product(dq, left, k_tile, previous)
    wait_for_step(k_full, step)
    s = product_scores(q_tile, slot_q, k_tile, slot, kernel.head_dim, layout)
    dq, left = wait_product(dq, left, num_pieces(kernel.head_dim))
    arrive(K_READ + previous, READERS)
    # dp = dout vᵀ
    wait_for_step(v_full, step)
    dp = product_scores(do_tile, slot_q, v_tile, slot_v, kernel.head_dim_v, layout)
    of_tile = terms_of_tile(kernel, queries, start, BLOCK_KV)
    # p = exp(s - lse)
    s = warpgroup_mma_wait(num_pieces(kernel.head_dim_v), deps=(s,))
    of_keys = (0, 0, 0, False)
    if MASKED:
        of_keys = load_keys(
            kernel.problem, queries.marks, start, queries.work.keys.size, BLOCK_KV, layout
        )
    p, dcap = probabilities(kernel, queries, statistics, s, start, of_keys, of_tile, MASKED)
    p *= dcap
    # Passes at once: its branch keeps ptxas from hoisting the next wait.
    wait_for_step(v_full, step)
    place: gl.constexpr = "edge" if MASKED else "full"
    return _finish_ds(kernel, queries, statistics, p, dp, start, of_tile, slot_v, place), dq


@gluon.jit
def _finish_rows(kernel, queries, slot_q, step, ds, dq, CONSUMER: gl.constexpr):
    q_tile, _do_tile, _out_tile, k_tile, _v_tile = kernel.tiles
    _q_full, _do_full, _out_full, q_read, _k_full, _v_full = kernel.barriers
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    work, heads = queries.work, kernel.problem.heads_q
    previous = (step - 1) % k_tile[0].shape[0]
    left = unpack(ds, q_tile[0].dtype, product_layout(BLOCK_KV), "end")
    dq = add_product(dq, left, k_tile, previous)
    dq, left = wait_product(dq, left)
    arrive(K_READ + previous, READERS)
    dq = scale_all(dq, kernel.rule.scale)
    end = work.rows.end
    if kernel.problem.intervals is not None:
        carried = head_rows(
            kernel.dq[0], work.batch, end, queries.first, work.head, heads, kernel.head_dim
        )
        add_carry(carried, dq, queries.rows < end, heads, kernel.head_dim)
    else:
        store_rows(kernel, queries, kernel.dq, q_tile, slot_q, dq, kernel.head_dim)
    if q_tile[0].shape[0] <= 2:
        tma.store_wait(0)
        mbarrier.arrive(q_read.index(CONSUMER), count=1)


@triton.constexpr_function
def stages_of_queries(q_tile):
    return max(q_tile[0].shape[0] // 2, 1)


@gluon.jit
def _consume_ds(kernel):
    """Compute the other columns of each item, from the ds that the first consumer hands over."""
    q_tile, _do_tile, _out_tile, k_tile, v_tile = kernel.tiles
    _q_full, _do_full, _out_full, q_read, k_full, _v_full = kernel.barriers
    step = 0  # counted over all items
    turn = 0
    arrive(P_READ, 256)
    item, place = own_item(turn, kernel.problem, kernel.shared, 1)
    while item < kernel.problem.num_items:
        queries = own_queries(kernel, item, place, 0, k_tile[0].shape[3])
        _begin, before, full, after = queries.work.visits
        dq = zeros(64, kernel.head_dim - first_columns(kernel.head_dim))
        for _ in range(before + full + after):
            slot, slot_v = step % k_tile[0].shape[0], step % v_tile[0].shape[0]
            wait_for_all(P_WRITTEN, 256)
            dq = add_handed(kernel.halves, dq, k_tile, k_full, step)
            arrive(V_READ + slot_v, READERS)
            arrive(K_READ + slot, READERS)
            step += 1
        dq = scale_all(dq, kernel.rule.scale)
        store_rows(kernel, queries, kernel.dq, q_tile, 0, dq, kernel.head_dim, 1)
        tma.store_wait(0)
        mbarrier.arrive(q_read.index(1), count=1)
        turn += 1
        item, place = own_item(turn, kernel.problem, kernel.shared, 1)


@gluon.jit
def _clear_own(tile, full, problem, queries, place, slot, phase):
    if problem.segments is not None:
        padded = rows_have_padding(queries.work.visits[0])
        clear_padding(
            tile, slot, queries.marks.own_ids, queries.first, queries.work.rows.end, padded,
            full.index(slot), phase,
        )  # fmt: skip
    elif problem.num_sequences is not None:
        # In padding no rows of q and dout are read.
        count = gl.where(place.sequence < problem.num_sequences, 64, 0)
        clear_rows(tile, slot, count, full.index(slot), phase)


@gluon.jit
def _load_lse(kernel, queries):
    """Return lse of the rows, +inf where a row does not exist; 0 where lse2 is an input."""
    lse = 0.0
    if kernel.statistics.lse is not None:
        lse = gl.load(
            kernel.statistics.lse + first_of_head(kernel, queries) + queries.rows,
            mask=queries.rows < queries.work.rows.end, other=float("inf"),
        )  # fmt: skip
    return lse


@gluon.jit
def _row_statistics(kernel, queries, place, lse, slot_q, phase):
    """Compute and store the rows' `RowStatistics`, or load them."""
    problem, work, rows = kernel.problem, queries.work, queries.rows
    IS_PACKED: gl.constexpr = problem.num_sequences is not None
    ADDS: gl.constexpr = adds_terms(
        kernel.terms.bias.entries, kernel.terms.relative, kernel.terms.slopes
    )
    padded_rows = count_sequence_tiles(problem.size, problem.num_sequences, ROW_PADDING)
    padded_rows *= ROW_PADDING
    padded = (work.batch * problem.heads_q + work.head).to(gl.int64) * padded_rows
    if IS_PACKED and kernel.block_q == ROW_PADDING:
        padded += place.tile * ROW_PADDING - place.start
    elif IS_PACKED:
        first = queries.first - queries.pairs.first
        padded += first_tile(first, place.sequence, ROW_PADDING) * ROW_PADDING - first
    rest2 = 0.0
    if kernel.statistics.lse is None:
        lse2 = gl.load(kernel.statistics.lse2 + padded + rows)
        delta = gl.load(kernel.statistics.delta + padded + rows)
        if ADDS:
            rest2 = gl.load(kernel.statistics.rest2 + padded + rows)
    else:
        exists = rows < work.rows.end
        delta = _dot_out(kernel, queries, slot_q, phase)
        if IS_PACKED:
            delta = gl.where(exists, delta, 0.0)
        first = first_of_head(kernel, queries)
        if kernel.statistics.dlse is not None:
            has_key = exists & (lse != float("-inf"))
            delta -= gl.load(kernel.statistics.dlse + first + rows, mask=has_key, other=0.0)
        lse2 = gl.where(lse == float("-inf"), float("inf"), lse)
        if ADDS:
            rest2 = gl.load(kernel.statistics.rest + first + rows, mask=exists, other=0.0) * LOG2E
        else:
            lse2 *= LOG2E
        gl.store(kernel.statistics.lse2 + padded + rows, lse2)
        gl.store(kernel.statistics.delta + padded + rows, delta)
        if kernel.block_q < ROW_PADDING:
            # No tile has the padding behind the last one.
            behind = rows + kernel.block_q
            is_padding = (behind < padded_rows) & (queries.first + kernel.block_q >= work.rows.end)
            nothing = gl.full([64], float("inf"), gl.float32, rows.type.layout)
            gl.store(kernel.statistics.lse2 + padded + behind, nothing, mask=is_padding)
            gl.store(kernel.statistics.delta + padded + behind, 1.0 / nothing, mask=is_padding)
        if ADDS:
            gl.store(kernel.statistics.rest2 + padded + rows, rest2)
    return RowStatistics(lse2, delta, rest2)


@gluon.jit
def _dot_out(kernel, queries, slot_q, phase):
    """Return ``rowsum(dout ∘ out)``; out is in shared memory if it has room."""
    _q_tile, do_tile, out_tile, k_tile, _v_tile = kernel.tiles
    of_row: gl.constexpr = gl.SliceLayout(1, product_layout(k_tile[0].shape[3]))
    if len(out_tile) > 0:
        mbarrier.wait(kernel.barriers[2].index(slot_q), phase)
        dot = _dot_rows(do_tile, out_tile, slot_q, of_row)
    else:
        work = queries.work
        base = head_base(kernel.out, kernel.out_strides, work.batch, work.head)
        dot = _dot_loaded(
            do_tile, slot_q, base, queries.first, work.rows.end, kernel.out_strides.row,
            kernel.head_dim_v, of_row,
        )  # fmt: skip
    return dot


@gluon.jit
def _finish_ds(
    kernel, queries, statistics, p, dp, start, of_tile, slot_v, PLACE: gl.constexpr
):  # fmt: skip
    """Wait for dp, and return packed ``ds = p ∘ (dp - delta)``."""
    dp = warpgroup_mma_wait(0, deps=(dp,))
    if kernel.halves is None:
        arrive(V_READ + slot_v, READERS)
    ds = p * (drop_scaled(dp, kernel.terms, of_tile) - statistics.delta[:, None])
    if kernel.terms.dbias.entries is not None:
        work = queries.work
        store_bias(kernel.terms.dbias, ds, queries.pairs, start, work.rows.end, work.keys.size)
    packed = pack(ds, kernel.tiles[0][0].dtype)
    if kernel.halves is not None:
        hand_over(kernel.halves, packed, (), PLACE)
        arrive(V_READ + slot_v, READERS)
    return packed


@gluon.jit
def _dot_rows(a, b, slot, LAYOUT: gl.constexpr):
    dot = gl.zeros([64], gl.float32, LAYOUT)
    for i in gl.static_range(len(a)):
        dot += _dot_pieces(piece(a[i], slot), piece(b[i], slot), LAYOUT)
    return dot


@gluon.jit
def _dot_pieces(a, b, LAYOUT: gl.constexpr):
    layout: gl.constexpr = product_layout(a.shape[1])
    products = a.load(layout).to(gl.float32) * b.load(layout).to(gl.float32)
    return gl.convert_layout(gl.sum(products, 1), LAYOUT, assert_trivial=True)


@gluon.jit
def _dot_loaded(
    tile,
    slot,
    base,
    start,
    num_rows,
    STRIDE: gl.constexpr,
    SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    dot = gl.zeros([64], gl.float32, LAYOUT)
    for i in gl.static_range(len(tile)):
        dot += _dot_loaded_piece(
            piece(tile[i], slot), base, start, num_rows, STRIDE, piece_start(SIZE, i), SIZE, LAYOUT
        )
    return dot


@gluon.jit
def _dot_loaded_piece(
    a,
    base,
    start,
    num_rows,
    STRIDE: gl.constexpr,
    FIRST: gl.constexpr,
    SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    layout: gl.constexpr = copy_layout(a.shape[1], 4)
    rows = start + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    columns = FIRST + gl.arange(0, a.shape[1], gl.SliceLayout(0, layout))[None, :]
    exists = (rows < num_rows) & (columns < SIZE)
    b = gl.load(base + rows.to(gl.int64) * STRIDE + columns, mask=exists, other=0.0)
    products = a.load(layout).to(gl.float32) * b.to(gl.float32)
    return gl.convert_layout(gl.sum(products, 1), LAYOUT)
