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
    wait_for_step,
)
from torch_attn.kernels.explicit.carry import head_rows, store_carry
from torch_attn.kernels.explicit.distances import (
    add_end_sums,
    add_relative_gradient,
    follow_head,
    no_end_sums,
)
from torch_attn.kernels.explicit.hidden import load_queries
from torch_attn.kernels.explicit.items import own_item
from torch_attn.kernels.explicit.registers import pack, scale_all, unpack
from torch_attn.kernels.explicit.steps import group_step, group_step_is_alike
from torch_attn.kernels.explicit.terms import drop, drop_scaled, head_terms, table_sides
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
    clear_keys,
    clear_queries,
    exponents_of_keys,
    hand_back_bias,
    own_keys,
    read_lse,
    terms_of_tile,
    with_bias,
)
from torch_attn.kernels.sm90.sums import add_rows, start_dq, tile_of_ds

# Holding k and v in registers with capped scores and dq spills in ptxas of Triton 3.9, hardly in
# that of 3.6.
HOLDS_CAPPED_KEYS = not hasattr(tma, "async_load")


class Gradients(NamedTuple):
    """Where a consumer stores gradients, and the sums that programs share, or None."""

    ds_buffer: Any
    dq_tiles: Any
    dk: Any
    dv: Any
    dk_sum_ptr: Any
    dv_sum_ptr: Any


class Visit(NamedTuple):
    """An item's visit to a tile of queries.

    Attributes:
        step, last: over all items, this step and the item's last.
        start: the tile's first query.
        member: which of the item's heads these queries are of.
        alike: the tile's queries and the keys are of one segment.
        tile: the first of the keys' two tiles.
    """

    step: Any
    last: Any
    start: Any
    member: Any
    alike: Any
    tile: Any


@gluon.jit
def consume_queries(kernel, CONSUMER: gl.constexpr):
    """Compute 64 rows of dk and dv of each item; `kernel.results` are `Gradients`."""
    BLOCK_Q: gl.constexpr = kernel.tiles.q[0].shape[3]
    KV_STAGES: gl.constexpr = kernel.tiles.k[0].shape[0] // 2
    # Tiles far off in a table have their own code: ptxas spills in code that they share with
    # others. Small heads leave enough registers.
    LARGE: gl.constexpr = not is_small(kernel.head_dim, kernel.head_dim_v, False, False)
    SPLITS: gl.constexpr = LARGE and kernel.fused and kernel.terms.relative is not None
    step = 0  # counted over all items
    turn = 0
    item, place = own_item(turn, kernel.problem, kernel.shared, CONSUMER)
    while item < kernel.problem.num_items:
        keys = own_keys(kernel, item, place, CONSUMER)
        begin, before, full, after = keys.visits
        last = step + (before + full + after) * kernel.members - 1
        tile = turn % KV_STAGES * 2
        dk = zeros(64, kernel.head_dim)
        dv = zeros(64, kernel.head_dim_v)
        ends = no_end_sums(kernel.terms)
        held, s = _start_item(kernel, keys, tile, step, turn, CONSUMER)
        member, start = group_step(0, *keys.visits, BLOCK_Q, kernel.members)
        alike = group_step_is_alike(0, begin, before, full, kernel.problem.segments, kernel.members)
        visit = Visit(step, last, start, member, alike, tile)
        s, dk, dv, ds, ends = _visit(
            kernel, keys, visit, held, s, dk, dv, None, ends, kernel.edges, False, CONSUMER
        )

        # Visit the other tiles that see these keys; only tiles at the edges are masked.
        index = 1
        step += 1
        for masked in gl.static_range(1 if kernel.edges else 0, -1, -1):
            end = before + after if masked else before + full + after
            end *= kernel.members
            while index < end:
                member, start = group_step(index, *keys.visits, BLOCK_Q, kernel.members)
                alike = False
                if masked:
                    _clear_next(kernel, keys, step, index)
                    alike = group_step_is_alike(
                        index, begin, before, full, kernel.problem.segments, kernel.members
                    )
                if kernel.members > 1:
                    earlier, _start = group_step(index - 1, *keys.visits, BLOCK_Q, kernel.members)
                    ends = follow_head(ends, kernel.terms, keys.head + member, keys.head + earlier)
                visit = Visit(step, last, start, member, alike, tile)
                is_far = False
                if SPLITS and not masked:
                    sides = table_sides(kernel.terms, keys.pairs.position - start, 64, BLOCK_Q)
                    is_far = sides[0] | sides[1]
                for far in gl.static_range(2 if SPLITS and not masked else 1):
                    if not SPLITS or masked or is_far == (far == 1):
                        s, dk, dv, ds, ends = _visit(
                            kernel, keys, visit, held, s, dk, dv, ds, ends, masked, far == 1,
                            CONSUMER,
                        )  # fmt: skip
                index += 1
                step += 1

        member, _start = group_step(index - 1, *keys.visits, BLOCK_Q, kernel.members)
        add_end_sums(ends, kernel.terms, keys.head + member)
        _finish_item(kernel, keys, tile, step, dk, dv, ds, CONSUMER)
        turn += 1
        item, place = own_item(turn, kernel.problem, kernel.shared, CONSUMER)
    tma.store_wait(0)


@gluon.jit
def _start_item(kernel, keys, tile, step, turn, CONSUMER: gl.constexpr):
    """Wait for an item's keys, values and first queries; return (held, s), () for either.

    held: rows of k and v as left operands in registers. s: k·qᵀ of the first tile.
    """
    k_tile, v_tile, q_tile, do_tile, _lse2_row, _delta_row, _bias_tile, _rest2_row = kernel.tiles
    k_full, v_full, kv_read, q_full, do_full = kernel.barriers
    KV_STAGES: gl.constexpr = k_tile[0].shape[0] // 2
    CAPPED: gl.constexpr = kernel.fused and kernel.rule.softcap is not None
    HAS_TABLE: gl.constexpr = kernel.fused and kernel.terms.relative is not None
    SMALL: gl.constexpr = is_small(kernel.head_dim, kernel.head_dim_v, CAPPED, HAS_TABLE)
    layout: gl.constexpr = product_layout(q_tile[0].shape[3])
    wait_for_step(k_full, turn)
    wait_for_step(q_full, step)
    clear_queries(kernel, keys, q_tile, q_full, step, 0)
    clear_queries(kernel, keys, do_tile, do_full, step, 0)
    clear_queries(kernel, keys, q_tile, q_full, step, 1)
    stage, phase = turn % KV_STAGES, turn // KV_STAGES & 1
    # Clear the other consumer's rows only for dq, where both meet in each step. Without dq it may
    # already have stored dk and dv there.
    if kernel.fused:
        clear_keys(kernel, keys, k_tile, tile + 1 - CONSUMER, k_full.index(stage), phase)
    clear_keys(kernel, keys, k_tile, tile + CONSUMER, k_full.index(stage), phase)
    clear_keys(kernel, keys, v_tile, tile + CONSUMER, v_full.index(stage), phase)
    held, s = (), ()
    if SMALL:
        held = (load_left(k_tile, tile + CONSUMER, kernel.head_dim, layout),)
    if kernel.fused or SMALL:
        slot_q = step % q_tile[0].shape[0]
        s = (product_scores(k_tile, tile + CONSUMER, q_tile, slot_q, kernel.head_dim, layout),)
    wait_for_step(v_full, turn)
    if SMALL:
        held = (held[0], load_left(v_tile, tile + CONSUMER, kernel.head_dim_v, layout))
    s = wait_sums(s, 0)
    if KV_STAGES > 1:
        # Once the previous item's dk and dv are out, its place is free.
        tma.store_wait(0)
        mbarrier.arrive(kv_read.index((tile ^ 2) + CONSUMER), count=1, pred=turn > 0)
    return held, s


@gluon.jit
def _clear_next(kernel, keys, step, index):
    """Clear dout of a step, and q of the next one, whose scores the step computes."""
    clear_queries(kernel, keys, kernel.tiles.dout, kernel.barriers.do_full, step - index, index)
    clear_queries(kernel, keys, kernel.tiles.q, kernel.barriers.q_full, step - index, index + 1)


@triton.constexpr_function
def is_small(head_dim, head_dim_v, capped_dq, has_table):
    """Return True if a consumer's registers can also hold its rows of k and v."""
    columns = max(sum(column_pieces(head_dim)), sum(column_pieces(head_dim_v)))
    return columns <= 64 and not has_table and (HOLDS_CAPPED_KEYS or not capped_dq)


@gluon.jit
def _visit(
    kernel, keys, visit, held, s, dk, dv, ds, ends, MASKED: gl.constexpr, FAR: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Visit a tile of queries; return s of the next tile, dk, dv, packed ds, and `EndSums`.

    Products overlap all arithmetic: dq and dk of the previous tile, and dp, with the exponentials;
    dv with ds; s of the next tile with the stores of ds. That s takes dp's registers. In the pair
    of kernels, large heads have no room for it: there s is issued with dp. After the last tile, s
    is computed again and not used.

    held, s: of `_start_item`, of this tile. ds: of the previous one, or None.
    """
    k_tile, v_tile, q_tile, do_tile, _lse2_row, delta_row, _bias_tile, _rest2_row = kernel.tiles
    _k_full, _v_full, _kv_read, q_full, do_full = kernel.barriers
    step, last, start, member, alike, tile = visit
    Q_STAGES: gl.constexpr = q_tile[0].shape[0]
    FIRST: gl.constexpr = ds is None
    FUSED: gl.constexpr = kernel.fused
    CAPPED: gl.constexpr = FUSED and kernel.rule.softcap is not None
    HAS_TABLE: gl.constexpr = FUSED and kernel.terms.relative is not None
    SMALL: gl.constexpr = is_small(kernel.head_dim, kernel.head_dim_v, CAPPED, HAS_TABLE)
    AHEAD: gl.constexpr = FUSED or SMALL
    S_PIECES: gl.constexpr = num_pieces(kernel.head_dim)
    DP_PIECES: gl.constexpr = num_pieces(kernel.head_dim_v)
    BLOCK_Q: gl.constexpr = q_tile[0].shape[3]
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_Q)
    slot, previous = step % do_tile[0].shape[0], (step - 1) % Q_STAGES
    # 0, unknown to the compiler: else it hoists the descriptors of k and v, beyond the registers.
    fresh = step >> 30
    tile += fresh

    of_queries = load_queries(
        kernel.problem, keys.marks, start, keys.queries.size, BLOCK_Q, layout, alike
    )
    own = head_terms(kernel.terms, keys.pairs.element, keys.pairs.head + member)

    # dq += ds k and dk += dsᵀ q for the previous tile
    if not FIRST:
        if FUSED:
            dq = start_dq(
                kernel.results.ds_buffer, step - 1, k_tile, tile, CONSUMER, kernel.head_dim
            )
        if FUSED and not SMALL:
            left = tile_of_ds(kernel.results.ds_buffer, step - 1, CONSUMER)
            dk = add_shared(dk, left, q_tile, previous)
        else:
            left = unpack(ds, dtype, layout, "loop")
            dk = add_product(dk, left, q_tile, previous)
    of_tile = terms_of_tile(kernel, keys, own, start)
    if AHEAD and not SMALL:
        # Wait before dq is stored: testing a barrier later would wait until the stores are done.
        wait_for_step(do_full, step)
        of_tile = with_bias(of_tile, kernel.terms, kernel.tiles, CONSUMER, layout)
        lse = read_lse(kernel.tiles, step % Q_STAGES, layout)
        power, dcap = exponents_of_keys(
            kernel, keys, s[0], lse, start, of_queries, own, of_tile, MASKED, FAR
        )
        if not FIRST:
            # dp takes the registers of dq.
            _hand_over(kernel, wait_sums(dq, S_PIECES), CONSUMER)
        if fresh > 0:
            # Never true. Without a branch here ptxas spills, and serializes the products.
            wait_for_step(do_full, step)
    else:
        if not AHEAD:
            # sᵀ = scale · k qᵀ
            wait_for_step(q_full, step)
            slot_q = step % Q_STAGES
            now = product_scores(k_tile, tile + CONSUMER, q_tile, slot_q, kernel.head_dim, layout)
        wait_for_step(do_full, step)
    # dpᵀ = v doutᵀ
    if SMALL:
        dp = left_scores(held[1], do_tile, slot, kernel.head_dim_v, layout)
    else:
        dp = product_scores(v_tile, tile + CONSUMER, do_tile, slot, kernel.head_dim_v, layout)

    # pᵀ = exp(sᵀ - lse)
    if SMALL or not AHEAD:
        if AHEAD:
            now = s[0]
        else:
            now = warpgroup_mma_wait(DP_PIECES, deps=(now,))
        of_tile = with_bias(of_tile, kernel.terms, kernel.tiles, CONSUMER, layout)
        lse = read_lse(kernel.tiles, step % Q_STAGES, layout)
        power, dcap = exponents_of_keys(
            kernel, keys, now, lse, start, of_queries, own, of_tile, MASKED, FAR
        )
    p = gl.exp2(power)
    kept = drop(p, kernel.terms, of_tile.kept, True).to(dtype)
    p_left = gl.convert_layout(kept, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    if FUSED and SMALL and not FIRST:
        _hand_over(kernel, wait_sums(dq, S_PIECES + DP_PIECES), CONSUMER)
    # dv += pᵀ dout
    dv = add_product(dv, p_left, do_tile, slot)
    hand_back_bias(kernel.terms)

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
    dp = drop_scaled(dp, kernel.terms, of_tile, True)
    exact = p * (dp - delta[None, :])
    if kernel.terms.drelative is not None:
        ends = add_relative_gradient(
            ends, kernel.terms, keys.pairs.head + member, keys.pairs.position - start, exact, FAR
        )
    ds = pack(exact, dtype)
    if AHEAD:
        following = gl.minimum(step + 1, last)
        slot_q = following % Q_STAGES
        wait_for_step(q_full, following)
        if SMALL:
            s = (left_scores(held[0], q_tile, slot_q, kernel.head_dim, layout),)
        else:
            s = (product_scores(k_tile, tile + CONSUMER, q_tile, slot_q, kernel.head_dim, layout),)
    # A barrier or a branch follows: it keeps ptxas from hoisting the last waits.
    if FUSED:
        place = tile_of_ds(kernel.results.ds_buffer, step, CONSUMER)
        written = unpack(ds, dtype, layout, "store")
        place.store(gl.convert_layout(written, layout, assert_trivial=True))
        fence_async_shared()
        wait_for_all(DS_WRITTEN, 256)
    else:
        wait_for_step(do_full, step)
    dv, p_left = wait_product(dv, p_left, S_PIECES if AHEAD else 0)
    arrive(DO_READ + slot, READERS)
    s = wait_sums(s, 0)
    return s, dk, dv, ds, ends


@gluon.jit
def _hand_over(kernel, dq, CONSUMER: gl.constexpr):
    stores: gl.constexpr = kernel.terms.dbias.boxes is not None
    hand_over(dq, kernel.results.dq_tiles[CONSUMER], stores, CONSUMER)


@gluon.jit
def _finish_item(kernel, keys, tile, step, dk, dv, ds, CONSUMER: gl.constexpr):
    q_tile, k_tile = kernel.tiles.q, kernel.tiles.k
    KV_STAGES: gl.constexpr = k_tile[0].shape[0] // 2
    SHARES: gl.constexpr = kernel.results.dk_sum_ptr is not None
    IS_PART: gl.constexpr = kernel.problem.intervals is not None
    previous = (step - 1) % q_tile[0].shape[0]
    if kernel.fused:
        dq = start_dq(kernel.results.ds_buffer, step - 1, k_tile, tile, CONSUMER, kernel.head_dim)
        left = tile_of_ds(kernel.results.ds_buffer, step - 1, CONSUMER)
        dk = add_shared(dk, left, q_tile, previous)
    else:
        layout: gl.constexpr = product_layout(q_tile[0].shape[3])
        left = unpack(ds, q_tile[0].dtype, layout, "end")
        dk = add_product(dk, left, q_tile, previous)
    if kernel.terms.seed is not None:
        dv = scale_all(dv, kernel.terms.dropout.scale)
    head_kv = keys.head // kernel.group_size
    heads_kv = kernel.problem.heads_q // kernel.group_size
    slot = tile + CONSUMER
    if IS_PART or not SHARES:
        # Where v was, which no other warpgroup reads.
        _store(
            kernel, keys, head_kv, kernel.results.dv, kernel.tiles.v, slot, dv, kernel.head_dim_v
        )
    if kernel.fused:
        _hand_over(kernel, wait_sums(dq, num_pieces(kernel.head_dim)), CONSUMER)
        dk = wait_sums(dk, 0)
    else:
        dk, left = wait_product(dk, left)
    arrive(Q_READ + previous, READERS)
    if IS_PART or not SHARES:
        if kernel.fused and not IS_PART:
            # Where k was, once both consumers have read it.
            wait_for_all(DS_WRITTEN, 256)
        dk = scale_all(dk, kernel.rule.scale)
        _store(kernel, keys, head_kv, kernel.results.dk, k_tile, slot, dk, kernel.head_dim)
    else:
        padded_keys = gl.cdiv(keys.rows.end, ROW_PADDING) * ROW_PADDING
        row = (keys.batch * heads_kv + head_kv).to(gl.int64) * padded_keys + keys.first
        add_rows(kernel.results.dv_sum_ptr, dv, row, kernel.head_dim_v)
        add_rows(kernel.results.dk_sum_ptr, dk, row, kernel.head_dim)
    if KV_STAGES == 1:
        tma.store_wait(0)
        mbarrier.arrive(kernel.barriers.kv_read.index(CONSUMER), count=1)


@gluon.jit
def _store(kernel, keys, head_kv, maps, tile, slot, x, SIZE: gl.constexpr):
    heads_kv, end = kernel.problem.heads_q // kernel.group_size, keys.rows.end
    if kernel.problem.intervals is not None:
        exists = keys.first + gl.arange(0, 64, keys.position.type.layout) < end
        rows = head_rows(maps[0], keys.batch, end, keys.first, head_kv, heads_kv, SIZE)
        store_carry(rows, x, exists, heads_kv, SIZE)
    else:
        store_result(
            maps, tile, slot, x, keys.batch, head_kv, keys.first, end, heads_kv,
            kernel.problem.num_sequences is not None, SIZE,
        )  # fmt: skip
