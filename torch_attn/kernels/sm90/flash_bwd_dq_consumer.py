"""A warpgroup that computes 64 rows of dq of each work item of the SM90 backward."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from torch_attn.kernels.explicit.barriers import K_READ, READERS, V_READ, arrive
from torch_attn.kernels.explicit.carry import add_carry, head_rows
from torch_attn.kernels.explicit.hidden import hide_keys, load_keys, mark_queries
from torch_attn.kernels.explicit.intervals import load_windows
from torch_attn.kernels.explicit.items import are_listed, locate_pairs, own_item
from torch_attn.kernels.explicit.registers import copy_layout, pack, scale_all, unpack
from torch_attn.kernels.explicit.steps import rows_have_padding, step_has_padding, step_start
from torch_attn.kernels.explicit.terms import (
    adds_terms,
    drop_scaled,
    head_terms,
    prepare_tile,
    store_bias,
)
from torch_attn.kernels.explicit.tma import (
    clear_padding,
    clear_rows,
    num_pieces,
    piece,
    piece_start,
    store_result,
)
from torch_attn.kernels.explicit.wgmma import (
    add_product,
    product_layout,
    product_scores,
    wait_product,
    zeros,
)
from torch_attn.kernels.explicit.wgmma_scores import exponents, visible_scores
from torch_attn.kernels.library.sequences import count_sequence_tiles
from torch_attn.kernels.library.softmax import LOG2E
from torch_attn.kernels.library.tiles import ROW_PADDING, head_base
from torch_attn.kernels.sm90.flash_bwd_dq_producer import locate_queries


@gluon.jit
def consume_keys(
    tiles,
    barriers,
    shared,
    out,
    out_strides,
    statistics,
    dq_maps,
    problem,
    rule,
    terms,
    window_left,
    window_right,
    CONSUMER: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    EDGES: gl.constexpr,
):
    """Compute 64 rows of dq of each of a program's work items."""
    q_tile, do_tile, out_tile, k_tile, v_tile = tiles
    q_full, do_full, out_full, q_read, k_full, v_full = barriers
    total_q, heads_q = problem.size, problem.heads_q
    IS_PACKED: gl.constexpr = problem.num_sequences is not None
    # These keys are some of all; the rows are prepared, and dq is added to that of the others.
    IS_PART: gl.constexpr = problem.intervals is not None
    HAS_LISTS: gl.constexpr = are_listed(problem.segments, problem.tree)
    Q_STAGES: gl.constexpr = q_tile[0].shape[0] // 2
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    ADDS: gl.constexpr = adds_terms(terms.bias.entries, terms.relative, terms.slopes)
    HAS_TERMS: gl.constexpr = ADDS or terms.seed is not None
    V_STAGES: gl.constexpr = v_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_KV)
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    step = 0  # counted over all items
    turn = 0
    item, place = own_item(turn, problem, shared, CONSUMER)
    while item < problem.num_items:
        batch, head, positions, keys, shift, read_rows, visible = locate_queries(
            item, place, problem, window_left, window_right, BLOCK_KV
        )
        start_q, seq_q, diagonal = positions
        first_kv, seq_kv = keys
        begin, before, full, after = visible
        rows = start_q + CONSUMER * 64 + gl.arange(0, 64, of_row)
        position, reach_left, reach_right = rows + diagonal, window_left, window_right
        row_q = batch.to(gl.int64) * problem.size
        row_kv = batch.to(gl.int64) * problem.size_other + first_kv
        marks = mark_queries(problem, row_q, row_kv, rows, seq_q)
        first = start_q + CONSUMER * 64
        pairs = locate_pairs(problem, place, batch, head, first, first + diagonal)
        of_head = head_terms(terms, pairs.element, head)
        first_row = (batch * heads_q + head).to(gl.int64) * total_q
        if IS_PART:
            position, reach_right = load_windows(problem.intervals, rows, seq_q)
            reach_left = 0
            reach_right = reach_right[:, None]
        else:
            lse = gl.load(statistics.lse + first_row + rows, mask=rows < seq_q, other=float("inf"))

        # The first tile of keys has no ds·k to overlap with its exponentials.
        of_keys = (0, 0, 0, False)
        if HAS_LISTS:
            start_kv = step_start(0, begin, before, full, after, BLOCK_KV)
            of_keys = load_keys(problem, marks, start_kv, seq_kv, BLOCK_KV, layout)
        slot = step % NUM_STAGES
        slot_v = step % V_STAGES
        slot_q = turn % Q_STAGES * 2 + CONSUMER
        phase = turn // Q_STAGES & 1
        mbarrier.wait(q_full.index(slot_q), phase)
        mbarrier.wait(k_full.index(slot), step // NUM_STAGES & 1)
        if IS_PACKED:
            # Rows of another sequence or of padding may be NaN.
            rest = seq_kv - step_start(0, begin, before, full, after, BLOCK_KV)
            clear_rows(k_tile, slot, rest, k_full.index(slot), step // NUM_STAGES & 1)
            clear_rows(v_tile, slot_v, rest, v_full.index(slot_v), step // V_STAGES & 1)
            clear_rows(q_tile, slot_q, read_rows, q_full.index(slot_q), phase)
            clear_rows(do_tile, slot_q, read_rows, do_full.index(slot_q), phase)
        if problem.segments is not None:
            padded = step_has_padding(0, begin, before)
            clear_padding(
                k_tile, slot, marks.other_ids, start_kv, seq_kv, padded, k_full.index(slot),
                step // NUM_STAGES & 1,
            )  # fmt: skip
            clear_padding(
                v_tile, slot_v, marks.other_ids, start_kv, seq_kv, padded, v_full.index(slot_v),
                step // V_STAGES & 1,
            )  # fmt: skip
            padded, first = rows_have_padding(begin), start_q + CONSUMER * 64
            clear_padding(
                q_tile, slot_q, marks.own_ids, first, seq_q, padded, q_full.index(slot_q), phase
            )
            clear_padding(
                do_tile, slot_q, marks.own_ids, first, seq_q, padded, do_full.index(slot_q), phase
            )
        if Q_STAGES > 1:
            # Once the previous item's dq is out, its place is free.
            tma.store_wait(0)
            mbarrier.arrive(q_read.index(slot_q ^ 2), count=1, pred=turn > 0)
        s = product_scores(q_tile, slot_q, k_tile, slot, HEAD_DIM, layout)
        of_tile = (0, 0, 0)
        if HAS_TERMS:
            start_kv = step_start(0, begin, before, full, after, BLOCK_KV)
            of_tile = prepare_tile(
                terms, of_head, pairs.first, start_kv, start_kv - pairs.position, seq_q, seq_kv,
                64, BLOCK_KV, layout,
            )  # fmt: skip
        # delta = rowsum(dout ∘ out) - dlse; lse2 is +inf where a row saw no key or does not exist
        mbarrier.wait(do_full.index(slot_q), phase)
        if len(out_tile) > 0:
            mbarrier.wait(out_full.index(slot_q), phase)
            delta = _dot_rows(do_tile, out_tile, slot_q, of_row)
        elif not IS_PART:
            base = head_base(out, out_strides, batch, head)
            first = start_q + CONSUMER * 64
            delta = _dot_loaded(
                do_tile, slot_q, base, first, seq_q, out_strides.row, HEAD_DIM_V, of_row
            )
        if IS_PACKED:
            delta = gl.where(rows < seq_q, delta, 0.0)
        if statistics.dlse is not None:
            has_key = (rows < seq_q) & (lse != float("-inf"))
            delta -= gl.load(statistics.dlse + first_row + rows, mask=has_key, other=0.0)
        rest2 = 0
        if not IS_PART:
            lse2 = gl.where(lse == float("-inf"), float("inf"), lse)
            if ADDS:
                rest2 = gl.load(statistics.rest + first_row + rows, mask=rows < seq_q, other=0.0)
                rest2 *= LOG2E
            else:
                lse2 *= LOG2E
        padded_rows = (
            count_sequence_tiles(total_q, problem.num_sequences, ROW_PADDING) * ROW_PADDING
        )
        first_row = (batch * heads_q + head).to(gl.int64) * padded_rows + shift
        if IS_PART:
            lse2 = gl.load(statistics.lse2 + first_row + rows)
            delta = gl.load(statistics.delta + first_row + rows)
        else:
            gl.store(statistics.lse2 + first_row + rows, lse2)
            gl.store(statistics.delta + first_row + rows, delta)
            if ADDS:
                gl.store(statistics.rest2 + first_row + rows, rest2)
                rest2 = rest2[:, None]
        mbarrier.wait(v_full.index(slot_v), step // V_STAGES & 1)
        dp = product_scores(do_tile, slot_q, v_tile, slot_v, HEAD_DIM_V, layout)
        s = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s,))
        key = step_start(0, begin, before, full, after, BLOCK_KV)
        p = _probabilities(
            s, position, key, lse2[:, None], rest2, seq_kv, rule, reach_left, reach_right, problem,
            marks, of_keys, EDGES, BLOCK_KV, terms, of_head, of_tile,
        )  # fmt: skip
        dp = warpgroup_mma_wait(0, deps=(dp,))
        arrive(V_READ + slot_v, READERS)
        dp = drop_scaled(dp, terms, of_tile)
        ds = p * (dp - delta[:, None])
        if terms.dbias.entries is not None:
            store_bias(terms.dbias, ds, pairs, key, seq_q, seq_kv)
        ds = pack(ds, dtype)
        dq = zeros(64, HEAD_DIM)

        # Visit the other tiles of keys that these queries see; only tiles at the edges are masked.
        index = 1
        step += 1
        for masked in gl.static_range(1 if EDGES else 0, -1, -1):
            end = before + full + after
            if masked:
                end = before + after
            while index < end:
                slot = step % NUM_STAGES
                slot_v = step % V_STAGES
                previous = (step - 1) % NUM_STAGES
                own = slot_q
                if len(out_tile) == 0:
                    # 0, but unknown to the compiler. Otherwise it would hoist the descriptors of q
                    # and dout out of the loop, and there are no registers for them.
                    own += step >> 30
                if IS_PACKED and masked:
                    rest = seq_kv - step_start(index, begin, before, full, after, BLOCK_KV)
                    clear_rows(k_tile, slot, rest, k_full.index(slot), step // NUM_STAGES & 1)
                    clear_rows(v_tile, slot_v, rest, v_full.index(slot_v), step // V_STAGES & 1)
                if problem.segments is not None and masked:
                    start_kv = step_start(index, begin, before, full, after, BLOCK_KV)
                    padded = step_has_padding(index, begin, before)
                    clear_padding(
                        k_tile, slot, marks.other_ids, start_kv, seq_kv, padded, k_full.index(slot),
                        step // NUM_STAGES & 1,
                    )  # fmt: skip
                    clear_padding(
                        v_tile, slot_v, marks.other_ids, start_kv, seq_kv, padded,
                        v_full.index(slot_v), step // V_STAGES & 1,
                    )  # fmt: skip
                # dq += ds k for the previous tile, and s = scale · q kᵀ
                left = unpack(ds, dtype, layout, "loop")
                dq = add_product(dq, left, k_tile, previous)
                mbarrier.wait(k_full.index(slot), step // NUM_STAGES & 1)
                s = product_scores(q_tile, own, k_tile, slot, HEAD_DIM, layout)
                dq, left = wait_product(dq, left, num_pieces(HEAD_DIM))
                arrive(K_READ + previous, READERS)
                # dp = dout vᵀ
                mbarrier.wait(v_full.index(slot_v), step // V_STAGES & 1)
                dp = product_scores(do_tile, own, v_tile, slot_v, HEAD_DIM_V, layout)
                if HAS_TERMS:
                    start_kv = step_start(index, begin, before, full, after, BLOCK_KV)
                    of_tile = prepare_tile(
                        terms, of_head, pairs.first, start_kv, start_kv - pairs.position, seq_q,
                        seq_kv, 64, BLOCK_KV, layout,
                    )  # fmt: skip
                # p = exp(s - lse)
                s = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s,))
                key = step_start(index, begin, before, full, after, BLOCK_KV)
                hidden = (0, 0, 0, False)
                if HAS_LISTS and masked:
                    hidden = load_keys(problem, marks, key, seq_kv, BLOCK_KV, layout)
                p = _probabilities(
                    s, position, key, lse2[:, None], rest2, seq_kv, rule, reach_left, reach_right,
                    problem, marks, hidden, masked, BLOCK_KV, terms, of_head, of_tile,
                )  # fmt: skip
                # This wait passes at once. Its branch keeps ptxas from hoisting the next wait.
                mbarrier.wait(v_full.index(slot_v), step // V_STAGES & 1)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                arrive(V_READ + slot_v, READERS)
                dp = drop_scaled(dp, terms, of_tile)
                # ds = p ∘ (dp - delta) ∘ dcap
                ds = p * (dp - delta[:, None])
                if terms.dbias.entries is not None:
                    store_bias(terms.dbias, ds, pairs, key, seq_q, seq_kv)
                ds = pack(ds, dtype)
                index += 1
                step += 1

        # The last ds·k.
        previous = (step - 1) % NUM_STAGES
        left = unpack(ds, dtype, layout, "end")
        dq = add_product(dq, left, k_tile, previous)
        dq, left = wait_product(dq, left)
        arrive(K_READ + previous, READERS)

        # Scale, and store where q was or add to dq through other keys.
        dq = scale_all(dq, rule.scale)
        first = start_q + CONSUMER * 64
        if IS_PART:
            carried = head_rows(dq_maps[0], batch, seq_q, first, head, heads_q, HEAD_DIM)
            add_carry(carried, dq, rows < seq_q, heads_q, HEAD_DIM)
        else:
            store_result(
                dq_maps, q_tile, slot_q, dq, batch, head, first, seq_q, heads_q, IS_PACKED,
                HEAD_DIM,
            )  # fmt: skip
        if Q_STAGES == 1:
            tma.store_wait(0)
            mbarrier.arrive(q_read.index(CONSUMER), count=1)
        turn += 1
        item, place = own_item(turn, problem, shared, CONSUMER)
    tma.store_wait(0)


@gluon.jit
def _dot_rows(a, b, slot, LAYOUT: gl.constexpr):
    """Return the product of each row of a tile with that of another tile."""
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
    """Return the product of each row of a tile with that of a matrix in memory, from `start` on."""
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


@gluon.jit
def _probabilities(
    s,
    position,
    start_kv,
    lse2,
    rest2,
    end,
    rule,
    window_left,
    window_right,
    problem,
    marks,
    of_keys,
    MASKED: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    terms,
    of_head,
    of_tile,
):
    """Return p ∘ dcap, the factor of dp - delta in ds. Queries are rows."""
    key = start_kv + gl.arange(0, BLOCK_KV, gl.SliceLayout(0, s.type.layout))
    s, scale, dcap = visible_scores(
        s, position[:, None], key[None, :], end, rule, window_left, window_right, MASKED, terms,
        of_head, of_tile,
    )  # fmt: skip
    if MASKED:
        s = hide_keys(s, problem, marks, position, of_keys)
    ADDS: gl.constexpr = adds_terms(terms.bias.entries, terms.relative, terms.slopes)
    return gl.exp2(exponents(s, scale, lse2, rest2, ADDS)) * dcap
