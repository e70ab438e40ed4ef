"""The backward's kernel of dq; `pallas_attn.kernels.sm90.flash_bwd` has the formulas."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import warpgroup_barrier
from pallas_attn.kernels.explicit.items import (
    Items,
    allocate_hand_over,
    for_each_place,
    item_counter,
    next_item,
    own_item,
)
from pallas_attn.kernels.explicit.programs import for_each_tile, run_warpgroups
from pallas_attn.kernels.explicit.registers import as_rows, iota
from pallas_attn.kernels.explicit.rows import (
    dot_loaded_rows,
    load_row_values,
    store_row_values,
    store_rows_of_pieces,
)
from pallas_attn.kernels.explicit.schedule import make_schedule
from pallas_attn.kernels.explicit.softmax import add_columns
from pallas_attn.kernels.explicit.steps import count_steps, step_ranges, tile_start
from pallas_attn.kernels.explicit.tma import Tiles, clear_values, load_tile, store_tile
from pallas_attn.kernels.explicit.wgmma import (
    WGMMA,
    WGMMA_ROWS,
    accumulator,
    add_scores,
    add_values,
    finish_before_wait,
    wait_for,
    zeros,
)
from pallas_attn.kernels.explicit.wgmma_launch import launch
from pallas_attn.kernels.explicit.wgmma_scores import hide_keys, visible_scores
from pallas_attn.kernels.library.sequences import count_sequence_tiles, num_sequences_of
from pallas_attn.kernels.library.softmax import LOG2E
from pallas_attn.kernels.library.tiles import ROW_PADDING, cdiv, maximum, visible_tiles
from pallas_attn.kernels.sm90.gradient_tiles import block_tiles, make_tiles, values_and_factors
from pallas_attn.targets import num_sms
from twin_attention.contract.validate import fail
from twin_attention.targets.sm90 import has_large_heads


class Work(NamedTuple):
    """A tile of queries, and the tiles of keys that it sees.

    Attributes:
        batch, head: which ones.
        start_q, end_q: its first row, and the end of its sequence's.
        first_row: its first row of lse2 and delta.
        first_kv, end_kv: the first row of its sequence's keys, and how many these are.
        diagonal: the key position of row 0.
        start_kv: the first key of a step's tile.
        masked_steps, steps: how many tiles of keys are at edges, which come first, and in all.
    """

    batch: Any
    head: Any
    start_q: Any
    end_q: Any
    first_row: Any
    first_kv: Any
    end_kv: Any
    diagonal: Any
    start_kv: Callable[..., Any]
    masked_steps: Any
    steps: Any


def flash_bwd_dq_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    out_ref,
    lse_ref,
    dlse_ref,
    cu_seqlens_q_ref,
    cu_seqlens_kv_ref,
    schedule_ref,
    lse2_ref,
    delta_ref,
    dq_ref,
    counter_ref,
    *,
    q_tiles,
    dout_tiles,
    k_tiles,
    v_tiles,
    out_tiles=None,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    hand_over,
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
    """One program computes tiles of block_q rows of dq of a query head, one after the other.

    Before the products of a tile it computes lse2 and delta of its rows, and stores them for the
    kernel of dk and dv. Operands: q and dq [B, Sq, Hq, D], k [B, Skv, Hkv, D], v [B, Skv, Hkv, Dv],
    dout and out [B, Sq, Hq, Dv], lse and dlse [B, Hq, Sq] float32 (dlse is None for zero); lse2 and
    delta [B, Hq, Sq rounded up to ROW_PADDING, which is block_q] float32, lse2 in base 2 and +inf
    where a row saw no key or does not exist; schedule as in `flash_fwd_kernel`; in shared memory a
    tile of 64 rows of q, of dout and of out for each consumer warpgroup, num_stages tiles of k and
    of v, and their barriers. Loop invariant: dq is Σ ds k over the keys before the last tile, and
    ds is that tile's. Accumulation: float32, exponents in base 2, ds cast to k's dtype for ds·k. A
    row that sees no key gives 0. Large heads have code of its own for the first tile of keys. For
    small ones that would be too much for the instruction cache, so that they multiply a ds of 0.

    Packed sequences, of small heads: as in `flash_fwd_kernel`. Each sequence begins a tile of lse2
    and delta, as in `prepare_rows`; tiles without rows are not stored. Rows of a tile past its
    sequence's end are the next one's, or padding. They are not stored, and those of k and v are
    cleared in shared memory. Queries without a key are loaded as 0.

    out_tiles: None where shared memory has no room for its rows, which are then read as they are,
        nor for more than num_stages - 1 tiles of v.
    """
    warpgroups = num_warps // 4 - 1
    program = lax.axis_index("program")
    heads_q = q_ref.shape[2]
    num_tiles = pl.cdiv(seq_q, block_q)
    is_packed = cu_seqlens_q_ref is not None
    of_row = WGMMA.reduce(1)
    v_stages = v_full.shape[0]
    q_tiles, dout_tiles, v_tiles = (Tiles(*views) for views in (q_tiles, dout_tiles, v_tiles))
    k_tiles, scored_tiles = values_and_factors(k_tiles)
    is_large = out_tiles is None
    if not is_large:
        out_tiles = Tiles(*out_tiles)

    def locate(tile):
        """Return the work of a tile of queries, which is a `Place` if sequences are packed."""
        if is_packed:
            # Queries are counted from the first of all, keys from the sequence's first.
            head, number, start_q, end_q, first_kv, end_kv, _sequence = tile
            batch, first_row, offset = head * 0, number * block_q, end_kv - end_q
        else:
            start_q = first_row = tile % num_tiles * block_q
            batch, head = tile // num_tiles // heads_q, tile // num_tiles % heads_q
            end_q, first_kv, end_kv, offset = seq_q, 0, seq_kv, diagonal
        begin, before, full, after = visible_tiles(
            start_q, end_q, end_kv, offset, window_left, window_right, block_q, block_kv
        )
        last_start = maximum(cdiv(end_kv, block_kv) * block_kv - block_kv, 0)

        def start_kv(step):
            return tile_start(step, begin, before, full, after, block_kv, last_start)

        return Work(
            batch, head, start_q, end_q, first_row, first_kv, end_kv, offset, start_kv,
            *count_steps(before, full, after),
        )  # fmt: skip

    def for_each(body, next_place):
        if is_packed:
            for_each_place(next_place, body)
        else:
            for_each_tile(schedule_ref, program, body)

    def produce():
        """Load what the consumers work on, as soon as there is room."""

        def load_all(tile, step):
            work = locate(tile)
            batch, head, steps = work.batch, work.head, work.steps
            head_kv = head // group_size
            start_q = work.start_q
            if is_packed:
                # Queries without a key may be padding, which may be NaN; past the last row are 0.
                start_q = jnp.where(work.end_kv > 0, start_q, seq_q)
            for w in range(warpgroups):
                start = start_q + w * WGMMA_ROWS
                plgpu.barrier_wait(q_empty.at[w])
                load_tile(q_ref, q_tiles.tile(w), batch, head, start, q_full.at[w])
                load_tile(dout_ref, dout_tiles.tile(w), batch, head, start, q_full.at[w])
                if not is_large:
                    load_tile(out_ref, out_tiles.tile(w), batch, head, start, q_full.at[w])

            @pl.loop(0, steps)
            def _(x):
                slot, start = (step + x) % num_stages, work.start_kv(x)
                if is_packed:
                    start = work.first_kv + start
                plgpu.barrier_wait(k_empty.at[slot])
                load_tile(k_ref, k_tiles.tile(slot), batch, head_kv, start, k_full.at[slot])
                slot = (step + x) % v_stages
                plgpu.barrier_wait(v_empty.at[slot])
                load_tile(v_ref, v_tiles.tile(slot), batch, head_kv, start, v_full.at[slot])

            return step + steps

        items = Items(
            cu_seqlens_q_ref, cu_seqlens_kv_ref, seq_q, seq_kv, heads_q, block_q, last_first=True
        )
        for_each(load_all, lambda: next_item(counter_ref, items, hand_over))

    def consume(w):
        """Compute the rows of consumer warpgroup w, a number: each has its own code."""
        q, dout = q_tiles.tile(w), dout_tiles.tile(w)

        # All tiles are free; for small heads the first step gives the last tile of keys back.
        plgpu.barrier_arrive(q_empty.at[w])
        for slot in range(num_stages if is_large else num_stages - 1):
            plgpu.barrier_arrive(k_empty.at[slot])
        for slot in range(v_stages):
            plgpu.barrier_arrive(v_empty.at[slot])
        if is_packed:
            plgpu.barrier_arrive(hand_over.read)

        def compute(tile, step):
            work = locate(tile)
            batch, head, start_kv, end_kv = work.batch, work.head, work.start_kv, work.end_kv
            masked_steps, steps = work.masked_steps, work.steps
            start_row = work.start_q + w * WGMMA_ROWS
            place = batch, head, start_row
            num_rows = work.end_q if is_packed or seq_q % block_q else None
            lse = load_row_values(lse_ref, *place, num_rows, float("inf"))
            dlse = 0.0
            if dlse_ref is not None:
                dlse = load_row_values(dlse_ref, *place, num_rows, 0.0)
                dlse = jnp.where(lse == float("-inf"), 0.0, dlse)
            # delta = rowsum(dout ∘ out) - dlse; lse2 is +inf for rows without a key or not there
            if is_large:
                delta = dot_loaded_rows(dout_ref, out_ref, *place, num_rows) - dlse
                plgpu.barrier_wait(q_full.at[w])
            else:
                plgpu.barrier_wait(q_full.at[w])
                delta = dot_rows(dout, out_tiles.tile(w))
                if is_packed:
                    # The next sequence's rows, or padding.
                    delta = jnp.where(lse == float("inf"), 0.0, delta)
                delta = delta - dlse
            lse2 = jnp.where(lse == float("-inf"), float("inf"), lse) * LOG2E
            place = batch, head, work.first_row + w * WGMMA_ROWS
            store_row_values(lse2, lse2_ref, *place, None, of_row)
            store_row_values(delta, delta_ref, *place, None, of_row)
            if is_packed:
                # The gradient of padding's lse may be NaN.
                delta = jnp.where(end_kv > 0, delta, 0.0)

            # Visit the tiles of keys that these queries see; only edges are masked.
            def visit(x, carry, masked):
                now = step + x
                slot, slot_v, previous = now % num_stages, now % v_stages, (now - 1) % num_stages
                may_end = is_packed and masked
                if may_end:
                    # What is another sequence's, or padding, may be NaN. No product is in flight
                    # here: among products ptxas would wait for each.
                    plgpu.barrier_wait(k_full.at[slot])
                    plgpu.barrier_wait(v_full.at[slot_v])
                    left = end_kv - start_kv(x)
                    clear_values(k_tiles.tile(slot), left)
                    clear_values(v_tiles.tile(slot_v), left)
                own = w
                if is_large or is_packed:
                    # w, which the compiler does not know: it would compute the descriptors of q and
                    # dout before the loop, for which there are no registers.
                    own = w + (now >> 30)
                q, dout = q_tiles.tile(own), dout_tiles.tile(own)

                def overlap(s_ref=None, dp_ref=None, dq_ref=None):
                    # Start dq += ds k of the tile before, s = scale · q kᵀ, dp = dout vᵀ.
                    if not is_large and not may_end:
                        plgpu.barrier_wait(k_full.at[slot])
                    if dq_ref is not None:
                        ds, dq = carry
                        dq_ref[...] = dq
                        multiplied = previous if is_large else jnp.where(x == 0, slot, previous)
                        add_values(dq_ref, ds, k_tiles.tile(multiplied))
                    if is_large:
                        plgpu.barrier_wait(k_full.at[slot])
                    return with_sums(s_ref, functools.partial(scores, dq_ref, dp_ref))

                def with_sums(ref, function):
                    """Call a function with sums of scores: those there, or else new ones."""
                    if ref is not None:
                        return function(ref)
                    return pl.run_scoped(function, accumulator(WGMMA_ROWS, block_kv))

                def scores(dq_ref, dp_ref, s_ref):
                    add_scores(s_ref, q, scored_tiles.tile(slot))
                    dq = zeros(WGMMA_ROWS, q.columns[-1].stop)
                    if dq_ref is not None:
                        dq = wait_for(dq_ref, len(q.multiplied), carry[0])
                        plgpu.barrier_arrive(k_empty.at[previous])
                    if may_end:
                        # This is never so. Without a branch here ptxas finds too few registers, and
                        # waits for each product.
                        pl.when(now < 0)(lambda: plgpu.barrier_wait(v_full.at[slot_v]))
                    else:
                        plgpu.barrier_wait(v_full.at[slot_v])
                    return with_sums(dp_ref, functools.partial(differences, s_ref)), dq

                def differences(s_ref, dp_ref):
                    add_scores(dp_ref, dout, v_tiles.tile(slot_v))
                    # p = exp(s - lse)
                    s = wait_for(s_ref, len(dout.multiplied))
                    position = key = None
                    if masked and not is_packed:
                        position = iota(s.shape, 0, WGMMA) + (start_row + work.diagonal)
                        key = iota(s.shape, 1, WGMMA) + start_kv(x)
                    end = seq_kv if seq_kv % block_kv else None
                    s, exp2_scale, dcap = visible_scores(
                        s, position, key, end, rule, window_left, window_right,
                        masked and not is_packed,
                    )  # fmt: skip
                    if may_end:
                        # Bounds that are data take fewer registers so.
                        place = start_row + work.diagonal, start_kv(x), end_kv
                        s = hide_keys(s, *place, window_left, window_right)
                    p = jnp.exp2(s * exp2_scale - as_rows(lse2, s)) * dcap
                    if is_large:
                        p = lax.optimization_barrier(p)
                        finish_before_wait(add_columns(p))
                    # ds = p ∘ (dp - delta) ∘ dcap
                    dp = wait_for(dp_ref, 0, p)
                    plgpu.barrier_arrive(v_empty.at[slot_v])
                    return (p * (dp - as_rows(delta, dp))).astype(k_ref.dtype)

                if carry is None:
                    return overlap()
                sums = accumulator(*carry[1].shape)
                if is_large:
                    return pl.run_scoped(lambda dq_ref: overlap(dq_ref=dq_ref), sums)
                return pl.run_scoped(overlap, *[accumulator(WGMMA_ROWS, block_kv)] * 2, sums)

            if is_large:
                # The first tile of keys has no ds k to run under its exponentials.
                ranges = step_ranges(masked_steps, steps, first=1)
                carry = visit(program * 0, None, masked=ranges[0][0])
            else:
                ranges = step_ranges(masked_steps, steps)
                no_ds = zeros(WGMMA_ROWS, block_kv).astype(k_ref.dtype)
                carry = no_ds, zeros(WGMMA_ROWS, q.columns[-1].stop)
            for masked, lower, upper in ranges:
                carry = lax.fori_loop(lower, upper, functools.partial(visit, masked=masked), carry)
            ds, dq = carry

            # dq += ds k of the last tile
            previous = (step + steps - 1) % num_stages

            def last(dq_ref):
                dq_ref[...] = dq
                add_values(dq_ref, ds, k_tiles.tile(previous))
                return wait_for(dq_ref, 0, ds)

            dq = pl.run_scoped(last, accumulator(*dq.shape))
            if is_large:
                plgpu.barrier_arrive(k_empty.at[previous])

            # Scale and store.
            warpgroup_barrier()
            dq = dq * rule.scale
            if is_packed:
                store_rows_of_pieces(dq, q, dq_ref, batch, head, start_row, work.end_q)
            else:
                store_tile(dq, q, dq_ref, batch, head, start_row)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(q_empty.at[w])
            return step + steps

        for_each(compute, lambda: own_item(hand_over))
        if not is_packed:
            plgpu.wait_smem_to_gmem(0)

    run_warpgroups(warpgroups, consume, produce)


def dot_rows(a, b):
    """Return the product of each row of a tile with that of another tile, float32."""
    total = 0.0
    for pieces in zip(a.multiplied, b.multiplied, strict=True):
        x, y = (plgpu.load(piece, layout=WGMMA).astype(jnp.float32) for piece in pieces)
        total = total + jnp.sum(x * y, axis=1)
    return total


def launch_dq(sources, spec, backend, *offsets):
    """Call `flash_bwd_dq_kernel`; returns dq, lse2 and delta."""
    config = backend.configs(spec)["flash_bwd_dq"]
    warpgroups, stages = config.num_warps // 4 - 1, config.num_stages
    rows, keys = (warpgroups, WGMMA_ROWS), (stages, config.block_kv)
    if has_large_heads(spec):
        v_stages = stages - 1
        tiles, pieces = block_tiles(
            spec,
            "k_tiles",
            q_tiles=rows,
            dout_tiles=rows,
            k_tiles=keys,
            v_tiles=(v_stages, config.block_kv),
        )
    else:
        v_stages = stages
        tiles, pieces = make_tiles(
            spec, False, q_tiles=rows, dout_tiles=rows, out_tiles=rows, k_tiles=keys, v_tiles=keys
        )
    of_queries = sum(pieces.get(name, 0) for name in ("q_tiles", "dout_tiles", "out_tiles"))
    scratch = tiles | {
        "q_full": plgpu.Barrier(num_arrivals=of_queries, num_barriers=warpgroups),
        "q_empty": plgpu.Barrier(num_barriers=warpgroups),
        "k_full": plgpu.Barrier(num_arrivals=pieces["k_tiles"], num_barriers=stages),
        "k_empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=pieces["v_tiles"], num_barriers=v_stages),
        "v_empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=v_stages),
    }
    num_tiles = count_sequence_tiles(spec.seq_q, num_sequences_of(spec), ROW_PADDING)
    programs = num_sms(backend.target)
    if offsets:
        if config.block_q != ROW_PADDING:
            fail(NotImplementedError, "flash_bwd_dq", f"block_q={ROW_PADDING}", config)
        schedule = min(num_tiles * spec.heads_q, programs)
    else:
        schedule = make_schedule(spec, config.block_q, config.block_kv, programs)
    padded_rows = num_tiles * ROW_PADDING
    rows = jax.ShapeDtypeStruct((*sources.lse.shape[:2], padded_rows), jnp.float32)
    dq = jax.ShapeDtypeStruct(sources.q.shape, sources.q.dtype)
    lse2, delta, dq, *_counter = launch(
        "flash_bwd_dq",
        flash_bwd_dq_kernel,
        (*sources, *(offsets or (None, None))),
        schedule,
        (rows, rows, dq, item_counter() if offsets else None),
        scratch | {"hand_over": allocate_hand_over(warpgroups) if offsets else None},
        spec,
        config,
        num_sums=int(bool(offsets)),
    )
    return dq, lse2, delta
