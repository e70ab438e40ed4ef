"""A warpgroup that computes 64 rows of each work item of the SM90 forward."""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from torch_attn.kernels.explicit.barriers import (
    K_READ,
    P_READ,
    V_READ,
    arrive,
    arrive_at_slot,
    pass_turn,
    take_turn,
    wait_for_step,
)
from torch_attn.kernels.explicit.block_mask import kept_start
from torch_attn.kernels.explicit.carry import keep_rows
from torch_attn.kernels.explicit.hidden import hide_keys, load_keys
from torch_attn.kernels.explicit.items import own_item
from torch_attn.kernels.explicit.query_ranges import Limits
from torch_attn.kernels.explicit.registers import join_columns, pack, split_columns, unpack
from torch_attn.kernels.explicit.softmax import rescales_on_demand
from torch_attn.kernels.explicit.steps import step_is_alike
from torch_attn.kernels.explicit.terms import TileTerms, adds_terms, load_bias, read_bias_box
from torch_attn.kernels.explicit.tma import num_pieces, piece
from torch_attn.kernels.explicit.wgmma import (
    add_product,
    product_layout,
    product_scores,
    rescale,
    scale_rows,
    wait_product,
    wait_sums,
    zeros,
)
from torch_attn.kernels.explicit.wgmma_scores import (
    bounded_update,
    hide,
    rounding_of_one_key,
    scaled_scores,
    scores_with_terms,
    softmax_update,
)
from torch_attn.kernels.explicit.wgmma_terms import (
    added_softmax_update,
    draw_masks,
    drop_packed,
    no_shift,
    scores_to_add,
)
from torch_attn.kernels.sm90.flash_fwd_rows import start_rows, store_out, store_statistics
from torch_attn.kernels.sm90.halves import (
    add_handed,
    first_columns,
    hand_over,
    hand_over_factor,
    receive_factor,
)
from torch_attn.kernels.sm90.spans import (
    add_sums,
    end_span,
    from_left,
    join_span,
    no_spans,
    normalise,
    tiles_to_span,
    update_in_span,
)
from torch_attn.kernels.sm90.work import clear_visited, own_queries


class Kernel(NamedTuple):
    """Hold what a consumer needs for all items.

    A variable would turn the constants into tensors. They come last: otherwise Triton 3.6 loses
    those of the other tuples in loops.
    """

    tiles: Any
    barriers: Any
    shared: Any
    results: Any
    terms: Any
    problem: Any
    rule: Any
    left: Any
    right: Any
    sinks_ptr: Any
    lists: Any
    q_ranges: Any
    halves: Any
    block_q: Any
    head_dim: Any
    head_dim_v: Any
    ping_pong: Any
    edges: Any
    ahead: Any


class Softmax(NamedTuple):
    """Say how the running softmax is computed, in constants.

    Attributes:
        bounded: capped scores need no maximum in a dtype with the range of float32: m_i stays 0.
        on_demand: acc is rescaled only where m_i rises much.
        sink_last: the maximum excludes the sink, which joins at the end.
        in_spans: with the order of sums of `batch_invariant`.
    """

    bounded: Any
    on_demand: Any
    sink_last: Any
    in_spans: Any


@gluon.jit
def consume(kernel, CONSUMER: gl.constexpr):
    if kernel.halves is not None and CONSUMER == 1:
        _consume_values(kernel)
    else:
        _consume_keys(kernel, CONSUMER)


@gluon.jit
def _consume_keys(kernel, CONSUMER: gl.constexpr):
    q_tile, k_tile, _v_tile, _out_tile, _bias_tile = kernel.tiles
    _q_full, q_read, _k_full, _v_full = kernel.barriers
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    NUM_CONSUMERS: gl.constexpr = kernel.block_q // 64
    NUM_TILES_Q: gl.constexpr = q_tile[0].shape[0]
    OUT_IN_Q: gl.constexpr = kernel.results.place == "in q"
    # Where the caller asks for a row's largest score, it is m_i, without the sink.
    ASKED: gl.constexpr = kernel.results.row_max is not None
    IN_SPANS: gl.constexpr = kernel.results.place == "in sums"
    IS_PLAIN: gl.constexpr = (
        kernel.problem.intervals is None  # a row that sees one key is known
        and kernel.problem.tiles is None
        and not adds_terms(kernel.terms.bias.entries, kernel.terms.relative, kernel.terms.slopes)
        and kernel.terms.seed is None
    )
    BOUNDED: gl.constexpr = (
        kernel.rule.small_cap and q_tile[0].dtype == gl.bfloat16 and IS_PLAIN and not ASKED
        and kernel.halves is None and not IN_SPANS
    )  # fmt: skip
    ON_DEMAND: gl.constexpr = rescales_on_demand(kernel.head_dim_v) and not ASKED
    SINK_LAST: gl.constexpr = BOUNDED or ASKED or IN_SPANS
    step = 0  # counted over all items
    turn = 0
    if kernel.ping_pong and CONSUMER == NUM_CONSUMERS - 1:
        pass_turn(CONSUMER, NUM_CONSUMERS)
    item, place = own_item(turn, kernel.problem, kernel.shared, CONSUMER)
    q_slot = CONSUMER
    ahead = ()
    if kernel.ahead:
        # Only a program that takes items from a counter may have none.
        exists = len(kernel.shared) == 0 or item < kernel.problem.num_items
        ahead = (_compute_ahead(kernel, exists, CONSUMER),)
    while item < kernel.problem.num_items:
        queries = own_queries(kernel, item, place, CONSUMER, BLOCK_KV)
        packed, m_i, l_i, acc, spans, step = _visit_keys(
            kernel, Softmax(BOUNDED, ON_DEMAND, SINK_LAST, IN_SPANS), queries, ahead, q_slot, step,
            turn, CONSUMER,
        )  # fmt: skip
        if not OUT_IN_Q:
            mbarrier.arrive(q_read.index(q_slot), count=1)
        turn += 1
        item, place = own_item(turn, kernel.problem, kernel.shared, CONSUMER)
        if kernel.ahead:
            q_slot = (turn * NUM_CONSUMERS + CONSUMER) % NUM_TILES_Q
        ahead = _finish_rows(
            kernel, Softmax(BOUNDED, ON_DEMAND, SINK_LAST, IN_SPANS), queries, item, q_slot, step,
            turn, packed, m_i, l_i, acc, spans, CONSUMER,
        )  # fmt: skip
        if OUT_IN_Q:
            tma.store_wait(0)
            mbarrier.arrive(q_read.index(CONSUMER), count=1)
    tma.store_wait(0)


@gluon.jit
def _compute_ahead(kernel, exists, CONSUMER: gl.constexpr):
    q_tile, k_tile, _v_tile, _out_tile, _bias_tile = kernel.tiles
    q_full, _q_read, k_full, _v_full = kernel.barriers
    READERS: gl.constexpr = 128 * (kernel.block_q // 64) + 32
    layout: gl.constexpr = product_layout(k_tile[0].shape[3])
    if exists:
        mbarrier.wait(q_full.index(CONSUMER), 0)
        mbarrier.wait(k_full.index(0), 0)
    s = product_scores(q_tile, CONSUMER, k_tile, 0, kernel.head_dim, layout)
    s = warpgroup_mma_wait(0, deps=(s,))
    if exists:
        arrive(K_READ, READERS)
    return s


@gluon.jit
def _visit_keys(kernel, softmax, queries, ahead, q_slot, step, turn, CONSUMER: gl.constexpr):
    """Visit an item's tiles of keys; return (packed, m_i, l_i, acc, spans, step).

    acc lacks packed, p. spans: (), or the `Spans` before m_i, l_i and acc.
    """
    _begin, before, full, after = queries.work.visits
    packed, m_i, l_i, acc = _visit_first(kernel, softmax, queries, ahead, step, turn, CONSUMER)
    spans = ()
    index = 1
    step += 1
    if softmax.in_spans:
        packed, m_i, l_i, acc, spans, step = _visit_spans(
            kernel, softmax, queries, step, q_slot, packed, m_i, l_i, acc, CONSUMER
        )
    else:
        for masked in gl.static_range(1 if kernel.edges else 0, -1, -1):
            end = before + after if masked else before + full + after
            while index < end:
                packed, m_i, l_i, acc, spans = _visit(
                    kernel, softmax, queries, index, step, q_slot, packed, m_i, l_i, acc, spans,
                    masked, False, CONSUMER,
                )  # fmt: skip
                index += 1
                step += 1
    return packed, m_i, l_i, acc, spans, step


@gluon.jit
def _visit_spans(
    kernel, softmax, queries, step, q_slot, packed, m_i, l_i, acc, CONSUMER: gl.constexpr
):  # fmt: skip
    """Visit the tiles of keys after the first one from left to right."""
    BLOCK_KV: gl.constexpr = kernel.tiles[1][0].shape[3]
    begin, before, full, after = queries.work.visits
    spans = no_spans(m_i)
    index, total = 1, before + full + after
    end = tiles_to_span(begin, BLOCK_KV)
    while index < total:
        end = gl.minimum(end, total)
        ends = (gl.minimum(before, end), gl.minimum(before + full, end), end)
        for kind in gl.static_range(1 if kernel.left is None else 0, len(ends)):
            if kernel.edges or kind == 1:
                while index < ends[kind]:
                    packed, m_i, l_i, acc, spans = _visit(
                        kernel, softmax, queries, index, step, q_slot, packed, m_i, l_i, acc,
                        spans, kind != 1, False, CONSUMER,
                    )  # fmt: skip
                    index += 1
                    step += 1
        if index < total:
            packed, m_i, l_i, acc, spans = _visit(
                kernel, softmax, queries, index, step, q_slot, packed, m_i, l_i, acc, spans,
                kernel.edges, True, CONSUMER,
            )  # fmt: skip
            index += 1
            step += 1
        end += tiles_to_span(0, BLOCK_KV)
    return packed, m_i, l_i, acc, spans, step


@gluon.jit
def _visit_first(kernel, softmax, queries, ahead, step, turn, CONSUMER: gl.constexpr):
    """Compute p of the first tile of keys; return packed, m_i, l_i and acc."""
    q_tile, k_tile, v_tile, _out_tile, _bias_tile = kernel.tiles
    q_full, _q_read, k_full, v_full = kernel.barriers
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_KV)
    m_i, l_i, acc, has_carry = start_rows(kernel, queries, softmax, BLOCK_KV)
    start = _first_key(kernel, queries, 0, BLOCK_KV)
    of_tile = _terms_of_tile(kernel, queries, start, not kernel.edges, BLOCK_KV)
    of_keys = _load_keys(kernel, queries, 0, start, BLOCK_KV)
    bias = of_tile.bias
    if kernel.ahead:
        s = ahead[0]
    else:
        slot = step % NUM_STAGES
        mbarrier.wait(q_full.index(CONSUMER), turn & 1)
        wait_for_step(k_full, step)
        s = product_scores(q_tile, CONSUMER, k_tile, slot, kernel.head_dim, layout)
        s = warpgroup_mma_wait(0, deps=(s,))
        bias = _read_bias(kernel, of_tile, slot, CONSUMER)
        _report_read_keys(kernel, slot)
    s, shift, unit = _scores(kernel, queries, s, of_tile.offset, bias, of_keys, start, kernel.edges)
    if softmax.bounded:
        packed, l_i = bounded_update(s, l_i, kernel.rule, kernel.edges)
    else:
        e, alpha, m_i, l_i = _update(kernel, softmax, s, shift, unit, m_i, l_i, kernel.edges)
        if kernel.results.carry is not None:
            # No product runs here. ptxas would move the scaling of acc into the next products.
            acc = wait_sums(scale_rows(keep_rows(acc, has_carry), alpha), 0)
        packed = pack(e, dtype)
        if kernel.terms.seed is not None:
            packed = drop_packed(packed, of_tile.kept)
    if kernel.edges:
        clear_visited((v_tile,), (v_full,), step, kernel.problem, queries, 0, start)
    if kernel.halves is not None:
        hand_over(kernel.halves, packed, (alpha,), "first")
    return packed, m_i, l_i, acc


@gluon.jit
def _visit(
    kernel, softmax, queries, index, step, q_slot, packed, m_i, l_i, acc, spans,
    MASKED: gl.constexpr, STARTS: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Compute p of a tile of keys while p·v of the previous one runs; STARTS: it starts a span."""
    q_tile, k_tile, v_tile, _out_tile, _bias_tile = kernel.tiles
    _q_full, _q_read, k_full, v_full = kernel.barriers
    NUM_CONSUMERS: gl.constexpr = kernel.block_q // 64
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    READERS: gl.constexpr = _readers_of_values(kernel.block_q, kernel.halves is None)
    DROPS: gl.constexpr = kernel.terms.seed is not None
    # At ping_pong 2 the turn comes from the first consumer, which has waited for the same tiles.
    AWAITS: gl.constexpr = (
        kernel.ping_pong < 2 or CONSUMER == 0 or kernel.terms.bias.boxes is not None
    )
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_KV)
    slot, previous = step % NUM_STAGES, (step - 1) % NUM_STAGES
    # s = scale · q kᵀ, and acc += p v for the previous tile
    if AWAITS:
        wait_for_step(k_full, step)
    if kernel.ping_pong:
        take_turn(CONSUMER)
    s = product_scores(q_tile, q_slot, k_tile, slot, kernel.head_dim, layout)
    if AWAITS:
        wait_for_step(v_full, step - 1)
    p = unpack(packed, dtype, layout, "edge" if MASKED else "full")
    acc = add_product(acc, p, v_tile, previous)
    if kernel.ping_pong:
        pass_turn(CONSUMER, NUM_CONSUMERS)
    start = _first_key(kernel, queries, index, BLOCK_KV)
    of_tile = _terms_of_tile(kernel, queries, start, not MASKED, BLOCK_KV)
    bias, kept = _read_bias(kernel, of_tile, slot, CONSUMER), of_tile.kept
    if DROPS:
        s, kept = warpgroup_mma_wait(len(acc), deps=(s, kept))
    else:
        s = warpgroup_mma_wait(len(acc), deps=(s,))
    _report_read_keys(kernel, slot)
    # p = exp(s - max)
    of_keys = (0, 0, 0, False)
    if MASKED:
        # Its branch follows no term: ptxas 12.8 crashes where it follows some.
        of_keys = _load_keys(kernel, queries, index, start, BLOCK_KV)
    s, shift, unit = _scores(kernel, queries, s, of_tile.offset, bias, of_keys, start, MASKED)
    if softmax.bounded:
        # Each half by itself; the second takes the registers of the p that was multiplied.
        left, right = split_columns(s)
        left, l_i = bounded_update(left, l_i, kernel.rule, MASKED)
        acc, p = wait_product(acc, p)
        arrive(V_READ + previous, READERS)
        right, l_i = bounded_update(right, l_i, kernel.rule, MASKED)
        packed = join_columns(left, right, packed)
    else:
        if STARTS:
            spans, of_spans, of_span = join_span(spans, m_i, l_i)
            m_i, l_i = gl.full_like(m_i, float("-inf")), gl.zeros_like(l_i)
        e, alpha, m_i, l_i = _update(kernel, softmax, s, shift, unit, m_i, l_i, MASKED)
        # Rescale what was accumulated
        acc, p = wait_product(acc, p)
        arrive(V_READ + previous, READERS)
        if STARTS:
            acc = end_span(kernel.tiles[3], spans, acc, of_spans, of_span, CONSUMER)
        else:
            acc = rescale(acc, alpha, softmax.on_demand)
        packed = pack(e, dtype)
        if DROPS:
            packed = drop_packed(packed, kept)
    if MASKED:
        clear_visited((v_tile,), (v_full,), step, kernel.problem, queries, index, start)
    if kernel.halves is not None:
        hand_over(kernel.halves, packed, (alpha,), "edge, given" if MASKED else "full, given")
    return packed, m_i, l_i, acc, spans


@gluon.jit
def _finish_rows(
    kernel, softmax, queries, item, q_slot, step, turn, packed, m_i, l_i, acc, spans,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Add the last p·v, and store the rows; return q·kᵀ of the next item's first tile, or ().

    item, q_slot, step, turn: of the next item. If there is none, that product is not used.
    """
    q_tile, k_tile, v_tile, _out_tile, _bias_tile = kernel.tiles
    q_full, _q_read, k_full, v_full = kernel.barriers
    NUM_CONSUMERS: gl.constexpr = kernel.block_q // 64
    NUM_TILES_Q: gl.constexpr = q_tile[0].shape[0]
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    READERS: gl.constexpr = 128 * NUM_CONSUMERS + 32
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(k_tile[0].shape[3])
    previous = (step - 1) % NUM_STAGES
    ahead = ()
    if kernel.ahead:
        slot = step % NUM_STAGES
        if item < kernel.problem.num_items:
            mbarrier.wait(q_full.index(q_slot), turn * NUM_CONSUMERS // NUM_TILES_Q & 1)
            wait_for_step(k_full, step)
        if kernel.ping_pong:
            take_turn(CONSUMER)
        s = product_scores(q_tile, q_slot, k_tile, slot, kernel.head_dim, layout)
    wait_for_step(v_full, step - 1)
    p = unpack(packed, dtype, layout, "last")
    acc = add_product(acc, p, v_tile, previous)
    if kernel.ahead:
        if kernel.ping_pong:
            pass_turn(CONSUMER, NUM_CONSUMERS)
        ahead = (warpgroup_mma_wait(num_pieces(kernel.head_dim_v), deps=(s,)),)
        if item < kernel.problem.num_items:
            arrive(K_READ + slot, READERS)
    if softmax.in_spans:
        spans, alpha, beta = join_span(spans, m_i, l_i)
        m_i, l_i = spans.m_i, spans.l_i
    else:
        # Reduce the row sums over each quad.
        l_i = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, layout))
    factor = 1.0
    if softmax.bounded:
        m_i = gl.where(l_i == 0.0, float("-inf"), m_i)
        factor = rounding_of_one_key(
            l_i, queries.position, queries.work.keys.size, kernel.left, kernel.right, dtype
        )
    factor, l_safe = store_statistics(kernel, queries, m_i, l_i, factor, softmax.sink_last)
    acc, p = wait_product(acc, p)
    arrive(V_READ + previous, _readers_of_values(kernel.block_q, kernel.halves is None))
    if kernel.halves is not None:
        hand_over_factor(kernel.halves, factor / l_safe)
    if softmax.in_spans:
        acc = add_sums(kernel.tiles[3], spans, acc, alpha, beta, CONSUMER)
        acc = normalise(acc, factor)
    else:
        acc = scale_rows(acc, factor / l_safe)
    store_out(kernel, queries, acc, CONSUMER)
    return ahead


@gluon.jit
def _consume_values(kernel):
    """Compute the other columns of each item, from the p that the first consumer hands over."""
    _q_tile, k_tile, v_tile, _out_tile, _bias_tile = kernel.tiles
    _q_full, q_read, _k_full, v_full = kernel.barriers
    COLUMNS: gl.constexpr = kernel.head_dim_v - first_columns(kernel.head_dim_v)
    step = 0  # counted over all items
    turn = 0
    arrive(P_READ, 256)
    item, place = own_item(turn, kernel.problem, kernel.shared, 1)
    while item < kernel.problem.num_items:
        queries = own_queries(kernel, item, place, 0, k_tile[0].shape[3])
        _begin, before, full, after = queries.work.visits
        acc = zeros(64, COLUMNS)
        for _ in range(before + full + after):
            acc = receive_factor(kernel.halves, acc, True)
            acc = add_handed(kernel.halves, acc, v_tile, v_full, step)
            slot = step % v_tile[0].shape[0]
            arrive(V_READ + slot, _readers_of_values(kernel.block_q, False))
            step += 1
        acc = receive_factor(kernel.halves, acc, False)
        arrive(P_READ, 256)
        store_out(kernel, queries, acc, 0, 1)
        tma.store_wait(0)
        mbarrier.arrive(q_read.index(1), count=1)
        turn += 1
        item, place = own_item(turn, kernel.problem, kernel.shared, 1)


@triton.constexpr_function
def _readers_of_values(block_q, is_whole):
    return 128 * (block_q // 64) + 32 if is_whole else 128 * (block_q // 64 + 1) + 32


@gluon.jit
def _first_key(kernel, queries, index, BLOCK_KV: gl.constexpr):
    work = queries.work
    visits = work.visits
    if kernel.results.place == "in sums":
        visits = from_left(visits)
    return kept_start(kernel.lists, work.batch, work.head, work.rows.start, index, visits, BLOCK_KV)


@gluon.jit
def _load_keys(kernel, queries, index, start, BLOCK_KV: gl.constexpr):
    begin, before, _full, _after = queries.work.visits
    alike = step_is_alike(index, begin, before, kernel.problem.segments)
    return load_keys(
        kernel.problem, queries.marks, start, queries.work.keys.size, BLOCK_KV,
        product_layout(BLOCK_KV), alike,
    )  # fmt: skip


@gluon.jit
def _terms_of_tile(kernel, queries, start_kv, WHOLE: gl.constexpr, BLOCK_KV: gl.constexpr):
    layout: gl.constexpr = product_layout(BLOCK_KV)
    rows, bias = queries.work.rows, 0
    if kernel.terms.bias.entries is not None and kernel.terms.bias.boxes is None:
        bias = load_bias(
            kernel.terms, queries.terms, queries.first, start_kv, rows.end,
            queries.work.keys.size, 64, BLOCK_KV, layout, WHOLE=WHOLE,
        )  # fmt: skip
    kept = draw_masks(
        kernel.terms, queries.terms, queries.pairs.first, start_kv, 64, BLOCK_KV, layout
    )
    return TileTerms(start_kv - queries.first - rows.diagonal, bias, kept)


@gluon.jit
def _read_bias(kernel, of_tile, slot, CONSUMER: gl.constexpr):
    """Return the bias of a tile, which TMA may have loaded with the keys."""
    bias = of_tile.bias
    if kernel.terms.bias.boxes is not None:
        tile = piece(kernel.tiles[4], slot).slice(64 * CONSUMER, 64, dim=0)
        bias = read_bias_box(tile, product_layout(kernel.tiles[1][0].shape[3]))
    return bias


@gluon.jit
def _report_read_keys(kernel, slot):
    NUM_STAGES: gl.constexpr = kernel.tiles[1][0].shape[0]
    READERS: gl.constexpr = 128 * (kernel.block_q // 64) + 32
    if kernel.terms.bias.boxes is not None:
        arrive_at_slot(slot, K_READ, NUM_STAGES, READERS)
    else:
        arrive(K_READ + slot, READERS)


@gluon.jit
def _scores(kernel, queries, s, offset, bias, of_keys, start, MASKED: gl.constexpr):
    """Return what `scores_to_add` does for products q·k; without terms, scores if MASKED."""
    ADDS: gl.constexpr = adds_terms(
        kernel.terms.bias.entries, kernel.terms.relative, kernel.terms.slopes
    )
    shift, unit = 0, 1.0
    if ADDS and not kernel.rule.scale_first:
        s, shift, unit = scores_to_add(s, kernel.terms, queries.terms, kernel.rule, offset, bias)
    elif ADDS:
        s = scores_with_terms(s, kernel.terms, queries.terms, kernel.rule, offset, bias)
        shift = no_shift(s)
    elif MASKED:
        s = scaled_scores(s, kernel.rule)
    if MASKED:
        left, right = kernel.left, kernel.right
        if kernel.problem.intervals is not None:
            left, right = 0, queries.right
        size = queries.work.keys.size
        if kernel.q_ranges is None:
            s = hide(s, queries.position, start, size, left, right)
        limits = Limits(start, size, None, left, right)
        s = hide_keys(
            s, kernel.problem, kernel.q_ranges, queries.marks, queries.position, of_keys, limits
        )
    return s, shift, unit


@gluon.jit
def _update(kernel, softmax, s, shift, unit, m_i, l_i, MASKED: gl.constexpr):
    if adds_terms(kernel.terms.bias.entries, kernel.terms.relative, kernel.terms.slopes):
        e, alpha, m_i, l_i = added_softmax_update(s, shift, unit, m_i, l_i)
    elif softmax.in_spans:
        if not MASKED:
            s = scaled_scores(s, kernel.rule)
        e, alpha, m_i, l_i = update_in_span(s, m_i, l_i, kernel.rule.exp2_scale, MASKED)
    else:
        e, alpha, m_i, l_i = softmax_update(s, m_i, l_i, kernel.rule, MASKED, softmax.on_demand)
    return e, alpha, m_i, l_i
