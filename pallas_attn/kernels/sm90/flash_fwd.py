"""Flash attention, forward.

``out = softmax(mask(softcap(scale · q kᵀ))) v`` and ``lse = log Σ exp``, one pass over the keys.
Dao 2023, FlashAttention-2, algorithm 1; Shah et al. 2024, FlashAttention-3, for what is placed by
hand here: a producer warp loads tiles by TMA; consumer warpgroups, to which the registers go, start
q kᵀ of the next tile before the softmax of this one, take p from registers, and issue their
products in turn, so that one's softmax runs under the other's products. A program works on one tile
of queries after the other. m_i grows only where a score passes it by RESCALE_ABOVE, as on SM80.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import pass_turn, take_turn
from pallas_attn.kernels.explicit.block_mask import find_list, kept_row, kept_tiles
from pallas_attn.kernels.explicit.cp_async import allocate_tile
from pallas_attn.kernels.explicit.items import (
    Items,
    allocate_hand_over,
    for_each_place,
    item_counter,
    next_item,
    own_item,
)
from pallas_attn.kernels.explicit.programs import for_each_tile, run_warpgroups
from pallas_attn.kernels.explicit.registers import as_rows
from pallas_attn.kernels.explicit.rows import store_row_values, store_rows_of_tile
from pallas_attn.kernels.explicit.schedule import make_schedule
from pallas_attn.kernels.explicit.softmax import add_columns, rescale
from pallas_attn.kernels.explicit.steps import tile_start
from pallas_attn.kernels.explicit.tma import (
    Tiles,
    clear_values,
    count_boxes,
    is_whole,
    load_tile,
    padded_columns,
    store_tile,
    tile_views,
    value_views,
)
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
from pallas_attn.kernels.explicit.wgmma_launch import launch, size_of
from pallas_attn.kernels.explicit.wgmma_scores import (
    hide_keys,
    rounding_of_one_key,
    scaled_scores,
    softmax_update,
)
from pallas_attn.kernels.library.block_mask import list_arguments, lists_of_keys
from pallas_attn.kernels.library.sequences import (
    count_sequence_tiles,
    num_sequences_of,
    offsets_of,
    with_batch,
    without_batch,
)
from pallas_attn.kernels.library.softmax import LN2, LOG2E
from pallas_attn.kernels.library.tiles import cdiv, maximum, visible_tiles
from pallas_attn.targets import num_sms
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.target import SHARED_MEMORY_LIMIT

# Larger heads visit the last tiles first, and few of them are worked on at a time. Level at 192.
LARGE_HEAD = 224


class Work(NamedTuple):
    """A tile of queries, and the tiles of keys that it sees.

    Attributes:
        batch, head: which ones.
        start_q, end_q: its first row, and the end of its sequence's.
        first_kv: the first row of its sequence's keys; None without packed sequences.
        diagonal: the key position of row 0.
        keys: the first key of a step's tile, and where keys end, None if after it.
        masked_steps, steps: how many tiles of keys are at edges, which come first, and in all.
    """

    batch: Any
    head: Any
    start_q: Any
    end_q: Any
    first_kv: Any
    diagonal: Any
    keys: Callable[..., tuple]
    masked_steps: Any
    steps: Any


def flash_fwd_kernel(
    q_ref,
    k_ref,
    v_ref,
    sink_ref,
    cu_seqlens_q_ref,
    cu_seqlens_kv_ref,
    counts_ref,
    tiles_ref,
    schedule_ref,
    out_ref,
    lse_ref,
    counter_ref,
    *,
    q_and_out,
    k_tiles,
    v_tiles,
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
    num_sequences,
    rule,
    window_left,
    window_right,
    head_dim,
    head_dim_v,
    tile_q,
    tile_kv,
    block_q,
    block_kv,
    num_warps,
    num_stages,
    ping_pong,
    out_sizes,
):
    """One program computes tiles of block_q rows of a query head, one after the other.

    Operands: q [B, Sq, Hq, D], k [B, Skv, Hkv, D], v [B, Skv, Hkv, Dv], sinks [Hq] float32 or None,
    schedule [programs, 1 + most tiles] int32 (see `make_schedule`), out [B, Sq, Hq, Dv], lse [B,
    Hq, Sq] (float32, natural log); in shared memory a tile of 64 rows of q and of out for each
    consumer warpgroup, and num_stages tiles of k and of v, each with a barrier that completes when
    it is full and one when it is empty. out_sizes: how many columns of out are stored at a time, in
    the same memory; one number where there is room for all of them. Query i stands at key
    position i + diagonal; rule: `twin_attention.contract.spec.ScoreRule`. Loop invariant: m_i is
    at most RESCALE_ABOVE below the row maximum so far (base 2), and with
    p = exp2(s · exp2_scale - m_i), l_i holds Σ p as 8 partial sums a row and acc is Σ p v.
    Accumulation: float32, exponents in base 2, p cast to v's dtype for p·v. A row that sees no key
    gives 0, and -inf or its sink.

    Packed sequences: as in the portable `flash_fwd_kernel`, a batch of one; schedule is None. Items
    are tiles of a head, the last ones first, which see most keys. Programs take them from counter
    [1], which is 0 at first; for a dense batch it is None, and so is hand_over.

    Block mask: counts and tiles, the `lists_of_keys`, and the sizes of its tiles, tile_q and
    tile_kv; otherwise all None.
    """
    warpgroups = num_warps // 4 - 1
    program = lax.axis_index("program")
    heads_q = q_ref.shape[2]
    # Capped, scores need no maximum in a dtype with the range of float32: m_i stays 0.
    bounded = rule.small_cap and v_ref.dtype == jnp.bfloat16
    is_packed = num_sequences is not None
    num_tiles = count_sequence_tiles(seq_q, num_sequences, block_q)
    q_tiles, out_tiles = ([[*views] for views in tiles] for tiles in q_and_out)
    q_tiles = [Tiles(*views) for views in q_tiles]
    k_tiles, v_tiles = Tiles(*k_tiles), Tiles(*v_tiles)
    # Visit the last tiles first, which only the later warpgroups see.
    last_first = block_q >= 2 * block_kv and window_right is not None
    last_first = last_first and max(head_dim, head_dim_v) > LARGE_HEAD
    last_first = last_first and not is_packed and tiles_ref is None

    def locate(item):
        """Return the work of an item, which is a `Place` if sequences are packed."""
        if is_packed:
            # Queries are counted from the first of all, keys from the sequence's first.
            batch, head, start_q, end_q = program * 0, item.head, item.start, item.end
            first_kv, end_kv = item.first_other, item.size_other
            offset = end_kv - end_q
        else:
            start_q = item % num_tiles * block_q
            batch, head = item // num_tiles // heads_q, item // num_tiles % heads_q
            end_q, first_kv, end_kv, offset = seq_q, None, seq_kv, diagonal
        begin, before, full, after = visible_tiles(
            start_q, end_q, end_kv, offset, window_left, window_right, block_q, block_kv
        )
        last_start = maximum(cdiv(end_kv, block_kv) * block_kv - block_kv, 0)
        if tiles_ref is not None:
            listed, count = find_list(counts_ref, tiles_ref, batch, head, start_q // tile_q)
            begin, before, full, after = kept_tiles(
                listed, count, tiles_ref.shape[3], (begin, before, full, after), window_left,
                window_right, block_kv, tile_kv,
            )  # fmt: skip

        def keys(step):
            """Return the first key of a step's tile, and where keys end, None if after it."""
            if last_first:
                step = jnp.where(step < before + after, before + after - 1 - step, step)
            start = tile_start(step, begin, before, full, after, block_kv, last_start)
            if tiles_ref is not None:
                return kept_row(listed, count, start, seq_kv, tile_kv)
            return start, end_kv if is_packed or seq_kv % block_kv else None

        # One tile is visited where none is seen, and hides all.
        steps = jnp.maximum(before + full + after, 1)
        return Work(batch, head, start_q, end_q, first_kv, offset, keys, before + after, steps)

    def for_each(body, next_place):
        """Call body(`Work`, steps before) for each tile of this program."""

        def visit(item, step):
            return body(locate(item), step)

        if is_packed:
            for_each_place(next_place, visit)
        else:
            for_each_tile(schedule_ref, program, visit)

    def produce():
        """Load what the consumers work on, as soon as there is room."""

        def load_all(work, step):
            batch, head, start_q, steps = work.batch, work.head, work.start_q, work.steps

            def load(matrix, tiles, full, empty, x):
                start, _ = work.keys(x)
                if is_packed:
                    start = work.first_kv + start
                slot = (step + x) % num_stages
                plgpu.barrier_wait(empty.at[slot])
                load_tile(matrix, tiles.tile(slot), batch, head // group_size, start, full.at[slot])

            def load_k(x):
                load(k_ref, k_tiles, k_full, k_empty, x)

            def load_v(x):
                load(v_ref, v_tiles, v_full, v_empty, x)

            load_k(program * 0)
            for w in range(warpgroups):
                plgpu.barrier_wait(q_empty.at[w])
                start = start_q + w * WGMMA_ROWS
                load_tile(q_ref, q_tiles[w], batch, head, start, q_full.at[w])

            @pl.loop(1, steps)
            def _(x):
                load_k(x)
                load_v(x - 1)

            load_v(steps - 1)
            return step + steps

        items = Items(
            cu_seqlens_q_ref, cu_seqlens_kv_ref, seq_q, seq_kv, heads_q, block_q, last_first=True
        )
        for_each(load_all, lambda: next_item(counter_ref, items, hand_over))

    def consume(w):
        """Compute the rows of consumer warpgroup w, a number: each has its own code."""
        turn = ping_pong and warpgroups > 1
        # With turns the first warpgroup waits for tiles, and the others for their turn.
        waits = ping_pong < 2 or not turn or w == 0
        q = q_tiles[w]

        # All tiles are free, and the first warpgroup has the first turn.
        plgpu.barrier_arrive(q_empty.at[w])
        for slot in range(num_stages):
            plgpu.barrier_arrive(k_empty.at[slot])
            plgpu.barrier_arrive(v_empty.at[slot])
        if is_packed:
            plgpu.barrier_arrive(hand_over.read)
        if turn and w == warpgroups - 1:
            pass_turn(w, warpgroups)

        def begin_products(full, in_turn=True):
            if waits and full is not None:
                plgpu.barrier_wait(full)
            if turn and in_turn:
                take_turn(w, warpgroups)

        def end_products(in_turn=True):
            if turn and in_turn:
                pass_turn(w, warpgroups)

        def compute(work, step):
            batch, head, keys = work.batch, work.head, work.keys
            masked_steps, steps = work.masked_steps, work.steps
            start_row = work.start_q + w * WGMMA_ROWS
            has_masked = not (isinstance(masked_steps, int) and masked_steps == 0)
            sink = None if sink_ref is None else sink_ref[head] * LOG2E

            def softmax(s, x, m_i, masked):
                """Return p, the new maximum, and the factor of what refers to the old one."""
                if masked:
                    position = start_row + work.diagonal
                    s = scaled_scores(s, rule)
                    s = hide_keys(s, position, *keys(x), window_left, window_right)
                return softmax_update(s, m_i, rule, masked, bounded)

            def wait_for_edge(x):
                """Wait for the values of a tile at an edge, which may pass those of a sequence."""
                if waits:
                    slot = (step + x) % num_stages
                    plgpu.barrier_wait(v_full.at[slot])
                    start, end = keys(x)
                    clear_values(v_tiles.tile(slot), end - start)

            def wait_for_values(x, slot):
                """Wait for the values of a tile, unless `wait_for_edge` has."""
                if waits and is_packed:
                    pl.when(x >= end_masked)(lambda: plgpu.barrier_wait(v_full.at[slot]))
                elif waits:
                    plgpu.barrier_wait(v_full.at[slot])

            # Pass over the tiles behind what these rows see.
            skipped = 0
            passes_over = last_first and w < warpgroups - 1
            if passes_over:
                last_key = start_row + WGMMA_ROWS - 1 + work.diagonal + window_right
                skipped = cdiv(keys(program * 0)[0] - last_key, block_kv)
                skipped = jnp.clip(skipped, 0, steps - 1)

            def pass_over(full, empty, in_turn=True):
                @pl.loop(0, skipped)
                def _(x):
                    slot = (step + x) % num_stages
                    begin_products(full.at[slot], in_turn)
                    end_products(in_turn)
                    plgpu.barrier_arrive(empty.at[slot])

            if passes_over:
                pass_over(k_full, k_empty, ping_pong == 2)

            # s = scale · q kᵀ and p of the first tile of keys
            slot = (step + skipped) % num_stages
            plgpu.barrier_wait(q_full.at[w])
            begin_products(k_full.at[slot], ping_pong == 2)

            def first(s_ref):
                add_scores(s_ref, q, k_tiles.tile(slot))
                end_products(ping_pong == 2)
                return s_ref[...]

            s = pl.run_scoped(first, accumulator(WGMMA_ROWS, block_kv))
            plgpu.barrier_arrive(k_empty.at[slot])
            start = float("-inf") if sink is None else sink
            m_i = jnp.full((WGMMA_ROWS,), 0.0 if bounded else start, jnp.float32)
            m_i = plgpu.layout_cast(m_i, WGMMA.reduce(1))
            p, m_i, _ = softmax(s, program * 0 + skipped, m_i, has_masked)
            l_i = add_columns(p)
            p = p.astype(v_ref.dtype)
            acc = zeros(WGMMA_ROWS, padded_columns(head_dim_v))
            if is_packed:
                wait_for_edge(program * 0)
            if passes_over:
                pass_over(v_full, v_empty)

            # Visit the other tiles of keys that these queries see; only edges are masked.
            def visit(x, carry, masked):
                p, m_i, l_i, acc = carry
                slot, previous = (step + x) % num_stages, (step + x - 1) % num_stages

                if is_packed and not masked:
                    wait_for_values(x - 1, previous)
                # Before the accumulator, which the assembler then need not set to 0.
                begin_products(k_full.at[slot])

                def overlap(s_ref, acc_ref):
                    # Start s = scale · q kᵀ, and acc += p v of the tile before.
                    add_scores(s_ref, q, k_tiles.tile(slot))
                    if not is_packed:
                        wait_for_values(x - 1, previous)
                    acc_ref[...] = acc
                    v = v_tiles.tile(previous)
                    add_values(acc_ref, p, v)
                    end_products()
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=len(v.multiplied))
                    s = lax.optimization_barrier(s)
                    plgpu.barrier_arrive(k_empty.at[slot])
                    # p = exp(s - max)
                    p_new, m_new, alpha = softmax(s, x, m_i, masked)
                    p_new, m_new, sums, alpha = lax.optimization_barrier(
                        (p_new, m_new, add_columns(p_new), alpha)
                    )
                    finish_before_wait(sums)
                    # Rescale what was accumulated.
                    new = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                    new, _ = lax.optimization_barrier((new, p))
                    plgpu.barrier_arrive(v_empty.at[previous])
                    l_new = l_i
                    if not bounded:
                        new, l_new = rescale(new, l_i, as_rows(alpha, l_i), WGMMA)
                    return p_new.astype(p.dtype), m_new, l_new + sums, new

                carry = pl.run_scoped(
                    overlap, accumulator(WGMMA_ROWS, block_kv), accumulator(*acc.shape)
                )
                if is_packed and masked:
                    wait_for_edge(x)
                return carry

            carry = p, m_i, l_i, acc
            second = end_masked = skipped + 1
            if has_masked:
                end_masked = jnp.clip(masked_steps, second, steps)
                masked = functools.partial(visit, masked=True)
                carry = lax.fori_loop(second, end_masked, masked, carry)
            carry = lax.fori_loop(end_masked, steps, functools.partial(visit, masked=False), carry)
            p, m_i, l_i, acc = carry

            # acc += p v of the last tile
            plgpu.barrier_arrive(q_empty.at[w])
            slot = (step + steps - 1) % num_stages
            wait_for_values(steps - 1, slot)
            begin_products(None, ping_pong == 2)

            def last(acc_ref):
                acc_ref[...] = acc
                add_values(acc_ref, p, v_tiles.tile(slot))
                end_products(ping_pong == 2)
                # Add the row sums of each quad, and store lse.
                total, m_end, alpha = l_i.sum(axis=1), m_i, 1.0
                if bounded:
                    m_end = jnp.where(total == 0.0, float("-inf"), 0.0)
                    num_keys = work.keys(program * 0)[1] if is_packed else seq_kv
                    factor = rounding_of_one_key(
                        total, start_row + work.diagonal, num_keys, window_left, window_right,
                        v_ref.dtype,
                    )  # fmt: skip
                    if sink is not None:
                        m_end = jnp.maximum(m_end, sink)
                        alpha = jnp.exp2(-jnp.maximum(m_end, 0.0))
                        total = total * alpha
                    alpha = alpha * factor
                if sink is not None:
                    m_safe = jnp.where(m_end == float("-inf"), 0.0, m_end)
                    total = total + jnp.exp2(sink - m_safe)
                l_safe = jnp.where(total == 0.0, 1.0, total)
                lse = m_end * LN2 + jnp.log(l_safe)
                num_rows = work.end_q if is_packed or seq_q % block_q else None
                store_row_values(lse, lse_ref, batch, head, start_row, num_rows, WGMMA.reduce(1))
                return wait_for(acc_ref, 0, p), alpha / l_safe

            acc, factor = pl.run_scoped(last, accumulator(*acc.shape))
            plgpu.barrier_arrive(v_empty.at[slot])

            # Normalise and store.
            out = acc * as_rows(factor, acc)
            for i, size in enumerate(out_sizes):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                matrix, first = out_ref, sum(out_sizes[:i])
                part = out[:, first : first + padded_columns(size)]
                if len(out_sizes) > 1:
                    matrix = out_ref.at[:, :, :, pl.ds(first, size)]
                if is_packed:
                    tile = out_tiles[w][i].at[0]
                    store_rows_of_tile(part, tile, matrix, batch, head, start_row, work.end_q)
                else:
                    tile = Tiles(*out_tiles[w][2 * i : 2 * i + 2])
                    store_tile(part, tile, matrix, batch, head, start_row)
            return step + steps

        for_each(compute, lambda: own_item(hand_over))
        plgpu.wait_smem_to_gmem(0)

    run_warpgroups(warpgroups, consume, produce)


def flash_fwd(
    operands: AttentionOperands[Array], spec: AttentionSpec, backend: Backend
) -> tuple[Array, Array]:
    """Call `flash_fwd_kernel`.

    Returns:
        out [B, Sq, Hq, Dv] in q's dtype and lse [B, Hq, Sq] float32; without B for packed
        sequences.
    """
    q, k, v = with_batch(spec, operands.q, operands.k, operands.v)
    dtype, num_sequences = q.dtype, num_sequences_of(spec)
    is_packed = num_sequences is not None  # their tiles begin anywhere
    scores_whole = not is_packed and is_whole(spec.head_dim, spec.seq_q, spec.seq_kv)
    v_whole = not is_packed and is_whole(spec.head_dim_v, spec.seq_kv)
    out_whole = not is_packed and is_whole(spec.head_dim_v, spec.seq_q)

    config = backend.configs(spec)["flash_fwd"]

    def out_views(size):
        if is_packed:
            return (allocate_tile(dtype, 1, WGMMA_ROWS, size),)
        return tile_views(dtype, (WGMMA_ROWS,), size, out_whole)

    def memory(out_sizes):
        warpgroups, stages = config.num_warps // 4 - 1, config.num_stages
        q = tile_views(dtype, (WGMMA_ROWS,), spec.head_dim, scores_whole)
        out = [views for size in out_sizes for views in out_views(size)]
        k = tile_views(dtype, (stages, config.block_kv), spec.head_dim, scores_whole)
        v = tile_views(dtype, (stages, config.block_kv), spec.head_dim_v, v_whole)
        if is_packed or (spec.head_dim_v > LARGE_HEAD and not v_whole):
            v = value_views(dtype, stages, config.block_kv, spec.head_dim_v)
        q_full, k_full, v_full = (
            plgpu.Barrier(num_arrivals=count_boxes(views), num_barriers=count)
            for views, count in ((q, warpgroups), (k, stages), (v, stages))
        )
        return {
            "q_and_out": [[plgpu.RefUnion(*x) for _ in range(warpgroups)] for x in (q, out)],
            "k_tiles": plgpu.RefUnion(*k),
            "v_tiles": plgpu.RefUnion(*v),
            "q_full": q_full,
            "q_empty": plgpu.Barrier(num_barriers=warpgroups),
            "k_full": k_full,
            "k_empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            "v_full": v_full,
            "v_empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            "hand_over": allocate_hand_over(warpgroups) if is_packed else None,
        }

    # Of large heads there is no room for all columns of out at a time.
    size_v = spec.head_dim_v
    for most in (size_v, 128, 64):
        out_sizes = tuple(min(most, size_v - first) for first in range(0, size_v, most))
        if size_of(memory(out_sizes)) <= SHARED_MEMORY_LIMIT["sm90"]:
            break
    programs = num_sms(backend.target)
    if is_packed:
        num_tiles = count_sequence_tiles(spec.seq_q, num_sequences, config.block_q)
        schedule = min(num_tiles * spec.heads_q, programs)
    else:
        schedule = make_schedule(
            spec,
            config.block_q,
            config.block_kv,
            programs,
            one_round=max(spec.head_dim, spec.head_dim_v) > LARGE_HEAD,
        )
    out, lse, *_counter = launch(
        "flash_fwd",
        flash_fwd_kernel,
        (
            q,
            k,
            v,
            operands.sinks,
            *(offsets_of(operands) or (None, None)),
            *(lists_of_keys(operands) or (None, None)),
        ),
        schedule,
        (
            jax.ShapeDtypeStruct((*q.shape[:3], spec.head_dim_v), dtype),
            jax.ShapeDtypeStruct((spec.batch, spec.heads_q, spec.seq_q), jnp.float32),
            item_counter() if is_packed else None,
        ),
        memory(out_sizes),
        spec,
        config,
        num_sums=int(is_packed),
        num_sequences=num_sequences,
        out_sizes=out_sizes,
        **list_arguments(spec),
    )
    return without_batch(spec, out, lse)
