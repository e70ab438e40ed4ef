"""The backward's kernel of dk and dv, which can add up dq as well.

`pallas_attn.kernels.sm90.flash_bwd` has the formulas.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.gradients import gradient_of_sums, gradient_sums
from pallas_attn.kernels.portable.tiles import ROW_PADDING, visible_tiles
from pallas_attn.kernels.sm80.scores import as_columns, iota, visible_scores
from pallas_attn.kernels.sm80.workarounds import warpgroup_barrier
from pallas_attn.kernels.sm90.launch import launch
from pallas_attn.kernels.sm90.pipeline import (
    WGMMA,
    WGMMA_ROWS,
    Tiles,
    accumulator,
    add_scores,
    add_values,
    columns_of,
    ds_width,
    load_tile,
    make_tiles,
    padded_columns,
    store_tile,
    tile_start,
    wait_for,
    zeros,
)
from pallas_attn.kernels.sm90.programs import (
    count_steps,
    for_each_tile,
    run_warpgroups,
    step_ranges,
)
from pallas_attn.kernels.sm90.schedule import make_schedule
from pallas_attn.kernels.sm90.workarounds import add_to_sums, exchange_barrier, fence_async
from pallas_attn.targets import num_sms
from twin_attention.targets.steps import exchange_sides, splits_group


def flash_bwd_dkdv_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    schedule_ref,
    dk_ref,
    dv_ref,
    dq_sum_ref=None,
    dk_sum_ref=None,
    dv_sum_ref=None,
    *,
    k_tiles,
    v_tiles,
    q_tiles,
    dout_tiles,
    lse2_rows,
    delta_rows,
    ds_tiles=None,
    kv_full,
    kv_empty,
    q_full,
    q_empty,
    dout_full,
    dout_empty,
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
    dout with lse2 and delta of their rows, their barriers, and for dq two tiles of dsᵀ for each
    warpgroup. Tiles of s, p, dp, ds are transposed (keys down, queries across). Loop invariant: dv
    is Σ pᵀ dout over the query heads and queries so far, dk is Σ dsᵀ q over those before the last
    tile, and ds is that tile's. Accumulation: float32, exponents in base 2, p and ds cast to the
    inputs' dtype for their products, and ds computed from the p that was cast. A key that no query
    sees gives 0.
    """
    warpgroups = num_warps // 4 - 1
    program = lax.axis_index("program")
    parts = q_ref.shape[2] // members  # of the query heads, one a work item
    num_tiles = pl.cdiv(seq_kv, block_kv)
    last_start = pl.cdiv(seq_q, block_q) * block_q - block_q
    makes_dq = dq_sum_ref is not None
    k_tiles, v_tiles, q_tiles, dout_tiles = (
        Tiles(*views) for views in (k_tiles, v_tiles, q_tiles, dout_tiles)
    )

    def locate(tile):
        """Locate a tile of keys and its query heads, and the tiles of queries that see it."""
        start_kv = tile % num_tiles * block_kv
        batch, part = tile // num_tiles // parts, tile // num_tiles % parts
        head_kv = part // (group_size // members)
        begin, before, full, after = visible_tiles(
            start_kv, seq_kv, seq_q, -diagonal, window_right, window_left, block_kv, block_q
        )
        if makes_dq and seq_kv % block_kv:
            # Keys that do not exist are hidden in every tile: their ds, times 0, must be finite.
            ends = start_kv + block_kv > seq_kv
            before = jnp.where(ends, before + full + after, before)
            full, after = (jnp.where(ends, 0, tiles) for tiles in (full, after))

        def start_q(step):
            return tile_start(step, begin, before, full, after, block_q, last_start)

        return batch, head_kv, part, start_kv, start_q, *count_steps(before, full, after)

    def part_of_dq(w):
        """Return the first row, the columns and the tiles of keys of a warpgroup's part of dq."""
        size, keys = padded_columns(head_dim), range(warpgroups)
        if block_q > WGMMA_ROWS:
            return w * WGMMA_ROWS, slice(0, size), keys
        if size > 64:
            return 0, slice(w * 64, 64 if w == 0 else size), keys
        return 0, slice(0, size), (w,)

    def produce():
        """Load what the consumers work on, as soon as there is room."""

        def load_all(tile, step):
            batch, head_kv, part, start_kv, start_q, _, steps = locate(tile)
            for w in range(warpgroups):
                start = start_kv + w * WGMMA_ROWS
                plgpu.barrier_wait(kv_empty.at[w])
                load_tile(k_ref, k_tiles.tile(w), batch, head_kv, start, kv_full.at[w])
                load_tile(v_ref, v_tiles.tile(w), batch, head_kv, start, kv_full.at[w])

            def load_queries(index):
                slot, start = (step + index) % num_stages, start_q(index % steps)
                head = part * members + index // steps

                def load(matrix, tiles, vector, rows, full, empty):
                    plgpu.barrier_wait(empty.at[slot])
                    load_tile(matrix, tiles.tile(slot), batch, head, start, full.at[slot])
                    plgpu.copy_gmem_to_smem(
                        vector.at[batch, head, pl.ds(start, block_q)], rows.at[slot], full.at[slot]
                    )

                load(q_ref, q_tiles, lse2_ref, lse2_rows, q_full, q_empty)
                load(dout_ref, dout_tiles, delta_ref, delta_rows, dout_full, dout_empty)

            pl.loop(0, steps * members)(load_queries)
            return step + steps * members

        for_each_tile(schedule_ref, program, load_all)

    def consume(w):
        """Compute the rows of consumer warpgroup w, a number: each has its own code."""
        k, v = k_tiles.tile(w), v_tiles.tile(w)

        # All tiles are free; the first step gives the last tile of queries back.
        plgpu.barrier_arrive(kv_empty.at[w])
        for slot in range(num_stages):
            if slot < num_stages - 1:
                plgpu.barrier_arrive(q_empty.at[slot])
            plgpu.barrier_arrive(dout_empty.at[slot])

        first_row, columns, tiles_of_keys = part_of_dq(w)

        def start_dq(dq_ref, stored):
            """Start dq = ds k of this warpgroup's part."""
            for x in tiles_of_keys:
                ds = ds_tiles.at[stored, x, :, pl.ds(first_row, WGMMA_ROWS)].T
                keys = k_tiles.tile(x)
                for piece, held in zip(keys.multiplied, keys.columns, strict=True):
                    lower, upper = max(held.start, columns.start), min(held.stop, columns.stop)
                    if lower < upper:
                        plgpu.wgmma(
                            columns_of(dq_ref, lower - columns.start, upper - columns.start),
                            ds,
                            columns_of(piece, lower - held.start, upper - held.start),
                        )

        def add_dq(dq, batch, head, start):
            place = (start + first_row) * padded_columns(head_dim) + columns.start * WGMMA_ROWS
            add_to_sums(dq, dq_sum_ref, batch, head, place)

        def compute(tile, step):
            batch, head_kv, part, start_kv, start_q, masked_steps, steps = locate(tile)
            start_row = start_kv + w * WGMMA_ROWS
            for x in range(warpgroups) if makes_dq else (w,):
                plgpu.barrier_wait(kv_full.at[x])
            if makes_dq:
                ds_tiles.at[(step - 1) % 2, w][...] = zeros(WGMMA_ROWS, block_q).astype(k_ref.dtype)
                fence_async()
                exchange_barrier(warpgroups)

            # Visit the tiles of queries that see these keys; only tiles at the edges are masked.
            def visit(x, carry, member, masked):
                ds, dk, dv = carry
                index = member * steps + x
                now = step + index
                slot, previous = now % num_stages, (now - 1) % num_stages
                multiplied = q_tiles.tile(jnp.where(index == 0, slot, previous))  # ds is 0 at first
                dout = dout_tiles.tile(slot)

                def overlap(s_ref, dp_ref, dk_ref, dv_ref, dq_ref=None):
                    # Start dk += dsᵀ q of the tile before, sᵀ = scale · k qᵀ, dpᵀ = v doutᵀ.
                    plgpu.barrier_wait(q_full.at[slot])
                    if makes_dq:
                        start_dq(dq_ref, (now - 1) % 2)
                    dk_ref[...] = dk
                    add_values(
                        dk_ref, ds_tiles.at[(now - 1) % 2, w] if makes_dq else ds, multiplied
                    )
                    add_scores(s_ref, k, q_tiles.tile(slot))
                    pieces = len(k.multiplied)
                    if makes_dq:
                        dq = wait_for(dq_ref, 2 * pieces)

                        @pl.when(index > 0)
                        def _():
                            before = index - 1
                            head = part * members + before // steps
                            add_dq(dq, batch, head, start_q(before % steps))
                    elif block_q > WGMMA_ROWS:
                        # The registers of ds are dp's.
                        dk_new = wait_for(dk_ref, pieces, ds)
                        plgpu.barrier_arrive(q_empty.at[previous])
                    plgpu.barrier_wait(dout_full.at[slot])
                    add_scores(dp_ref, v, dout)
                    # pᵀ = exp(sᵀ - lse)
                    s = wait_for(s_ref, len(v.multiplied))
                    if makes_dq or block_q <= WGMMA_ROWS:
                        dk_new = plgpu.wgmma_accumulator_load(dk_ref, wait_n=None)
                        s, dk_new, _ = lax.optimization_barrier((s, dk_new, ds))
                        plgpu.barrier_arrive(q_empty.at[previous])
                    position = key = None
                    if masked:
                        position = iota(s.shape, 1, WGMMA) + start_q(x)
                        key = iota(s.shape, 0, WGMMA) + (start_row - diagonal)  # as queries are
                    end = seq_kv - diagonal if makes_dq and seq_kv % block_kv else None
                    s, dcap = visible_scores(
                        s, position, key, end, rule, window_left, window_right, masked, WGMMA
                    )
                    lse2 = plgpu.load(lse2_rows.at[slot], layout=WGMMA.reduce(0))
                    p = jnp.exp2(s * rule.exp2_scale - as_columns(lse2, s, WGMMA))
                    # dv += pᵀ dout
                    p_cast = p.astype(k_ref.dtype)
                    dv_ref[...] = dv
                    add_values(dv_ref, p_cast, dout)
                    # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
                    dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=len(dout.multiplied))
                    dp, weight = lax.optimization_barrier((dp, p_cast))
                    weight = weight.astype(jnp.float32) if rule.softcap is None else p * dcap
                    delta = plgpu.load(delta_rows.at[slot], layout=WGMMA.reduce(0))
                    ds_new = (weight * (dp - as_columns(delta, dp, WGMMA))).astype(k_ref.dtype)
                    if makes_dq:
                        ds_tiles.at[now % 2, w][...] = ds_new
                        ds_new = ds
                        fence_async()
                        exchange_barrier(warpgroups)
                    dv_new = wait_for(dv_ref, 0, p_cast)
                    plgpu.barrier_arrive(dout_empty.at[slot])
                    return ds_new, dk_new, dv_new

                refs = [accumulator(WGMMA_ROWS, block_q)] * 2
                refs += [accumulator(*dk.shape), accumulator(*dv.shape)]
                if makes_dq:
                    refs.append(accumulator(WGMMA_ROWS, columns.stop - columns.start))
                return pl.run_scoped(overlap, *refs)

            def visit_head(member, carry):
                for masked, lower, upper in step_ranges(masked_steps, steps):
                    body = functools.partial(visit, member=member, masked=masked)
                    carry = lax.fori_loop(lower, upper, body, carry)
                return carry

            carry = (
                jnp.int32(0) if makes_dq else zeros(WGMMA_ROWS, block_q).astype(k_ref.dtype),
                zeros(WGMMA_ROWS, padded_columns(head_dim)),
                zeros(WGMMA_ROWS, padded_columns(head_dim_v)),
            )
            if members == 1:
                ds, dk, dv = visit_head(program * 0, carry)
            else:
                ds, dk, dv = lax.fori_loop(0, members, visit_head, carry)

            # dk += dsᵀ q of the last tile
            end = step + steps * members
            stored = (end - 1) % 2

            def last(dk_ref, dq_ref=None):
                if makes_dq:
                    start_dq(dq_ref, stored)
                dk_ref[...] = dk
                add_values(
                    dk_ref, ds_tiles.at[stored, w] if makes_dq else ds,
                    q_tiles.tile((end - 1) % num_stages),
                )  # fmt: skip
                if makes_dq:
                    dq = wait_for(dq_ref, len(k.multiplied))
                    add_dq(dq, batch, part * members + members - 1, start_q(steps - 1))
                return wait_for(dk_ref, 0, ds)

            refs = [accumulator(*dk.shape)]
            if makes_dq:
                refs.append(accumulator(WGMMA_ROWS, columns.stop - columns.start))
            dk = pl.run_scoped(last, *refs)

            if makes_dq:
                exchange_barrier(warpgroups)  # the others read these keys too
            else:
                warpgroup_barrier()
            if dk_sum_ref is None:
                # Scale and store.
                store_tile(dk * rule.scale, k, dk_ref, batch, head_kv, start_row)
                store_tile(dv, v, dv_ref, batch, head_kv, start_row)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(kv_empty.at[w])
            if dk_sum_ref is not None:
                for x, sums in ((dk, dk_sum_ref), (dv, dv_sum_ref)):
                    add_to_sums(x, sums, batch, head_kv, start_row * x.shape[1])
            return end

        for_each_tile(schedule_ref, program, compute)
        plgpu.wait_smem_to_gmem(0)

    run_warpgroups(warpgroups, consume, produce)


def launch_fused(inputs, spec, backend):
    """Call `flash_bwd_dkdv_kernel` with sums; returns dq, dk and dv."""
    columns, columns_v = padded_columns(spec.head_dim), padded_columns(spec.head_dim_v)
    config = backend.configs(spec)["flash_bwd_fused"]
    sums = [gradient_sums(*inputs.lse2.shape, columns)]
    is_split = splits_group(spec, config.block_q, config.block_kv, num_sms(backend.target))
    if is_split:
        rows = pl.cdiv(spec.seq_kv, ROW_PADDING) * ROW_PADDING
        sums += (
            gradient_sums(spec.batch, spec.heads_kv, rows, columns),
            gradient_sums(spec.batch, spec.heads_kv, rows, columns_v),
        )
    results = launch_dkdv(inputs, spec, backend, "flash_bwd_fused", sums)
    if is_split:
        dq, dk, dv = results
        dk = gradient_of_sums(order_sums(dk, columns), inputs.k, spec.scale)
        dv = gradient_of_sums(order_sums(dv, columns_v), inputs.v)
    else:
        dk, dv, dq = results
    return gradient_of_sums(order_sums(dq, columns), inputs.q, spec.scale), dk, dv


def launch_dkdv(inputs, spec, backend, name="flash_bwd_dkdv", sums=()):
    """Call `flash_bwd_dkdv_kernel`.

    Args:
        inputs, spec, backend: operands, problem and target.
        name: the configuration's, "flash_bwd_fused" with sums.
        sums: types of float32 sums: of dq, or of dq, dk and dv, where programs share a group's tile
            of keys.

    Returns:
        dk and dv, unless they are summed, and the sums.
    """
    config = backend.configs(spec)[name]
    is_split = len(sums) == 3
    members = 1 if is_split else spec.group_size
    warpgroups, stages = config.num_warps // 4 - 1, config.num_stages
    rows, queries = (warpgroups, WGMMA_ROWS), (stages, config.block_q)
    tiles, pieces = make_tiles(
        spec,
        bool(sums),
        k_tiles=rows,
        v_tiles=rows,
        q_tiles=queries,
        dout_tiles=queries,
    )
    vector = plgpu.SMEM(queries, jnp.float32)
    scratch = tiles | {
        "lse2_rows": vector,
        "delta_rows": vector,
        "kv_full": plgpu.Barrier(
            num_arrivals=pieces["k_tiles"] + pieces["v_tiles"], num_barriers=warpgroups
        ),
        "kv_empty": plgpu.Barrier(num_barriers=warpgroups),
        "q_full": plgpu.Barrier(num_arrivals=pieces["q_tiles"] + 1, num_barriers=stages),
        "q_empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
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
    parts = spec.heads_q // members
    turned = replace(exchange_sides(spec), heads_q=parts, heads_kv=parts)
    outputs = (None if is_split else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[1:3])
    schedule = make_schedule(turned, config.block_kv, config.block_q, num_sms(backend.target))
    return launch(
        name,
        flash_bwd_dkdv_kernel,
        inputs,
        schedule,
        (*outputs, *sums),
        scratch,
        spec,
        config,
        num_sums=len(sums),
        members=members,
    )


def order_sums(sums, columns):
    """Return what `add_to_sums` added up, [B, H, rows · columns], as [B, rows, H, columns]."""
    batch, heads, size = sums.shape
    # tile, 8 columns, warp, row, column pair, half of 16 rows, column of the pair
    blocks = sums.reshape(batch, heads, size // columns // 64, columns // 8, 4, 8, 4, 2, 2)
    ordered = blocks.transpose(0, 2, 4, 7, 5, 1, 3, 6, 8)
    return ordered.reshape(batch, size // columns, heads, columns)
