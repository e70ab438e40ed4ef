"""Paged attention of long chunks of new tokens, for SM90.

The same formula as `pallas_attn.kernels.portable.paged_attention`, with the division of work of
`pallas_attn.kernels.sm90.flash_fwd`: one warp loads, with a TMA copy for each page of a tile of
keys, and warpgroups compute. Shah et al. 2024, FlashAttention-3, over the pages of
PagedAttention (Kwon et al. 2023).
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import pass_turn, take_turn
from pallas_attn.kernels.explicit.pages import find_pages, load_pages
from pallas_attn.kernels.explicit.programs import run_warpgroups
from pallas_attn.kernels.explicit.registers import as_rows, iota
from pallas_attn.kernels.explicit.rows import store_rows_of_heads
from pallas_attn.kernels.explicit.sequences import locate_tokens
from pallas_attn.kernels.explicit.softmax import add_columns, rescale
from pallas_attn.kernels.explicit.steps import tile_start
from pallas_attn.kernels.explicit.tma import (
    Tiles,
    clear_values,
    is_whole,
    padded_columns,
    tile_views,
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
from pallas_attn.kernels.explicit.wgmma_launch import launch_programs
from pallas_attn.kernels.explicit.wgmma_scores import hide_keys, scaled_scores, softmax_update
from pallas_attn.kernels.library.pages import keys_of_tokens, share_of_tiles, tiles_at_edges
from pallas_attn.kernels.library.softmax import LN2, LOG2E
from twin_attention.contract.operands import PagedOperands
from twin_attention.contract.paged_spec import PagedSpec
from twin_attention.contract.spec import Window
from twin_attention.targets.family import Backend
from twin_attention.targets.splits import num_row_tiles


def paged_attention_kernel(
    q_ref,
    k_ref,
    v_ref,
    tables_ref,
    lens_ref,
    cu_seqlens_q_ref,
    sinks_ref,
    out_ref,
    lse_ref,
    *,
    q_tiles,
    k_tiles,
    v_tiles,
    q_full,
    k_full,
    k_empty,
    v_full,
    v_empty,
    rule,
    window,
    block_q,
    block_kv,
    num_warps,
    num_stages,
    ping_pong,
):
    """One program computes block_q rows of one kv head of a sequence.

    Rows, and what they see, are those of the portable `paged_attention_kernel`, without splits. The
    warps divide the work as in `pallas_attn.kernels.sm90.flash_fwd`: a producer, and consumers of
    64 rows each, which take turns with ping_pong. The group size is a power of two up to 64, and
    the page size a power of two from 16 on.

    Operands: q [Tq, Hq, D], pools k [P, page_size, Hkv, D] and v [P, page_size, Hkv, Dv]; tables
    [B, max_pages], lens [B] and cu_seqlens_q [B + 1], int32; sinks [Hq] float32 or None; out [Tq,
    Hq, Dv] and lse [Hq, Tq]. Grid: (kv heads, row tiles of `locate_tokens`) in one axis, kv heads
    fastest and the last tiles first, as they see most keys. Loop invariant and accumulation: as in
    `flash_fwd_kernel`.
    """
    warpgroups = num_warps // 4 - 1
    num_pages, page_size, heads_kv, _ = k_ref.shape
    num_sequences, max_pages = tables_ref.shape
    group_size = q_ref.shape[1] // heads_kv
    q_tiles = [Tiles(*tile) for tile in q_tiles]
    k_tiles, v_tiles = Tiles(*k_tiles), Tiles(*v_tiles)

    # Locate the rows, and the keys that they see.
    program = lax.axis_size("program") - 1 - lax.axis_index("program")
    head_kv = lax.rem(program, heads_kv)
    sequence, first_token, tokens, start_row = locate_tokens(
        cu_seqlens_q_ref, lax.div(program, heads_kv), q_ref.shape[0], group_size, block_q
    )
    is_sequence = sequence < num_sequences
    sequence = jnp.minimum(sequence, num_sequences - 1)
    length = jnp.where(is_sequence, jnp.clip(lens_ref[sequence], 0, max_pages * page_size), 0)
    diagonal = length - tokens
    first = lax.div(start_row, group_size)
    last = jnp.minimum(lax.div(start_row + block_q - 1, group_size), tokens - 1)
    begin, end = keys_of_tokens(length, tokens, first, last, window.left)
    first_tile, count, _ = share_of_tiles(begin, end, 0, 1, block_kv)
    visible = tiles_at_edges(
        diagonal + first, diagonal + last, first_tile, count, window.left, block_kv
    )
    # Where no tile is seen, visit one, fully masked.
    steps = jnp.maximum(count, 1)
    end_masked = jnp.clip(visible.before + visible.after, 1, steps)
    last_start = max_pages * page_size

    def key_of(step):
        """Return the first key of a step's tile."""
        of_sequence = visible._replace(begin=first_tile * block_kv)
        return tile_start(step, of_sequence, block_kv, last_start)

    def produce():
        """Load the consumers' tiles as soon as slots are free."""

        def load(pool, tiles, full, empty, step):
            slot, start = lax.rem(step, num_stages), key_of(step)
            pages = find_pages(tables_ref, sequence, start, end, num_pages, page_size, block_kv)
            plgpu.barrier_wait(empty.at[slot])
            load_pages(pool, tiles.tile(slot), pages, start, head_kv, page_size, full.at[slot])

        def load_k(step):
            load(k_ref, k_tiles, k_full, k_empty, step)

        def load_v(step):
            load(v_ref, v_tiles, v_full, v_empty, step)

        load_k(program * 0)
        for w in range(warpgroups):
            token = first_token + first + w * (WGMMA_ROWS // group_size)
            _load_queries(q_ref, q_tiles[w], token, head_kv * group_size, q_full.at[w])

        @pl.loop(1, steps)
        def _(step):
            load_k(step)
            load_v(step - 1)

        load_v(steps - 1)

    def consume(w):
        """Compute the rows of consumer warpgroup w, a Python int: each has its own code."""
        q = q_tiles[w]
        start_token = first + w * (WGMMA_ROWS // group_size)
        position = diagonal + start_token

        # All tiles are free, and the first warpgroup has the first turn.
        for slot in range(num_stages):
            plgpu.barrier_arrive(k_empty.at[slot])
            plgpu.barrier_arrive(v_empty.at[slot])
        if ping_pong and w == warpgroups - 1:
            pass_turn(w, warpgroups)

        sink = None
        m_i = plgpu.layout_cast(
            jnp.full((WGMMA_ROWS,), float("-inf"), jnp.float32), WGMMA.reduce(1)
        )
        if sinks_ref is not None:
            # Start the maximum at the sink, so that acc is not rescaled for it at the end.
            m_i = sink = _sinks_of_rows(sinks_ref, head_kv * group_size, group_size, m_i) * LOG2E

        def softmax(s, step, m_i, masked):
            """Return p, the new maximum, and the factor that rescales acc and l_i."""
            if masked:
                s = scaled_scores(s, rule)
                s = hide_keys(s, position, key_of(step), end, window, group_size)
            return softmax_update(s, m_i, rule, masked, bounded=False)

        def wait_for_values(step):
            """Wait for the values of an edge tile and clear rows past the end of the keys."""
            slot = lax.rem(step, num_stages)
            plgpu.barrier_wait(v_full.at[slot])
            clear_values(v_tiles.tile(slot), end - key_of(step))

        # s = scale · q kᵀ and p of the first tile of keys
        plgpu.barrier_wait(q_full.at[w])
        plgpu.barrier_wait(k_full.at[0])

        def first_scores(s_ref):
            add_scores(s_ref, q, k_tiles.tile(0).cut(q.columns))
            return s_ref[...]

        s = pl.run_scoped(first_scores, accumulator(WGMMA_ROWS, block_kv))
        plgpu.barrier_arrive(k_empty.at[0])
        p, m_i, _ = softmax(s, program * 0, m_i, True)
        l_i = add_columns(p)
        p = p.astype(v_ref.dtype)
        acc = zeros(WGMMA_ROWS, padded_columns(v_ref.shape[3]))
        wait_for_values(program * 0)
        if window.left is not None:
            clear_values(v_tiles.tile(0), begin - first_tile * block_kv, before=True)

        # Visit the other tiles of keys that these rows see; only tiles at the edges are masked.
        def visit(step, carry, masked):
            p, m_i, l_i, acc = carry
            slot, previous = lax.rem(step, num_stages), lax.rem(step - 1, num_stages)
            plgpu.barrier_wait(k_full.at[slot])
            if not masked:
                # Values of edge tiles were already waited for.
                pl.when(step > end_masked)(lambda: plgpu.barrier_wait(v_full.at[previous]))
            if ping_pong:
                take_turn(w, warpgroups)

            def overlap(s_ref, acc_ref):
                # Start s = scale · q kᵀ, and acc += p v of the previous tile.
                add_scores(s_ref, q, k_tiles.tile(slot).cut(q.columns))
                acc_ref[...] = acc
                v = v_tiles.tile(previous)
                add_values(acc_ref, p, v)
                if ping_pong:
                    pass_turn(w, warpgroups)
                s = plgpu.wgmma_accumulator_load(s_ref, wait_n=len(v.multiplied))
                s = lax.optimization_barrier(s)
                plgpu.barrier_arrive(k_empty.at[slot])
                # p = exp(s - max)
                p_new, m_new, alpha = softmax(s, step, m_i, masked)
                p_new, m_new, sums, alpha = lax.optimization_barrier(
                    (p_new, m_new, add_columns(p_new), alpha)
                )
                finish_before_wait(sums)
                # Rescale what was accumulated.
                new = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                new, _ = lax.optimization_barrier((new, p))
                plgpu.barrier_arrive(v_empty.at[previous])
                new, l_new = rescale(new, l_i, as_rows(alpha, l_i), WGMMA)
                return p_new.astype(p.dtype), m_new, l_new + sums, new

            carry = pl.run_scoped(
                overlap, accumulator(WGMMA_ROWS, block_kv), accumulator(*acc.shape)
            )
            if masked:
                wait_for_values(step)
            return carry

        carry = p, m_i, l_i, acc
        carry = lax.fori_loop(1, end_masked, functools.partial(visit, masked=True), carry)
        carry = lax.fori_loop(end_masked, steps, functools.partial(visit, masked=False), carry)
        p, m_i, l_i, acc = carry

        # acc += p v of the last tile
        slot = lax.rem(steps - 1, num_stages)
        pl.when(steps > end_masked)(lambda: plgpu.barrier_wait(v_full.at[slot]))

        def last_values(acc_ref):
            acc_ref[...] = acc
            add_values(acc_ref, p, v_tiles.tile(slot))
            # Reduce the row sums over each quad.
            total = l_i.sum(axis=1)
            if sink is not None:
                m_safe = jnp.where(m_i == float("-inf"), 0.0, m_i)
                total = total + jnp.exp2(sink - m_safe)
            l_safe = jnp.where(total == 0.0, 1.0, total)
            return wait_for(acc_ref, 0, p), m_i * LN2 + jnp.log(l_safe), 1.0 / l_safe

        acc, lse, factor = pl.run_scoped(last_values, accumulator(*acc.shape))

        # Normalise and store.
        store_rows_of_heads(
            acc * as_rows(factor, acc), lse, out_ref, lse_ref, first_token + start_token,
            head_kv * group_size, (tokens - start_token) * group_size, group_size,
        )  # fmt: skip

    has_rows = first < tokens
    run_warpgroups(
        warpgroups,
        lambda w: pl.when(has_rows)(lambda: consume(w)),
        lambda: pl.when(has_rows)(produce),
    )


def _load_queries(q_ref, tile, token, head, barrier):
    """Start to load, by TMA, the rows of tokens from `token` on and heads from `head` on."""
    for piece, columns in zip(tile.copied, tile.columns, strict=True):
        tokens, group_size, width = piece.shape
        first = columns.start + 0 * token  # traced: JAX refuses a static slice past the end
        rows = q_ref.at[pl.ds(token, tokens), pl.ds(head, group_size), pl.ds(first, width)]
        plgpu.copy_gmem_to_smem(rows, piece, barrier)


def _sinks_of_rows(sinks_ref, head, group_size, like):
    """Return the sink of each row's head."""
    of_group = lax.rem(iota(like.shape, 0, WGMMA.reduce(1)), group_size)
    sinks = like
    for i in range(group_size):
        sinks = jnp.where(of_group == i, sinks_ref[head + i], sinks)
    return sinks


def paged_attention(
    operands: PagedOperands[Array], spec: PagedSpec, backend: Backend
) -> tuple[Array, Array]:
    """Call `paged_attention_kernel`.

    Returns:
        out [Tq, Hq, Dv] in q's dtype and lse [Hq, Tq] float32.
    """
    dtype, cache = operands.q.dtype, spec.cache
    config = backend.configs(spec)["paged_attention"]
    warpgroups, stages = config.num_warps // 4 - 1, config.num_stages
    pages = config.block_kv // min(cache.page_size, config.block_kv)
    k, v = (
        tile_views(dtype, (stages, config.block_kv), size, is_whole(size, cache.page_size))
        for size in (spec.head_dim, spec.head_dim_v)
    )
    q = _query_views(dtype, spec.group_size, spec.head_dim)
    memory = {
        "q_tiles": [plgpu.RefUnion(*q) for _ in range(warpgroups)],
        "k_tiles": plgpu.RefUnion(*k),
        "v_tiles": plgpu.RefUnion(*v),
        "q_full": plgpu.Barrier(num_arrivals=len(q[0]), num_barriers=warpgroups),
        "k_full": plgpu.Barrier(num_arrivals=pages * len(k[0]), num_barriers=stages),
        "k_empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=pages * len(v[0]), num_barriers=stages),
        "v_empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    }
    return launch_programs(
        "paged_attention",
        paged_attention_kernel,
        num_row_tiles(spec, config.block_q) * spec.heads_kv,
        operands[: PagedOperands._fields.index("k_scale")],
        (
            jax.ShapeDtypeStruct((spec.tokens, spec.heads_q, spec.head_dim_v), dtype),
            jax.ShapeDtypeStruct((spec.heads_q, spec.tokens), jnp.float32),
        ),
        memory,
        config,
        rule=spec.scores,
        window=Window(spec.bounded_window.left, 0),
        **vars(config),
    )


def _query_views(dtype, group_size, size):
    """Return the types of a tile of queries, `tile_views`; TMA sees tokens of a GQA group."""
    copied, multiplied = tile_views(dtype, (WGMMA_ROWS,), size, False)
    shape = WGMMA_ROWS // group_size, group_size
    copied = tuple(
        plgpu.SMEM((*shape, x.shape[-1]), dtype, transforms=x.transforms) for x in copied
    )
    return copied, multiplied
