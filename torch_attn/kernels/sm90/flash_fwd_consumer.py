"""A warpgroup that computes 64 rows of each work item of the SM90 forward."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from torch_attn.kernels.explicit.barriers import (
    K_READ,
    TURN,
    V_READ,
    arrive,
    arrive_at_slot,
    wait_for_all,
)
from torch_attn.kernels.explicit.block_mask import kept_start
from torch_attn.kernels.explicit.carry import keep_rows
from torch_attn.kernels.explicit.hidden import hide_keys, load_keys, mark_queries
from torch_attn.kernels.explicit.intervals import load_windows
from torch_attn.kernels.explicit.items import are_listed, own_item
from torch_attn.kernels.explicit.registers import join_columns, pack, split_columns, unpack
from torch_attn.kernels.explicit.softmax import rescales_on_demand
from torch_attn.kernels.explicit.steps import step_has_padding, step_is_alike
from torch_attn.kernels.explicit.terms import adds_terms, head_terms, load_bias, read_bias_box
from torch_attn.kernels.explicit.tma import clear_padding, clear_rows, num_pieces, piece
from torch_attn.kernels.explicit.wgmma import (
    add_product,
    product_layout,
    product_scores,
    rescale,
    scale_rows,
    wait_product,
    wait_sums,
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
from torch_attn.kernels.library.sequences import rows_of_sequence
from torch_attn.kernels.sm90.flash_fwd_producer import locate_queries
from torch_attn.kernels.sm90.flash_fwd_rows import start_rows, store_out, store_statistics


@gluon.jit
def consume_keys(
    tiles,
    barriers,
    shared,
    results,
    terms,
    problem,
    rule,
    window_left,
    window_right,
    sinks_ptr,
    lists,
    CONSUMER: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    PING_PONG: gl.constexpr,
    EDGES: gl.constexpr,
    AHEAD: gl.constexpr,
    OUT: gl.constexpr,
):
    """Compute 64 rows of each of a program's work items."""
    q_tile, k_tile, v_tile, out_tile, bias_tile = tiles
    q_full, q_read, k_full, v_full = barriers
    # These keys are some of all; they join a result over the others where there is one.
    IS_PART: gl.constexpr = problem.intervals is not None
    JOINS: gl.constexpr = results.carry is not None
    OUT_IN_Q: gl.constexpr = OUT == "in q"
    NUM_CONSUMERS: gl.constexpr = BLOCK_Q // 64
    NUM_TILES_Q: gl.constexpr = q_tile[0].shape[0]
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    READERS: gl.constexpr = 128 * NUM_CONSUMERS + 32
    NEXT: gl.constexpr = (CONSUMER + 1) % NUM_CONSUMERS
    ADDS: gl.constexpr = adds_terms(terms.bias.entries, terms.relative, terms.slopes)
    HAS_BOXES: gl.constexpr = terms.bias.boxes is not None
    DROPS: gl.constexpr = terms.seed is not None
    # At PING_PONG 2 the turn comes from the first consumer, which has waited for the same tiles.
    LOADS_AWAITED: gl.constexpr = PING_PONG < 2 or CONSUMER == 0 or HAS_BOXES
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_KV)
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    HAS_LISTS: gl.constexpr = are_listed(problem.segments, problem.tree)
    IS_PLAIN: gl.constexpr = not (HAS_LISTS or IS_PART)  # a row that sees one key is known
    # Capped scores need no maximum in a dtype with the range of float32: m_i stays 0.
    ASKS: gl.constexpr = ADDS or DROPS or results.row_max is not None
    BOUNDED: gl.constexpr = rule.small_cap and dtype == gl.bfloat16 and IS_PLAIN and not ASKS
    # Where the caller asks for a row's largest score, it is m_i.
    ON_DEMAND: gl.constexpr = rescales_on_demand(HEAD_DIM_V) and results.row_max is None
    # A row's largest score excludes the sink, which joins at the end.
    SINK_LAST: gl.constexpr = BOUNDED or results.row_max is not None
    step = 0  # counted over all items
    turn = 0
    if PING_PONG and CONSUMER == NUM_CONSUMERS - 1:
        arrive(TURN, 256)
    item, place = own_item(turn, problem, shared, CONSUMER)
    q_slot = CONSUMER
    if AHEAD:
        # Only a program that takes items from a counter may have none.
        exists = len(shared) == 0 or item < problem.num_items
        if exists:
            mbarrier.wait(q_full.index(CONSUMER), 0)
            mbarrier.wait(k_full.index(0), 0)
        s = product_scores(q_tile, CONSUMER, k_tile, 0, HEAD_DIM, layout)
        s = warpgroup_mma_wait(0, deps=(s,))
        if exists:
            arrive(K_READ, READERS)
    while item < problem.num_items:
        batch, head, positions, keys, visible = locate_queries(
            item, place, problem, window_left, window_right, lists, BLOCK_Q, BLOCK_KV
        )
        start_q, seq_q, diagonal = positions
        first_kv, seq_kv = keys
        begin, before, full, after = visible
        first_row = start_q + CONSUMER * 64
        rows = first_row + gl.arange(0, 64, of_row)
        position, reach_left, reach_right = rows + diagonal, window_left, window_right
        row_q = batch.to(gl.int64) * problem.size
        row_kv = batch.to(gl.int64) * problem.size_other + first_kv
        marks = mark_queries(problem, row_q, row_kv, rows, seq_q)
        if IS_PART:
            position, reach_right = load_windows(problem.intervals, rows, seq_q)
            reach_left = 0
        m_i, l_i, acc, has_carry = start_rows(
            results, problem, batch, head, first_row, rows, seq_q, sinks_ptr, BLOCK_KV, HEAD_DIM_V,
            BOUNDED, SINK_LAST,
        )  # fmt: skip

        # The first tile of keys
        own, offset, bias = 0, 0, 0
        if ADDS or DROPS:
            own, own_q = _own_terms(terms, batch, head, first_row, problem, place)
            start_kv = kept_start(lists, batch, head, start_q, 0, visible, BLOCK_KV)
            offset = start_kv - first_row - diagonal
            bias, kept = _terms_of_tile(
                terms, own, own_q, first_row, start_kv, seq_q, seq_kv, BLOCK_KV, layout, not EDGES
            )
        if HAS_LISTS:
            start_kv = kept_start(lists, batch, head, start_q, 0, visible, BLOCK_KV)
            alike = step_is_alike(0, begin, before, problem.segments)
            of_keys = load_keys(problem, marks, start_kv, seq_kv, BLOCK_KV, layout, alike)
        if not AHEAD:
            slot = step % NUM_STAGES
            mbarrier.wait(q_full.index(CONSUMER), turn & 1)
            mbarrier.wait(k_full.index(slot), step // NUM_STAGES & 1)
            s = product_scores(q_tile, CONSUMER, k_tile, slot, HEAD_DIM, layout)
            s = warpgroup_mma_wait(0, deps=(s,))
            if HAS_BOXES:
                bias = read_bias_box(piece(bias_tile, slot).slice(64 * CONSUMER, 64, dim=0), layout)
            _report_read_keys(slot, NUM_STAGES, READERS, HAS_BOXES)
        s, shift, unit = _add_terms(s, terms, own, rule, offset, bias, EDGES)
        if EDGES:
            start_kv = kept_start(lists, batch, head, start_q, 0, visible, BLOCK_KV)
            s = hide(s, position, start_kv, seq_kv, reach_left, reach_right)
            if HAS_LISTS:
                s = hide_keys(s, problem, marks, position, of_keys)
        if BOUNDED:
            packed, l_i = bounded_update(s, l_i, rule, EDGES)
        else:
            e, alpha, m_i, l_i = _update(s, shift, unit, m_i, l_i, rule, EDGES, ADDS, ON_DEMAND)
            if JOINS:
                # No product runs here. ptxas would move the scaling of acc into the next products.
                acc = wait_sums(scale_rows(keep_rows(acc, has_carry), alpha), 0)
            packed = pack(e, dtype)
            if DROPS:
                packed = drop_packed(packed, kept)
        if EDGES:
            _clear_values(v_tile, v_full, step, problem, marks, 0, begin, before, seq_kv, start_kv)

        # Visit the other tiles of keys that these queries see; only tiles at the edges are masked.
        index = 1
        step += 1
        for masked in gl.static_range(1 if EDGES else 0, -1, -1):
            end = before + after if masked else before + full + after
            while index < end:
                slot = step % NUM_STAGES
                previous = (step - 1) % NUM_STAGES
                # s = scale · q kᵀ, and acc += p v for the previous tile
                if LOADS_AWAITED:
                    mbarrier.wait(k_full.index(slot), step // NUM_STAGES & 1)
                if PING_PONG:
                    wait_for_all(TURN + CONSUMER, 256)
                s = product_scores(q_tile, q_slot, k_tile, slot, HEAD_DIM, layout)
                if LOADS_AWAITED:
                    mbarrier.wait(v_full.index(previous), (step - 1) // NUM_STAGES & 1)
                p = unpack(packed, dtype, layout, "edge" if masked else "full")
                acc = add_product(acc, p, v_tile, previous)
                if PING_PONG:
                    arrive(TURN + NEXT, 256)
                if ADDS or DROPS:
                    start_kv = kept_start(lists, batch, head, start_q, index, visible, BLOCK_KV)
                    offset = start_kv - first_row - diagonal
                    bias, kept = _terms_of_tile(
                        terms, own, own_q, first_row, start_kv, seq_q, seq_kv, BLOCK_KV, layout,
                        not masked,
                    )  # fmt: skip
                if HAS_BOXES:
                    bias = read_bias_box(
                        piece(bias_tile, slot).slice(64 * CONSUMER, 64, dim=0), layout
                    )
                if DROPS:
                    s, kept = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s, kept))
                else:
                    s = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s,))
                _report_read_keys(slot, NUM_STAGES, READERS, HAS_BOXES)
                if masked:
                    start_kv = kept_start(lists, batch, head, start_q, index, visible, BLOCK_KV)
                    if HAS_LISTS:
                        # Its branch follows no term: ptxas 12.8 crashes where it follows some.
                        alike = step_is_alike(index, begin, before, problem.segments)
                        of_keys = load_keys(
                            problem, marks, start_kv, seq_kv, BLOCK_KV, layout, alike
                        )
                # p = exp(s - max)
                s, shift, unit = _add_terms(s, terms, own, rule, offset, bias, masked)
                if masked:
                    s = hide(s, position, start_kv, seq_kv, reach_left, reach_right)
                    if HAS_LISTS:
                        s = hide_keys(s, problem, marks, position, of_keys)
                if BOUNDED:
                    # Without a maximum each half is computed by itself; the second takes the
                    # registers of the p that was multiplied.
                    left, right = split_columns(s)
                    left, l_i = bounded_update(left, l_i, rule, masked)
                    acc, p = wait_product(acc, p)
                    arrive(V_READ + previous, READERS)
                    right, l_i = bounded_update(right, l_i, rule, masked)
                    packed = join_columns(left, right, packed)
                else:
                    e, alpha, m_i, l_i = _update(
                        s, shift, unit, m_i, l_i, rule, masked, ADDS, ON_DEMAND
                    )
                    # Rescale what was accumulated
                    acc, p = wait_product(acc, p)
                    arrive(V_READ + previous, READERS)
                    acc = rescale(acc, alpha, ON_DEMAND)
                    packed = pack(e, dtype)
                    if DROPS:
                        packed = drop_packed(packed, kept)
                if masked:
                    _clear_values(
                        v_tile, v_full, step, problem, marks, index, begin, before, seq_kv, start_kv
                    )
                index += 1
                step += 1
        if not OUT_IN_Q:
            mbarrier.arrive(q_read.index(q_slot), count=1)

        # The last p·v, and q·kᵀ of the next item; if there is none, that product is not used.
        turn += 1
        item, place = own_item(turn, problem, shared, CONSUMER)
        previous = (step - 1) % NUM_STAGES
        if AHEAD:
            slot = step % NUM_STAGES
            q_slot = (turn * NUM_CONSUMERS + CONSUMER) % NUM_TILES_Q
            if item < problem.num_items:
                mbarrier.wait(q_full.index(q_slot), turn * NUM_CONSUMERS // NUM_TILES_Q & 1)
                mbarrier.wait(k_full.index(slot), step // NUM_STAGES & 1)
            if PING_PONG:
                wait_for_all(TURN + CONSUMER, 256)
            s = product_scores(q_tile, q_slot, k_tile, slot, HEAD_DIM, layout)
        mbarrier.wait(v_full.index(previous), (step - 1) // NUM_STAGES & 1)
        p = unpack(packed, dtype, layout, "last")
        acc = add_product(acc, p, v_tile, previous)
        if AHEAD:
            if PING_PONG:
                arrive(TURN + NEXT, 256)
            s = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s,))
            if item < problem.num_items:
                arrive(K_READ + slot, READERS)
        # Reduce the row sums over each quad.
        l_i = gl.convert_layout(gl.sum(l_i, 1), of_row)
        factor = 1.0
        if BOUNDED:
            m_i = gl.where(l_i == 0.0, float("-inf"), m_i)
            factor = rounding_of_one_key(l_i, position, seq_kv, reach_left, reach_right, dtype)
        factor, l_safe = store_statistics(
            results, problem, batch, head, rows, seq_q, sinks_ptr, terms, m_i, l_i, factor,
            SINK_LAST,
        )  # fmt: skip
        acc, p = wait_product(acc, p)
        arrive(V_READ + previous, READERS)
        acc = scale_rows(acc, factor / l_safe)
        store_out(
            results, out_tile, acc, problem, batch, head, start_q, rows, seq_q, CONSUMER, OUT,
            HEAD_DIM_V,
        )  # fmt: skip
        if OUT_IN_Q:
            tma.store_wait(0)
            mbarrier.arrive(q_read.index(CONSUMER), count=1)
    tma.store_wait(0)


@gluon.jit
def _report_read_keys(
    slot, NUM_STAGES: gl.constexpr, READERS: gl.constexpr, HAS_BOXES: gl.constexpr
):
    """Report that a tile of keys has been read, and the tile of a bias beside it."""
    if HAS_BOXES:
        arrive_at_slot(slot, K_READ, NUM_STAGES, READERS)
    else:
        arrive(K_READ + slot, READERS)


@gluon.jit
def _own_terms(terms, batch, head, first_row, problem, place):
    """Return the `HeadTerms` of a consumer's rows, and the first row in dropout's numbering."""
    element, own_q = batch, first_row
    if problem.num_sequences is not None:
        element = place.sequence
        first, _size = rows_of_sequence(
            problem.offsets, element, problem.size, problem.num_sequences, problem.size
        )
        own_q = first_row - first
    return head_terms(terms, element, head), own_q


@gluon.jit
def _terms_of_tile(
    terms,
    own,
    own_q,
    first_row,
    start_kv,
    seq_q,
    seq_kv,
    BLOCK_KV: gl.constexpr,
    LAYOUT: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """Return a tile's bias, unless TMA loads it, and the dropout mask; 0 for what is missing.

    WHOLE: as in `load_bias`.
    """
    bias = 0
    if terms.bias.entries is not None and terms.bias.boxes is None:
        bias = load_bias(
            terms, own, first_row, start_kv, seq_q, seq_kv, 64, BLOCK_KV, LAYOUT, WHOLE=WHOLE
        )
    return bias, draw_masks(terms, own, own_q, start_kv, 64, BLOCK_KV, LAYOUT)


@gluon.jit
def _add_terms(s, terms, own, rule, offset, bias, MASKED: gl.constexpr):
    """Return what `scores_to_add` does for products q·k; without terms, scores if MASKED."""
    ADDS: gl.constexpr = adds_terms(terms.bias.entries, terms.relative, terms.slopes)
    shift, unit = 0, 1.0
    if ADDS and not rule.scale_first:
        s, shift, unit = scores_to_add(s, terms, own, rule, offset, bias)
    elif ADDS:
        s = scores_with_terms(s, terms, own, rule, offset, bias)
        shift = no_shift(s)
    elif MASKED:
        s = scaled_scores(s, rule)
    return s, shift, unit


@gluon.jit
def _update(
    s,
    shift,
    unit,
    m_i,
    l_i,
    rule,
    MASKED: gl.constexpr,
    ADDS: gl.constexpr,
    ON_DEMAND: gl.constexpr,
):
    """Update the running softmax with the result of `_add_terms`; ADDS: there are terms."""
    if ADDS:
        e, alpha, m_i, l_i = added_softmax_update(s, shift, unit, m_i, l_i)
    else:
        e, alpha, m_i, l_i = softmax_update(s, m_i, l_i, rule, MASKED, ON_DEMAND)
    return e, alpha, m_i, l_i


@gluon.jit
def _clear_values(
    v_tile,
    v_full,
    step,
    problem,
    marks,
    index,
    begin,
    before,
    seq_kv,
    start_kv,
):
    """Wait for a tile of values, then clear its rows of other sequences and of padding."""
    NUM_STAGES: gl.constexpr = v_tile[0].shape[0]
    if problem.num_sequences is not None:
        slot = step % NUM_STAGES
        clear_rows(v_tile, slot, seq_kv - start_kv, v_full.index(slot), step // NUM_STAGES & 1)
    if problem.segments is not None:
        slot = step % NUM_STAGES
        padded = step_has_padding(index, begin, before)
        clear_padding(
            v_tile, slot, marks.other_ids, start_kv, seq_kv, padded, v_full.index(slot),
            step // NUM_STAGES & 1,
        )  # fmt: skip
