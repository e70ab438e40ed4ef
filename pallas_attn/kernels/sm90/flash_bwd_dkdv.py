"""The backward's kernel of dk and dv, which can add up dq as well.

`pallas_attn.kernels.sm90.flash_bwd` has the formulas.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import (
    exchange_barrier,
    fence_async,
    named_barrier,
    warpgroup_barrier,
)
from pallas_attn.kernels.explicit.items import (
    Items,
    allocate_hand_over,
    for_each_place,
    item_counter,
    next_item,
    own_item,
)
from pallas_attn.kernels.explicit.programs import for_each_tile, run_warpgroups
from pallas_attn.kernels.explicit.registers import as_columns, iota
from pallas_attn.kernels.explicit.rows import store_rows_of_pieces
from pallas_attn.kernels.explicit.schedule import make_schedule
from pallas_attn.kernels.explicit.steps import count_steps, step_ranges, tile_start
from pallas_attn.kernels.explicit.tma import (
    Tiles,
    await_copies,
    await_reads,
    clear_values,
    load_tile,
    store_tile,
)
from pallas_attn.kernels.explicit.wgmma import (
    WGMMA,
    WGMMA_ROWS,
    accumulator,
    add_scores,
    add_values,
    columns_of,
    wait_for,
    zeros,
)
from pallas_attn.kernels.explicit.wgmma_launch import launch
from pallas_attn.kernels.explicit.wgmma_scores import hide_queries, visible_scores
from pallas_attn.kernels.explicit.wgmma_sums import add_dq, add_to_sums, write_dq
from pallas_attn.kernels.gradients import gradient_of_sums, gradient_sums
from pallas_attn.kernels.library.sequences import (
    count_sequence_tiles,
    first_tile,
    num_sequences_of,
)
from pallas_attn.kernels.library.tiles import ROW_PADDING, cdiv, maximum, visible_tiles
from pallas_attn.kernels.sm90.gradient_tiles import (
    ds_width,
    make_tiles,
    value_columns,
    values_and_factors,
)
from pallas_attn.targets import num_sms
from twin_attention.contract.validate import fail
from twin_attention.targets.steps import exchange_sides, splits_group

# Named barriers beside those of `barriers`: for each consumer's part of dq, when it is written
# and when free. Threads that meet there: a consumer's and those of the warp that adds.
DQ_WRITTEN, DQ_FREE, ADDERS = 7, 9, 128 + 32


class Work(NamedTuple):
    """A tile of keys and its query heads, and the tiles of queries that see it.

    Attributes:
        batch, head_kv, part: which ones; part is that of the query heads.
        start_kv, end_kv: its first key, and the end of its sequence's.
        first_q, end_q: the first row of its sequence's queries, and how many these are.
        first_row: the first row of the sequence's lse2 and delta.
        diagonal: the key position of query 0 of the sequence.
        start_q: the first query of a step's tile, counted from the sequence's.
        masked_steps, steps: how many tiles of queries are at edges, which come first, and in all.
    """

    batch: Any
    head_kv: Any
    part: Any
    start_kv: Any
    end_kv: Any
    first_q: Any
    end_q: Any
    first_row: Any
    diagonal: Any
    start_q: Callable[..., Any]
    masked_steps: Any
    steps: Any


def flash_bwd_dkdv_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    cu_seqlens_q_ref,
    cu_seqlens_kv_ref,
    schedule_ref,
    dk_ref,
    dv_ref,
    dq_sum_ref,
    dk_sum_ref,
    dv_sum_ref,
    counter_ref,
    *,
    k_tiles,
    v_tiles,
    q_tiles,
    dout_tiles,
    lse2_rows,
    delta_rows,
    ds_tiles=None,
    dq_tiles=None,
    kv_full,
    kv_empty,
    q_full,
    q_empty,
    dout_full,
    dout_empty,
    hand_over,
    members,
    group_size,
    seq_q,
    seq_kv,
    diagonal,
    rule,
    window_left,
    window_right,
    head_dim,
    head_dim_v,
    block_q,
    block_kv,
    num_warps,
    num_stages,
):
    """One program computes tiles of block_kv rows of dk and dv of a kv head, one after the other.

    Operands as in `flash_bwd_dq_kernel`, dk and dv like k and v; schedule [programs, 1 + most
    tiles] of tiles of keys; dq_sum is None, or dq's float32 sums in the order of `add_to_sums`, 0
    at first, to which the program adds ds k; the order of these additions is not fixed. members:
    how many query heads of a kv head's group a work item visits: all of them, or 1. Then programs
    share a tile of keys, and add to such sums of dk and dv, dk_sum and dv_sum [B, Hkv, Skv rounded
    up to ROW_PADDING, columns], in place of dk and dv, which are None; else the sums are. In shared
    memory a tile of 64 rows of k and of v for each consumer warpgroup, num_stages tiles of q and of
    dout with lse2 and delta of their rows, and their barriers; for dq one more tile of q, two tiles
    of dsᵀ for each warpgroup, and its part of a tile's dq, which a warp of the producer adds. Tiles
    of s, p, dp, ds are transposed (keys down, queries across). Loop invariant: dv is Σ pᵀ dout over
    the query heads and queries so far, dk is Σ dsᵀ q over those before the last tile, and ds is
    that tile's. Accumulation: float32, exponents in base 2, p and ds cast to the inputs' dtype for
    their products. A key that no query sees gives 0.

    Packed sequences, without sums: as in `flash_bwd_dq_kernel`, with tiles of keys, the first ones
    first. Of those without queries in their sequence all factors are loaded as 0; of q and dout
    rows are cleared.

    Products are issued so that some run under all arithmetic, where dq is summed: dq and dk of the
    tile before, and dp, under the exponentials; dv under ds; s of the next tile while ds is
    written. Heads that are small have k and v in registers. With a softcap these have no room for
    them: dq is taken from its registers before the exponentials, and s of the next tile is issued
    with dv.
    """
    warpgroups = num_warps // 4 - 1
    program = lax.axis_index("program")
    parts = q_ref.shape[2] // members  # of the query heads, one a work item
    num_tiles = pl.cdiv(seq_kv, block_kv)
    is_packed = cu_seqlens_q_ref is not None
    makes_dq = dq_sum_ref is not None
    small = makes_dq and is_small(head_dim, head_dim_v)
    # The cap's derivative takes the registers of k and v, of which products have copies besides.
    capped = small and rule.softcap is not None
    holds_keys = small and not capped
    q_stages = lse2_rows.shape[0]
    # Of two tiles of q, the next one takes the place of the one that dk frees after that.
    s_before_ds = capped and q_stages > 2
    size, size_v = value_columns(head_dim), value_columns(head_dim_v)
    # With sums of all three and a window ptxas serializes products unless one head is a loop too.
    is_tight = dk_sum_ref is not None and window_left is not None and max(size, size_v) > 96
    loops_over_heads = members > 1 or is_tight
    # Each warpgroup's part of dq: some columns over all keys, or all columns over its own ones.
    has_columns = small or size > 64
    dq_columns = [
        slice(min(64 * w, size), min(64 * w + 64, size)) if has_columns else slice(0, size)
        for w in range(warpgroups)
    ]
    writers = [w for w in range(warpgroups) if dq_columns[w].start < dq_columns[w].stop]
    k_tiles, v_tiles = Tiles(*k_tiles), Tiles(*v_tiles)
    (q_tiles, q_factors), (dout_tiles, dout_factors) = map(
        values_and_factors, (q_tiles, dout_tiles)
    )

    def locate(tile):
        """Locate a tile of keys and its query heads, and the tiles of queries that see it."""
        if is_packed:
            # Keys are counted from the first of all, queries from the sequence's first.
            part, _number, start_kv, end_kv, first_q, end_q, sequence = tile
            batch, offset = part * 0, end_kv - end_q
            first_row = first_tile(first_q, sequence, ROW_PADDING) * ROW_PADDING
        else:
            start_kv = tile % num_tiles * block_kv
            batch, part = tile // num_tiles // parts, tile // num_tiles % parts
            first_q, end_q, first_row, end_kv, offset = 0, seq_q, 0, seq_kv, diagonal
        head_kv = part // (group_size // members)
        begin, before, full, after = visible_tiles(
            start_kv, end_kv, end_q, -offset, window_right, window_left, block_kv, block_q
        )
        last_start = maximum(cdiv(end_q, block_q) * block_q - block_q, 0)
        if makes_dq and seq_kv % block_kv:
            # Keys that do not exist are hidden in every tile: their ds, times 0, must be finite.
            ends = start_kv + block_kv > seq_kv
            before = jnp.where(ends, before + full + after, before)
            full, after = (jnp.where(ends, 0, tiles) for tiles in (full, after))

        def start_q(step):
            return tile_start(step, begin, before, full, after, block_q, last_start)

        return Work(
            batch, head_kv, part, start_kv, end_kv, first_q, end_q, first_row, offset, start_q,
            *count_steps(before, full, after),
        )  # fmt: skip

    def for_each(body, next_place):
        if is_packed:
            return for_each_place(next_place, body)
        return for_each_tile(schedule_ref, program, body)

    def produce():
        """Load what the consumers work on, as soon as there is room."""

        def load(matrix, tiles, vector, rows, full, empty, now, batch, head, start, row):
            slot = now % rows.shape[0]
            plgpu.barrier_wait(empty.at[slot])
            load_tile(matrix, tiles.tile(slot), batch, head, start, full.at[slot])
            plgpu.copy_gmem_to_smem(
                vector.at[batch, head, pl.ds(row, block_q)], rows.at[slot], full.at[slot]
            )

        load_q = functools.partial(load, q_ref, q_tiles, lse2_ref, lse2_rows, q_full, q_empty)
        load_dout = functools.partial(
            load, dout_ref, dout_tiles, delta_ref, delta_rows, dout_full, dout_empty
        )

        def load_all(tile, step):
            work = locate(tile)
            batch, head_kv, steps = work.batch, work.head_kv, work.steps
            first_q, first_row, start_kv = work.first_q, work.first_row, work.start_kv
            if is_packed:
                # Without queries all factors are 0: what is past the last row. Keys may be padding,
                # which may be NaN.
                has_queries = work.end_q > 0
                first_q = jnp.where(has_queries, first_q, seq_q)
                first_row = jnp.where(has_queries, first_row, lse2_ref.shape[2])
                start_kv = jnp.where(has_queries, start_kv, seq_kv)

            def load_keys():
                for w in range(warpgroups):
                    start = start_kv + w * WGMMA_ROWS
                    plgpu.barrier_wait(kv_empty.at[w])
                    load_tile(k_ref, k_tiles.tile(w), batch, head_kv, start, kv_full.at[w])
                    load_tile(v_ref, v_tiles.tile(w), batch, head_kv, start, kv_full.at[w])

            def load_queries(index):
                now = step + index
                start = work.start_q(index % steps)
                place = batch, work.part * members + index // steps, start, start
                if is_packed:
                    place = *place[:2], first_q + start, first_row + start
                load_q(now, *place)
                # After q, which does not wait for the end of the tile before.
                pl.when(index == 0)(load_keys)
                load_dout(now, *place)

            pl.loop(0, steps * members)(load_queries)
            return step + steps * members

        items = Items(
            cu_seqlens_kv_ref, cu_seqlens_q_ref, seq_kv, seq_q, parts, block_kv, last_first=False
        )
        end = for_each(load_all, lambda: next_item(counter_ref, items, hand_over))
        if makes_dq:
            load_q(end, *[program * 0] * 4)  # for an s that is not used

    def add():
        """Add what the consumers write of each tile of dq to its sums."""

        def add_all(tile, step):
            work = locate(tile)
            batch, steps = work.batch, work.steps

            def add_tile(index):
                head = work.part * members + index // steps
                start = work.start_q(index % steps)
                await_reads()
                for w in writers:
                    named_barrier("arrive", DQ_FREE + w, ADDERS)
                for w in writers:
                    named_barrier("sync", DQ_WRITTEN + w, ADDERS)
                    add_dq(dq_tiles.at[w], dq_columns[w], dq_sum_ref, batch, head, start)

            pl.loop(0, steps * members)(add_tile)
            return step

        for_each(add_all, None)
        await_copies()

    def consume(w):
        """Compute the rows of consumer warpgroup w, a number: each has its own code."""
        k, v, columns = k_tiles.tile(w), v_tiles.tile(w), dq_columns[w]

        # All tiles are free; the first step gives the last tile of queries back.
        plgpu.barrier_arrive(kv_empty.at[w])
        for slot in range(q_stages - 1):
            plgpu.barrier_arrive(q_empty.at[slot])
        for slot in range(num_stages):
            plgpu.barrier_arrive(dout_empty.at[slot])
        if is_packed:
            plgpu.barrier_arrive(hand_over.read)

        def start_dq(dq_ref, stored):
            """Start dq = ds k of this warpgroup's part."""
            for x in range(warpgroups) if has_columns else (w,):
                ds = ds_tiles.at[stored, x].T
                keys = k_tiles.tile(x)
                for piece, held in zip(keys.multiplied, keys.columns, strict=True):
                    lower, upper = max(held.start, columns.start), min(held.stop, columns.stop)
                    if lower < upper:
                        plgpu.wgmma(
                            columns_of(dq_ref, lower - columns.start, upper - columns.start),
                            ds,
                            columns_of(piece, lower - held.start, upper - held.start),
                        )

        def hand_over_dq(dq):
            """Write this warpgroup's part of dq for the warp that adds it."""
            named_barrier("sync", DQ_FREE + w, ADDERS)
            write_dq(dq, dq_tiles.at[w])
            named_barrier("arrive", DQ_WRITTEN + w, ADDERS)

        def share_ds(ds, step):
            """Write ds where all warpgroups read it."""
            ds_tiles.at[step % 2, w][...] = ds
            fence_async()
            exchange_barrier(warpgroups)

        def compute(tile, step):
            work = locate(tile)
            batch, head_kv, start_q = work.batch, work.head_kv, work.start_q
            masked_steps, steps = work.masked_steps, work.steps
            start_row = work.start_kv + w * WGMMA_ROWS
            no_ds = zeros(WGMMA_ROWS, block_q).astype(k_ref.dtype)
            for x in range(warpgroups) if makes_dq else (w,):
                plgpu.barrier_wait(kv_full.at[x])
            if makes_dq:
                share_ds(no_ds, step - 1)
            s = keys = values = None
            if holds_keys:
                keys, values = (
                    tuple(plgpu.load(x, layout=WGMMA) for x in tile.multiplied) for tile in (k, v)
                )
            if makes_dq:
                # Not a constant, or the compiler would see that `fresh` is one in all steps. With a
                # loop of heads not surely positive: with no way around ptxas serializes products.
                steps = steps + (step & -(2**30) if loops_over_heads else step >> 30)

                # sᵀ = scale · k qᵀ of the first tile, for which the tile of keys before waited.
                def first(s_ref):
                    start_scores(s_ref, keys, k, q_factors.tile(lax.rem(step, q_stages)))
                    return wait_for(s_ref, 0, keys)

                @pl.when(step == 0)
                def _():
                    plgpu.barrier_wait(q_full.at[0])

                s = pl.run_scoped(first, accumulator(WGMMA_ROWS, block_q))

            end = step + steps * members

            # Visit the tiles of queries that see these keys; only tiles at the edges are masked.
            def visit(x, carry, member, masked):
                s, ds, dk, dv = carry
                index = member * steps + x
                now = step + index
                slot, q_slot = now % num_stages, lax.rem(now, q_stages)
                previous, following = (lax.rem(now + x, q_stages) for x in (q_stages - 1, 1))
                # 0, which the compiler does not know: it would compute the descriptors of k and v
                # before the loop, for which there are no registers.
                fresh = now >> 30 if makes_dq or is_packed else 0
                is_first = index == fresh
                multiplied = q_tiles.tile(jnp.where(is_first, q_slot, previous))  # ds is 0 at first
                dout = dout_tiles.tile(slot)
                lse2_row, delta_row = lse2_rows.at[q_slot], delta_rows.at[slot]
                may_end = is_packed and masked
                if may_end:
                    # What is another sequence's, or padding, may be NaN. No product is in flight
                    # here: among products ptxas would wait for each.
                    plgpu.barrier_wait(q_full.at[q_slot])
                    plgpu.barrier_wait(dout_full.at[slot])
                    left = work.end_q - start_q(x)
                    clear_values(q_tiles.tile(q_slot), left)
                    clear_values(dout, left)

                def overlap_ahead(s_ref, dp_ref, dk_ref, dv_ref, dq_ref=None):
                    """Multiply dq, dk, dp under the exponentials, dv under ds, s one tile ahead."""

                    def start_dp():
                        dp_ref[...] = zeros(WGMMA_ROWS, block_q)
                        start_scores(
                            dp_ref, values, v_tiles.tile(w + fresh), dout_factors.tile(slot)
                        )

                    def finish_dq(pending, *read):
                        if dq_ref is not None:
                            dq = wait_for(dq_ref, pending, *read)
                            pl.when(jnp.logical_not(is_first))(lambda: hand_over_dq(dq))

                    def start_next_scores():
                        # sᵀ = scale · k qᵀ of the next tile; behind the last one it is not used.
                        plgpu.barrier_wait(q_full.at[following])
                        s_ref[...] = zeros(WGMMA_ROWS, block_q)
                        start_scores(
                            s_ref, keys, k_tiles.tile(w + fresh), q_factors.tile(following)
                        )

                    # Start dq = ds k and dk += dsᵀ q of the tile before.
                    stored = (now - 1) % 2
                    if dq_ref is not None:
                        start_dq(dq_ref, stored)
                    dk_ref[...] = dk
                    add_values(dk_ref, ds if small else ds_tiles.at[stored, w], multiplied)
                    # Before dq is stored: a look at a barrier would wait until the stores are done.
                    plgpu.barrier_wait(dout_full.at[slot])
                    # Start dpᵀ = v doutᵀ.
                    if small:
                        start_dp()
                    # pᵀ = exp(sᵀ - lse)
                    visible, exp2_scale, dcap = visible_scores(
                        s, None, None, None, rule, None, None, False
                    )
                    if masked:

                        def hide(s):
                            # For want of registers the tile is located again.
                            place = locate(tile + fresh) if is_tight else work
                            return hide_queries(
                                s,
                                # Keys are counted as queries are.
                                first_key=place.start_kv + w * WGMMA_ROWS - diagonal,
                                start_q=place.start_q(x),
                                end=seq_kv - diagonal if seq_kv % block_kv else None,
                                window_left=window_left,
                                window_right=window_right,
                            )

                        if not capped:
                            visible = lax.cond(x < masked_steps, hide, lambda s: s, visible)
                    if capped:
                        # p and p ∘ dcap take the registers of dq.
                        visible = lax.optimization_barrier(visible)
                        finish_dq(len(multiplied.multiplied) + len(dout.multiplied))
                    lse2 = plgpu.load(lse2_row, layout=WGMMA.reduce(0))
                    power = visible * exp2_scale - as_columns(lse2, visible, WGMMA)
                    if capped and masked:
                        power = lax.cond(x < masked_steps, hide, lambda s: s, power)
                    if not small:
                        # dp takes the registers of dq.
                        power = lax.optimization_barrier(power)
                        finish_dq(len(multiplied.multiplied))
                        start_dp()
                    p = jnp.exp2(power)
                    p_cast, p = p.astype(k_ref.dtype), p * dcap
                    if holds_keys:
                        p_cast, p = lax.optimization_barrier((p_cast, p))
                        finish_dq(len(multiplied.multiplied) + len(dout.multiplied), p_cast)
                    # Start dv += pᵀ dout.
                    dv_ref[...] = dv
                    add_values(dv_ref, p_cast, dout)
                    pending = len(dout.multiplied)
                    if s_before_ds:
                        start_next_scores()
                        pending += len(k.multiplied)
                    # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
                    dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=pending)
                    dk_new = plgpu.wgmma_accumulator_load(dk_ref, wait_n=None)
                    dp, dk_new, p, _ = lax.optimization_barrier((dp, dk_new, p, ds))
                    plgpu.barrier_arrive(q_empty.at[previous])
                    delta = plgpu.load(delta_row, layout=WGMMA.reduce(0))
                    ds_new = (p * (dp - as_columns(delta, dp, WGMMA))).astype(k_ref.dtype)
                    ds_new = lax.optimization_barrier(ds_new)
                    if not s_before_ds:
                        start_next_scores()
                    share_ds(ds_new, now)
                    dv_new = wait_for(dv_ref, len(k.multiplied), p_cast)
                    plgpu.barrier_arrive(dout_empty.at[slot])
                    return wait_for(s_ref, 0), ds_new if small else None, dk_new, dv_new

                def overlap(s_ref, dp_ref, dk_ref, dv_ref):
                    """Multiply dp under the exponentials, and dv under ds."""
                    # Start dk += dsᵀ q of the tile before, sᵀ = scale · k qᵀ, dpᵀ = v doutᵀ.
                    if not may_end:
                        plgpu.barrier_wait(q_full.at[q_slot])
                    dk_ref[...] = dk
                    add_values(dk_ref, ds, multiplied)
                    add_scores(s_ref, k_tiles.tile(w + fresh), q_factors.tile(q_slot))
                    if block_q > WGMMA_ROWS:
                        # The registers of ds are dp's.
                        dk_new = wait_for(dk_ref, len(k.multiplied), ds)
                        plgpu.barrier_arrive(q_empty.at[previous])
                    if may_end:
                        # This is never so. Without a branch here ptxas finds too few registers, and
                        # waits for each product.
                        pl.when(now < 0)(lambda: plgpu.barrier_wait(dout_full.at[slot]))
                    else:
                        plgpu.barrier_wait(dout_full.at[slot])
                    add_scores(dp_ref, v_tiles.tile(w + fresh), dout_factors.tile(slot))
                    # pᵀ = exp(sᵀ - lse)
                    s = wait_for(s_ref, len(v.multiplied))
                    if block_q <= WGMMA_ROWS:
                        dk_new = plgpu.wgmma_accumulator_load(dk_ref, wait_n=None)
                        s, dk_new, _ = lax.optimization_barrier((s, dk_new, ds))
                        plgpu.barrier_arrive(q_empty.at[previous])
                    position = key = None
                    if masked and not is_packed:
                        position = iota(s.shape, 1, WGMMA) + start_q(x)
                        key = iota(s.shape, 0, WGMMA) + (start_row - diagonal)  # as queries are
                    s, exp2_scale, dcap = visible_scores(
                        s, position, key, None, rule, window_left, window_right,
                        masked and not is_packed,
                    )  # fmt: skip
                    if may_end and (window_left is not None or window_right is not None):
                        # Bounds that are data take fewer registers so.
                        place = start_row - work.diagonal, start_q(x), None
                        s = hide_queries(s, *place, window_left, window_right)
                    lse2 = plgpu.load(lse2_row, layout=WGMMA.reduce(0))
                    p = jnp.exp2(s * exp2_scale - as_columns(lse2, s, WGMMA))
                    # dv += pᵀ dout
                    p_cast = p.astype(k_ref.dtype)
                    dv_ref[...] = dv
                    add_values(dv_ref, p_cast, dout)
                    # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
                    dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=len(dout.multiplied))
                    dp, weight = lax.optimization_barrier((dp, p_cast))
                    weight = weight.astype(jnp.float32) if rule.softcap is None else p * dcap
                    delta = plgpu.load(delta_row, layout=WGMMA.reduce(0))
                    ds_new = (weight * (dp - as_columns(delta, dp, WGMMA))).astype(k_ref.dtype)
                    dv_new = wait_for(dv_ref, 0, p_cast)
                    plgpu.barrier_arrive(dout_empty.at[slot])
                    return None, ds_new, dk_new, dv_new

                refs = [accumulator(WGMMA_ROWS, block_q)] * 2
                refs += [accumulator(*dk.shape), accumulator(*dv.shape)]
                if not makes_dq:
                    return pl.run_scoped(overlap, *refs)
                if w in writers:
                    refs.append(accumulator(WGMMA_ROWS, columns.stop - columns.start))
                return pl.run_scoped(overlap_ahead, *refs)

            carry = (
                s,
                None if makes_dq and not small else no_ds,
                zeros(WGMMA_ROWS, size),
                zeros(WGMMA_ROWS, size_v),
            )
            ranges = step_ranges(masked_steps, steps)
            if makes_dq:
                # In one loop: ptxas finds no registers for s of two.
                ranges = ((len(ranges) > 1, 0, steps),)

            def visit_head(member, carry):
                for masked, lower, upper in ranges:
                    body = functools.partial(visit, member=member, masked=masked)
                    carry = lax.fori_loop(lower, upper, body, carry)
                return carry

            if not loops_over_heads:
                _, ds, dk, dv = visit_head(program * 0, carry)
            else:
                heads = members + (step & -(2**30)) if is_tight else members
                _, ds, dk, dv = lax.fori_loop(0, heads, visit_head, carry)

            # dk += dsᵀ q of the last tile
            stored = (end - 1) % 2

            def last(dk_ref, dq_ref=None):
                if dq_ref is not None:
                    start_dq(dq_ref, stored)
                dk_ref[...] = dk
                left = ds_tiles.at[stored, w] if ds is None else ds
                add_values(dk_ref, left, q_tiles.tile((end - 1) % q_stages))
                if dq_ref is not None:
                    hand_over_dq(wait_for(dq_ref, len(k.multiplied)))
                return wait_for(dk_ref, 0, ds)

            refs = [accumulator(*dk.shape)]
            if makes_dq and w in writers:
                refs.append(accumulator(WGMMA_ROWS, columns.stop - columns.start))
            dk = pl.run_scoped(last, *refs)

            if makes_dq:
                exchange_barrier(warpgroups)  # the others read these keys too
            else:
                warpgroup_barrier()
            if is_packed:
                # Scale and store.
                end_kv = work.end_kv
                store_rows_of_pieces(dk * rule.scale, k, dk_ref, batch, head_kv, start_row, end_kv)
                store_rows_of_pieces(dv, v, dv_ref, batch, head_kv, start_row, end_kv)
            elif dk_sum_ref is None:
                # Scale and store.
                store_tile(dk * rule.scale, k, dk_ref, batch, head_kv, start_row)
                store_tile(dv, v, dv_ref, batch, head_kv, start_row)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(kv_empty.at[w])
            if dk_sum_ref is not None:
                for x, sums in ((dk, dk_sum_ref), (dv, dv_sum_ref)):
                    add_to_sums(x, sums, batch, head_kv, start_row)
            return end

        for_each(compute, lambda: own_item(hand_over))
        plgpu.wait_smem_to_gmem(0)

    run_warpgroups(warpgroups, consume, produce, *([add] if makes_dq else []))


def start_scores(s, rows, q, k):
    """Start s += q kᵀ as `add_scores` does; rows: q in registers, or None."""
    for q_piece, k_piece in zip(rows or q.multiplied, k.multiplied, strict=True):
        plgpu.wgmma(s, q_piece, k_piece.T)


def is_small(head_dim, head_dim_v):
    """Return True if a consumer's registers have room for its rows of k and v beside all else."""
    return max(head_dim, head_dim_v) <= 64


def launch_fused(inputs, spec, backend):
    """Call `flash_bwd_dkdv_kernel` with sums; returns dq, dk and dv."""
    columns, columns_v = value_columns(spec.head_dim), value_columns(spec.head_dim_v)
    config = backend.configs(spec)["flash_bwd_fused"]
    if config.block_q != WGMMA_ROWS:
        fail(NotImplementedError, "flash_bwd_fused", f"block_q={WGMMA_ROWS}", config)
    sums = [gradient_sums(*inputs.lse2.shape, columns)]
    is_split = splits_group(spec, config.block_q, config.block_kv, num_sms(backend.target))
    if is_split:
        rows = pl.cdiv(spec.seq_kv, ROW_PADDING) * ROW_PADDING
        sums += (
            gradient_sums(spec.batch, spec.heads_kv, rows, columns),
            gradient_sums(spec.batch, spec.heads_kv, rows, columns_v),
        )
    results = launch_dkdv(inputs, spec, backend, name="flash_bwd_fused", sums=sums)
    if is_split:
        dq, dk, dv = results
        dk = gradient_of_sums(order_sums(dk), inputs.k, spec.scale)
        dv = gradient_of_sums(order_sums(dv), inputs.v)
    else:
        dk, dv, dq = results
    return gradient_of_sums(order_sums(dq), inputs.q, spec.scale), dk, dv


def launch_dkdv(inputs, spec, backend, *offsets, name="flash_bwd_dkdv", sums=()):
    """Call `flash_bwd_dkdv_kernel`.

    Args:
        inputs, spec, backend: operands, problem and target.
        offsets: those of packed sequences.
        name: the configuration's, "flash_bwd_fused" with sums.
        sums: types of float32 sums: of dq, or of dq, dk and dv, where programs share a group's tile
            of keys.

    Returns:
        dk and dv, unless they are summed, and the sums.
    """
    config = backend.configs(spec)[name]
    if offsets and config.num_stages < 2:
        # The next tile of queries is awaited, to be cleared, before the last one is released.
        fail(NotImplementedError, name, "num_stages=2 for packed sequences", config)
    is_split = len(sums) == 3
    members = 1 if is_split else spec.group_size
    warpgroups, stages = config.num_warps // 4 - 1, config.num_stages
    rows = warpgroups, WGMMA_ROWS
    queries, douts = (stages + bool(sums), config.block_q), (stages, config.block_q)
    tiles, pieces = make_tiles(
        spec,
        bool(sums),
        ("dout_tiles",) if sums else ("q_tiles", "dout_tiles"),
        k_tiles=rows,
        v_tiles=rows,
        q_tiles=queries,
        dout_tiles=douts,
    )
    scratch = tiles | {
        "lse2_rows": plgpu.SMEM(queries, jnp.float32),
        "delta_rows": plgpu.SMEM(douts, jnp.float32),
        "kv_full": plgpu.Barrier(
            num_arrivals=pieces["k_tiles"] + pieces["v_tiles"], num_barriers=warpgroups
        ),
        "kv_empty": plgpu.Barrier(num_barriers=warpgroups),
        "q_full": plgpu.Barrier(num_arrivals=pieces["q_tiles"] + 1, num_barriers=queries[0]),
        "q_empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=queries[0]),
        "dout_full": plgpu.Barrier(num_arrivals=pieces["dout_tiles"] + 1, num_barriers=stages),
        "dout_empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    }
    if sums:
        width = ds_width(spec.head_dim)
        scratch["ds_tiles"] = plgpu.SMEM(
            (2, warpgroups, WGMMA_ROWS, config.block_q),
            inputs.q.dtype,
            transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)),
        )
        size = WGMMA_ROWS * min(64, value_columns(spec.head_dim))
        scratch["dq_tiles"] = plgpu.SMEM((warpgroups, size), jnp.float32)
    parts = spec.heads_q // members
    turned = exchange_sides(spec)
    outputs = (None if is_split else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[1:3])
    programs = num_sms(backend.target)
    if offsets:
        num_tiles = count_sequence_tiles(spec.seq_kv, num_sequences_of(spec), config.block_kv)
        schedule = min(num_tiles * parts, programs)
    else:
        turned = replace(turned, heads_q=parts, heads_kv=parts)
        schedule = make_schedule(turned, config.block_kv, config.block_q, programs)
    no_sums = [None] * (3 - len(sums))
    results = launch(
        name,
        flash_bwd_dkdv_kernel,
        (*inputs, *(offsets or (None, None))),
        schedule,
        (*outputs, *sums, *no_sums, item_counter() if offsets else None),
        scratch | {"hand_over": allocate_hand_over(warpgroups) if offsets else None},
        spec,
        config,
        num_sums=len(sums) + bool(offsets),
        members=members,
    )
    return results[:2] if offsets else results


def order_sums(sums):
    """Return what `add_to_sums` added up, [B, H, rows, columns], as [B, rows, H, columns]."""
    batch, heads, rows, columns = sums.shape
    # tile, 8 columns, warp, row, column pair, half of 16 rows, column of the pair
    blocks = sums.reshape(batch, heads, rows // 64, columns // 8, 4, 8, 4, 2, 2)
    ordered = blocks.transpose(0, 2, 4, 7, 5, 1, 3, 6, 8)
    return ordered.reshape(batch, rows, heads, columns)
