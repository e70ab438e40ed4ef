"""A warpgroup that computes 64 rows of dk and dv of each work item of the SM90 backward."""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from torch_attn.kernels.explicit.barriers import (
    DO_READ,
    DS_WRITTEN,
    Q_READ,
    READERS,
    arrive,
    wait_for_all,
)
from torch_attn.kernels.explicit.carry import head_rows, store_carry
from torch_attn.kernels.explicit.distances import (
    add_end_sums,
    add_relative_gradient,
    follow_head,
    no_end_sums,
)
from torch_attn.kernels.explicit.hidden import load_queries
from torch_attn.kernels.explicit.intervals import load_windows
from torch_attn.kernels.explicit.items import locate_pairs, own_item
from torch_attn.kernels.explicit.registers import pack, scale_all, unpack
from torch_attn.kernels.explicit.steps import group_step, group_step_is_alike
from torch_attn.kernels.explicit.terms import (
    drop,
    drop_scaled,
    head_terms,
    prepare_tile,
    table_sides,
)
from torch_attn.kernels.explicit.tma import column_pieces, num_pieces, read_row, store_result
from torch_attn.kernels.explicit.wgmma import (
    add_product,
    add_shared,
    left_scores,
    load_left,
    product_layout,
    product_scores,
    wait_product,
    wait_products,
    wait_sums,
    zeros,
)
from torch_attn.kernels.library.tiles import ROW_PADDING
from torch_attn.kernels.sm90.flash_bwd_dkdv_adder import hand_over
from torch_attn.kernels.sm90.queries import (
    Reach,
    clear_keys,
    clear_queries,
    exponents_of_keys,
    hand_back_bias,
    locate_keys,
    mark_item,
    read_lse,
    with_bias,
)
from torch_attn.kernels.sm90.sums import add_rows, start_dq, tile_of_ds

# ptxas of Triton 3.9 spills 572 bytes a step in a backward that holds k and v in registers beside
# capped scores and dq; that of 3.6 spills 20 in all.
HOLDS_CAPPED_KEYS = not hasattr(tma, "async_load")


class Visit(NamedTuple):
    """A work item's visit to a tile of queries.

    Attributes:
        step: counted over all items.
        last: the item's last step.
        start: the tile's first query.
        member: which of the item's heads these queries are of.
        alike: the tile's queries and the keys are of one segment.
        keys: the first of the two tiles of 64 keys in shared memory.
    """

    step: Any
    last: Any
    start: Any
    member: Any
    alike: Any
    keys: Any


@gluon.jit
def consume_queries(
    tiles,
    of_dq,
    barriers,
    shared,
    dk_maps,
    dv_maps,
    problem,
    rule,
    terms,
    window_left,
    window_right,
    dk_sum_ptr,
    dv_sum_ptr,
    CONSUMER: gl.constexpr,
    FUSED: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    MEMBERS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    EDGES: gl.constexpr,
):
    """Compute 64 rows of dk and dv of each of a program's work items."""
    k_tile, v_tile, q_tile, do_tile, _lse2_row, _delta_row, _bias_tile, _rest2_row = tiles
    ds_buffer, dq_tiles = of_dq
    k_full, v_full, kv_read, q_full, do_full = barriers
    IS_PACKED: gl.constexpr = problem.num_sequences is not None
    # Intervals say which keys are seen, and dk and dv stay in float32.
    IS_PART: gl.constexpr = problem.intervals is not None
    CLEARS: gl.constexpr = IS_PACKED or problem.segments is not None
    KV_STAGES: gl.constexpr = k_tile[0].shape[0] // 2
    Q_STAGES: gl.constexpr = q_tile[0].shape[0]
    BLOCK_Q: gl.constexpr = q_tile[0].shape[3]
    CAPPED: gl.constexpr = FUSED and rule.softcap is not None
    HAS_TABLE: gl.constexpr = FUSED and terms.relative is not None
    SMALL: gl.constexpr = is_small(HEAD_DIM, HEAD_DIM_V, CAPPED, HAS_TABLE)
    # Tiles that are far off in a table have their own code: ptxas spills in code that they share
    # with others. Small heads leave enough registers.
    LARGE: gl.constexpr = not is_small(HEAD_DIM, HEAD_DIM_V, False, False)
    SPLITS: gl.constexpr = LARGE and HAS_TABLE
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_Q)
    step = 0  # counted over all items
    turn = 0
    item, place = own_item(turn, problem, shared, CONSUMER)
    while item < problem.num_items:
        batch, first_head, positions, queries, visible = locate_keys(
            item, place, problem, window_left, window_right, FUSED, MEMBERS, BLOCK_Q
        )
        start_kv, seq_kv, diagonal = positions
        begin, before, full, after = visible
        # Key positions, in query coordinates.
        key = start_kv + CONSUMER * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout)) - diagonal
        end = seq_kv - diagonal
        if IS_PACKED:
            # If the sequence has no query, the rows visited may be padding with a sink. They see no
            # key: q and dout count as 0, but a table's gradient is a sum of ds itself.
            end = gl.where(queries.size > 0, end, -(2**30))
        reach = Reach(key, end, window_left, window_right)
        if IS_PART:
            rows = key + diagonal
            exists = rows < seq_kv
            # The first query that sees each key, and how far to the left queries see it after that.
            key, left = load_windows(problem.intervals, rows, seq_kv)
            reach = Reach(key, None, left[:, None], 0)
        marks = mark_item(problem, place, batch, positions, key)
        first = start_kv + CONSUMER * 64
        pairs = locate_pairs(problem, place, batch, first_head, first, first - diagonal)
        dk = zeros(64, HEAD_DIM)
        dv = zeros(64, HEAD_DIM_V)
        ends = no_end_sums(terms)
        last = step + (before + full + after) * MEMBERS - 1
        stage = turn % KV_STAGES
        phase = turn // KV_STAGES & 1
        tile = 2 * stage

        # The first tile of queries has no previous ds.
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.wait(q_full.index(step % Q_STAGES), step // Q_STAGES & 1)
        held = ()
        if CLEARS:
            clear_queries(q_tile, q_full, step, 0, queries, visible, problem, marks, MEMBERS)
            clear_queries(do_tile, do_full, step, 0, queries, visible, problem, marks, MEMBERS)
            clear_queries(q_tile, q_full, step, 1, queries, visible, problem, marks, MEMBERS)
            # Clear the other consumer's rows only where dq needs them: both then meet in each step.
            # Without dq that consumer may already have stored dk and dv where its rows were.
            if FUSED:
                clear_keys(
                    k_tile, tile + 1 - CONSUMER, k_full.index(stage), phase, positions, queries,
                    visible, problem, marks,
                )  # fmt: skip
            clear_keys(
                k_tile, tile + CONSUMER, k_full.index(stage), phase, positions, queries, visible,
                problem, marks,
            )  # fmt: skip
            clear_keys(
                v_tile, tile + CONSUMER, v_full.index(stage), phase, positions, queries, visible,
                problem, marks,
            )  # fmt: skip
        if SMALL:
            held = (load_left(k_tile, tile + CONSUMER, HEAD_DIM, layout),)
        s = ()
        if FUSED or SMALL:
            slot_q = step % Q_STAGES
            s = (product_scores(k_tile, tile + CONSUMER, q_tile, slot_q, HEAD_DIM, layout),)
        mbarrier.wait(v_full.index(stage), phase)
        if SMALL:
            held = (held[0], load_left(v_tile, tile + CONSUMER, HEAD_DIM_V, layout))
        s = wait_sums(s, 0)
        if KV_STAGES > 1:
            # Once the previous item's dk and dv are out, its place is free.
            tma.store_wait(0)
            mbarrier.arrive(kv_read.index((tile ^ 2) + CONSUMER), count=1, pred=turn > 0)
        member, start = group_step(0, begin, before, full, after, BLOCK_Q, MEMBERS)
        alike = group_step_is_alike(0, begin, before, full, problem.segments, MEMBERS)
        visit = Visit(step, last, start, member, alike, tile)
        s, dk, dv, ds, ends = _visit_queries(
            s, dk, dv, None, ends, held, tiles, of_dq, barriers, visit, reach, rule, terms, pairs,
            problem, marks, queries.size, CONSUMER, FUSED, EDGES, False, HEAD_DIM, HEAD_DIM_V,
        )  # fmt: skip

        # Visit the other tiles that see these keys; only tiles at the edges are masked.
        index = 1
        step += 1
        for masked in gl.static_range(1 if EDGES else 0, -1, -1):
            end = (before + full + after) * MEMBERS
            if masked:
                end = (before + after) * MEMBERS
            while index < end:
                member, start = group_step(index, begin, before, full, after, BLOCK_Q, MEMBERS)
                if CLEARS and masked:
                    begun = step - index
                    clear_queries(
                        do_tile, do_full, begun, index, queries, visible, problem, marks, MEMBERS
                    )
                    clear_queries(
                        q_tile, q_full, begun, index + 1, queries, visible, problem, marks, MEMBERS
                    )
                alike = False
                if masked:
                    alike = group_step_is_alike(
                        index, begin, before, full, problem.segments, MEMBERS
                    )
                if MEMBERS > 1:
                    earlier, _start = group_step(
                        index - 1, begin, before, full, after, BLOCK_Q, MEMBERS
                    )
                    ends = follow_head(ends, terms, first_head + member, first_head + earlier)
                visit = Visit(step, last, start, member, alike, tile)
                is_far = False
                if SPLITS and not masked:
                    sides = table_sides(terms, pairs.position - start, 64, BLOCK_Q)
                    is_far = sides[0] | sides[1]
                for far in gl.static_range(2 if SPLITS and not masked else 1):
                    if not SPLITS or masked or is_far == (far == 1):
                        s, dk, dv, ds, ends = _visit_queries(
                            s, dk, dv, ds, ends, held, tiles, of_dq, barriers, visit, reach, rule,
                            terms, pairs, problem, marks, queries.size, CONSUMER, FUSED, masked,
                            far == 1, HEAD_DIM, HEAD_DIM_V,
                        )  # fmt: skip
                index += 1
                step += 1

        # The last dq and dk.
        previous = (step - 1) % Q_STAGES
        if FUSED:
            dq = start_dq(ds_buffer, step - 1, k_tile, tile, CONSUMER, HEAD_DIM)
            dk = add_shared(dk, tile_of_ds(ds_buffer, step - 1, CONSUMER), q_tile, previous)
        else:
            left = unpack(ds, dtype, layout, "end")
            dk = add_product(dk, left, q_tile, previous)
        member, start = group_step(index - 1, begin, before, full, after, BLOCK_Q, MEMBERS)
        add_end_sums(ends, terms, first_head + member)
        if terms.seed is not None:
            dv = scale_all(dv, terms.dropout.scale)
        head_kv = first_head // GROUP_SIZE
        heads_kv = problem.heads_q // GROUP_SIZE
        if IS_PART:
            rows_of_dv = head_rows(dv_maps[0], batch, seq_kv, first, head_kv, heads_kv, HEAD_DIM_V)
            store_carry(rows_of_dv, dv, exists, heads_kv, HEAD_DIM_V)
        elif dv_sum_ptr is None:
            # Store dv where v was, which no other warpgroup reads.
            store_result(
                dv_maps, v_tile, tile + CONSUMER, dv, batch, head_kv, first, seq_kv, heads_kv,
                IS_PACKED, HEAD_DIM_V,
            )  # fmt: skip
        if FUSED:
            dq = wait_sums(dq, num_pieces(HEAD_DIM))
            hand_over(dq, dq_tiles[CONSUMER], terms.dbias.boxes is not None, CONSUMER)
            dk = wait_sums(dk, 0)
        else:
            dk, left = wait_product(dk, left)
        arrive(Q_READ + previous, READERS)
        if IS_PART:
            rows_of_dk = head_rows(dk_maps[0], batch, seq_kv, first, head_kv, heads_kv, HEAD_DIM)
            dk = scale_all(dk, rule.scale)
            store_carry(rows_of_dk, dk, exists, heads_kv, HEAD_DIM)
        elif dk_sum_ptr is not None:
            padded_keys = gl.cdiv(seq_kv, ROW_PADDING) * ROW_PADDING
            row = (batch * heads_kv + head_kv).to(gl.int64) * padded_keys + first
            add_rows(dv_sum_ptr, dv, row, HEAD_DIM_V)
            add_rows(dk_sum_ptr, dk, row, HEAD_DIM)
        else:
            # Scale dk and store it where k was, once both consumers have read it.
            if FUSED:
                wait_for_all(DS_WRITTEN, 256)
            store_result(
                dk_maps, k_tile, tile + CONSUMER, scale_all(dk, rule.scale), batch, head_kv, first,
                seq_kv, heads_kv, IS_PACKED, HEAD_DIM,
            )  # fmt: skip
        if KV_STAGES == 1:
            tma.store_wait(0)
            mbarrier.arrive(kv_read.index(CONSUMER), count=1)
        turn += 1
        item, place = own_item(turn, problem, shared, CONSUMER)
    tma.store_wait(0)


@triton.constexpr_function
def is_small(head_dim, head_dim_v, capped_dq, has_table):
    """Return True if a consumer's registers can also hold its rows of k and v.

    capped_dq: scores are capped and dq is added; has_table: a table has addresses, as has
    its gradient.
    """
    columns = max(sum(column_pieces(head_dim)), sum(column_pieces(head_dim_v)))
    return columns <= 64 and not has_table and (HOLDS_CAPPED_KEYS or not capped_dq)


@gluon.jit
def _visit_queries(
    s,
    dk,
    dv,
    ds,
    ends,
    held,
    tiles,
    of_dq,
    barriers,
    visit,
    reach,
    rule,
    terms,
    pairs,
    problem,
    marks,
    size_q,
    CONSUMER: gl.constexpr,
    FUSED: gl.constexpr,
    MASKED: gl.constexpr,
    FAR: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    """Visit a tile of queries; return s of the next tile, dk, dv, packed ds, and `EndSums`.

    Keys are rows.

    Products are issued so that some overlap all arithmetic: dq and dk of the previous tile, and dp,
    with the exponentials; dv with ds; s of the next tile with the stores of ds. That s takes dp's
    registers. In the pair of kernels, heads that are not small have no room for it: there s is
    issued with dp. After the last tile, s is computed again and not used.

    ends: `EndSums` of the previous tiles.
    ds: of the previous tile; None for the first.
    held: rows of k and v as left operands, so that shared memory is read only for q and dout; or
        ().
    reach: `Reach` of the keys.
    pairs: where the pairs of the item's first head are.
    FAR: as in `terms.add_terms`.
    size_q: how many queries the sequence has.
    """
    k_tile, v_tile, q_tile, do_tile, _lse2_row, delta_row, _bias_tile, _rest2_row = tiles
    ds_buffer, dq_tiles = of_dq
    _k_full, _v_full, _kv_read, q_full, do_full = barriers
    step, last, start, member, alike, keys = visit
    Q_STAGES: gl.constexpr = q_tile[0].shape[0]
    DO_STAGES: gl.constexpr = do_tile[0].shape[0]
    FIRST: gl.constexpr = ds is None
    BLOCK_Q: gl.constexpr = q_tile[0].shape[3]
    CAPPED: gl.constexpr = FUSED and rule.softcap is not None
    HAS_TABLE: gl.constexpr = FUSED and terms.relative is not None
    SMALL: gl.constexpr = is_small(HEAD_DIM, HEAD_DIM_V, CAPPED, HAS_TABLE)
    AHEAD: gl.constexpr = FUSED or SMALL
    S_PIECES: gl.constexpr = num_pieces(HEAD_DIM)
    DP_PIECES: gl.constexpr = num_pieces(HEAD_DIM_V)
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_Q)
    slot = step % DO_STAGES
    previous = (step - 1) % Q_STAGES
    # 0, but unknown to the compiler. Otherwise it would hoist the descriptors of k and v out of the
    # loop, and there are no registers for them.
    fresh = step >> 30
    keys += fresh

    of_queries = load_queries(problem, marks, start, size_q, BLOCK_Q, layout, alike)
    own = head_terms(terms, pairs.element, pairs.head + member)

    # dq += ds k and dk += dsᵀ q for the previous tile
    if not FIRST:
        if FUSED:
            dq = start_dq(ds_buffer, step - 1, k_tile, keys, CONSUMER, HEAD_DIM)
        if FUSED and not SMALL:
            dk = add_shared(dk, tile_of_ds(ds_buffer, step - 1, CONSUMER), q_tile, previous)
        else:
            left = unpack(ds, dtype, layout, "loop")
            dk = add_product(dk, left, q_tile, previous)
    of_tile = prepare_tile(
        terms, own, start, pairs.first, pairs.position - start, size_q, problem.size, BLOCK_Q, 64,
        layout, True,
    )  # fmt: skip
    if AHEAD and not SMALL:
        # Wait before dq is stored: testing a barrier later would wait until the stores are done.
        mbarrier.wait(do_full.index(slot), step // DO_STAGES & 1)
        of_tile = with_bias(of_tile, terms, tiles, CONSUMER, layout)
        lse = read_lse(tiles, step % Q_STAGES, layout)
        power, dcap = exponents_of_keys(
            s[0], lse, start, reach, rule, problem, marks, of_queries, MASKED, terms, own, of_tile,
            FAR,
        )  # fmt: skip
        if not FIRST:
            # dp takes the registers of dq.
            dq = wait_sums(dq, S_PIECES)
            hand_over(dq, dq_tiles[CONSUMER], terms.dbias.boxes is not None, CONSUMER)
        if fresh > 0:
            # Never true. Without a branch here ptxas spills, and serializes the products.
            mbarrier.wait(do_full.index(slot), step // DO_STAGES & 1)
    else:
        if not AHEAD:
            # sᵀ = scale · k qᵀ
            slot_q = step % Q_STAGES
            mbarrier.wait(q_full.index(slot_q), step // Q_STAGES & 1)
            now = product_scores(k_tile, keys + CONSUMER, q_tile, slot_q, HEAD_DIM, layout)
        mbarrier.wait(do_full.index(slot), step // DO_STAGES & 1)
    # dpᵀ = v doutᵀ
    if SMALL:
        dp = left_scores(held[1], do_tile, slot, HEAD_DIM_V, layout)
    else:
        dp = product_scores(v_tile, keys + CONSUMER, do_tile, slot, HEAD_DIM_V, layout)

    # pᵀ = exp(sᵀ - lse)
    if SMALL or not AHEAD:
        if AHEAD:
            now = s[0]
        else:
            now = warpgroup_mma_wait(DP_PIECES, deps=(now,))
        if not FUSED:
            reach = Reach(reach.key, None, reach.left, reach.right)
        of_tile = with_bias(of_tile, terms, tiles, CONSUMER, layout)
        lse = read_lse(tiles, step % Q_STAGES, layout)
        power, dcap = exponents_of_keys(
            now, lse, start, reach, rule, problem, marks, of_queries, MASKED, terms, own, of_tile,
            FAR,
        )  # fmt: skip
    p = gl.exp2(power)
    kept = drop(p, terms, of_tile.kept, True).to(dtype)
    p_left = gl.convert_layout(kept, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    if FUSED and SMALL and not FIRST:
        dq = wait_sums(dq, S_PIECES + DP_PIECES)
        hand_over(dq, dq_tiles[CONSUMER], terms.dbias.boxes is not None, CONSUMER)
    # dv += pᵀ dout
    dv = add_product(dv, p_left, do_tile, slot)
    hand_back_bias(terms)

    # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
    p = p * dcap
    if FIRST:
        dp = warpgroup_mma_wait(DP_PIECES, deps=(dp,))
    else:
        if FUSED and not SMALL:
            dk, dp = wait_product(dk, dp, DP_PIECES)
        else:
            dk, dp, left = wait_products(dk, dp, left, DP_PIECES)
        arrive(Q_READ + previous, READERS)
    delta = read_row(delta_row, slot, layout)
    dp = drop_scaled(dp, terms, of_tile, True)
    exact = p * (dp - delta[None, :])
    if terms.drelative is not None:
        ends = add_relative_gradient(
            ends, terms, pairs.head + member, pairs.position - start, exact, FAR
        )
    ds = pack(exact, dtype)
    if AHEAD:
        # s of the next tile.
        following = gl.minimum(step + 1, last)
        slot_q = following % Q_STAGES
        mbarrier.wait(q_full.index(slot_q), following // Q_STAGES & 1)
        if SMALL:
            s = (left_scores(held[0], q_tile, slot_q, HEAD_DIM, layout),)
        else:
            s = (product_scores(k_tile, keys + CONSUMER, q_tile, slot_q, HEAD_DIM, layout),)
    # A barrier or a branch follows: it keeps ptxas from hoisting the last waits.
    if FUSED:
        place = tile_of_ds(ds_buffer, step, CONSUMER)
        written = unpack(ds, dtype, layout, "store")
        place.store(gl.convert_layout(written, layout, assert_trivial=True))
        fence_async_shared()
        wait_for_all(DS_WRITTEN, 256)
    else:
        mbarrier.wait(do_full.index(slot), step // DO_STAGES & 1)
    dv, p_left = wait_product(dv, p_left, S_PIECES if AHEAD else 0)
    arrive(DO_READ + slot, READERS)
    s = wait_sums(s, 0)
    return s, dk, dv, ds, ends
