"""Flash attention, forward, for SM80.

The running maximum of a row, the reference of p, l_i and acc, is updated only when a score is more
than 2^RESCALE_ABOVE above it (Zadouri et al. 2026, FlashAttention-4, conditional rescaling). p is
then at most 2^RESCALE_ABOVE, with the same relative precision, and out and lse do not change. A
warp skips the multiplication of acc where its rows need none.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import warpgroup_barrier
from pallas_attn.kernels.explicit.cp_async import (
    Head,
    allocate_tile,
    commit,
    fetch_tile,
    fills_tiles,
    padded_columns,
    store_rows,
    tile_transforms,
    wait,
)
from pallas_attn.kernels.explicit.mma import add_product, load_left, zeros
from pallas_attn.kernels.explicit.mma_launch import launch
from pallas_attn.kernels.explicit.mma_pairs import own_queries, pair_scores, tiles_of_keys
from pallas_attn.kernels.explicit.registers import as_rows
from pallas_attn.kernels.explicit.rows import store_row_values
from pallas_attn.kernels.explicit.softmax import online_softmax_update
from pallas_attn.kernels.library.schedule import last_heads
from pallas_attn.kernels.library.sequences import (
    count_sequence_tiles,
    offsets_of,
    with_batch,
    without_batch,
)
from pallas_attn.kernels.library.softmax import LOG2E, row_statistics
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.sm80 import PROGRAMS_OF_SM


def flash_fwd_kernel(
    q_ref,
    k_ref,
    v_ref,
    sink_ref,
    offsets,
    out_ref,
    lse_ref,
    q_and_out_tiles,
    k_tiles,
    v_tiles,
    *,
    group_size,
    seq_q,
    seq_kv,
    rule,
    window,
    head_dim,
    head_dim_v,
    block_q,
    block_kv,
    num_warps,
    num_stages,
    q_in_registers,
    together,
):
    """One program computes block_q rows of one query head; its warps share the tiles of keys.

    Operands as in the portable kernel, of all heads and batch elements. Shared memory holds a tile
    of q, and num_stages tiles of k and of v. together: of `longest_first`, as a function of a
    head's tiles. Each group of four warps has block_q · 4 / num_warps rows, a multiple of 64. Loop
    invariant: m_i is at most RESCALE_ABOVE below the row maximum so far (base 2), and with p =
    exp2(s · exp2_scale - m_i), l_i holds Σ p as 8 partial sums a row and acc is Σ p v.
    """
    # Locate the tile of queries.
    rows = own_queries(offsets, q_ref, seq_q, seq_kv, block_q, num_warps, together)
    batch, head, warpgroup, warpgroups = rows.batch, rows.head, rows.warpgroup, rows.warpgroups
    layout = plgpu.Layout.MMA_ACC(q_ref.dtype)
    q = Head(q_ref, batch, head, rows.end)
    of_keys = batch, head // group_size, rows.first_other + rows.size_other
    k, v = Head(k_ref, *of_keys), Head(v_ref, *of_keys)
    fills_q, fills_kv = fills_tiles(rows.end, block_q), fills_tiles(rows.size_other, block_kv)
    steps = tiles_of_keys(rows, window, block_kv)

    def fetch(source, tiles, step, slot):
        start = steps.fetched(step)
        fetch_tile(source, tiles.at[slot], start, block_kv, warpgroup, warpgroups, fills_kv)

    def fetch_next(step, slot, *pairs):

        @pl.when(step + 1 < steps.count)
        def _():
            for source, tiles in pairs:
                fetch(source, tiles, step + 1, slot)

        commit()

    # Start to fetch the queries and the first keys.
    q_tile, out_tile = (tiles.at[warpgroup] for tiles in q_and_out_tiles)
    fetch_tile(q, q_tile, rows.part, rows.size, all_exist=fills_q)
    commit()
    first = batch * 0
    fetch(k, k_tiles, first, 0)
    if num_stages == 2:
        fetch(v, v_tiles, first, 0)
    commit()
    q_operand = q_tile
    if q_in_registers:
        wait(1, warpgroups)
        q_operand = load_left(q_tile)

    # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
    def visit(step, carry, masked):
        m_i, l_i, acc = carry
        # Wait for the keys; fetch the values (num_stages 1), or the next keys and values.
        wait(0, warpgroups)
        slot = 0
        if num_stages == 1:
            fetch(v, v_tiles, step, 0)
            commit()
        else:
            slot = step % 2
            fetch_next(step, 1 - slot, (k, k_tiles), (v, v_tiles))
        # s = scale · q kᵀ
        start_kv, end = steps.start(step), None if fills_kv else rows.size_other
        s, _ = pair_scores(
            q_operand, k_tiles.at[slot], head_dim, rows, start_kv, end, rule, window, masked
        )
        # Wait for the values; fetch the next keys.
        if num_stages == 1:
            wait(0, warpgroups)
            fetch_next(step, 0, (k, k_tiles))
        # p = exp(s - max), and rescale what was accumulated
        p, m_i, l_i, (acc,) = online_softmax_update(
            s, m_i, l_i, [acc], rule.exp2_scale, layout, masked
        )
        # acc += p v
        acc = add_product(acc, p, v_tiles.at[slot])
        return m_i, l_i, acc

    m_i = jnp.full((rows.size,), float("-inf"), jnp.float32)
    if sink_ref is not None:
        # Start the maximum at the sink, so that acc is not rescaled for it at the end.
        sink = sink_ref[head] * LOG2E
        m_i = jnp.maximum(m_i, sink)
    m_i = plgpu.layout_cast(m_i, layout.reduce(1))
    l_i = zeros(rows.size, 8, q_ref.dtype)
    acc = zeros(rows.size, padded_columns(head_dim_v), q_ref.dtype)
    m_i, l_i, acc = steps.walk(visit, (m_i, l_i, acc))
    wait(0, warpgroups)

    # Reduce the row sums over each quad.
    l_i = l_i.sum(axis=1)

    # Normalise and store.
    if sink_ref is not None:
        m_safe = jnp.where(m_i == float("-inf"), 0.0, m_i)
        l_i = l_i + jnp.exp2(sink - m_safe)
    l_safe, lse = row_statistics(m_i, l_i)
    place = batch, head, rows.part, None if fills_q else rows.end
    store_row_values(lse, lse_ref, *place, layout.reduce(1))
    out = acc * as_rows(1.0 / l_safe, acc)
    out_tile[...] = out.astype(out_ref.dtype)
    warpgroup_barrier()
    store_rows(out_tile, tile_transforms(head_dim_v), out_ref, *place)


def flash_fwd(
    operands: AttentionOperands[Array], spec: AttentionSpec, backend: Backend
) -> tuple[Array, Array]:
    q, k, v = with_batch(spec, operands.q, operands.k, operands.v)
    offsets = offsets_of(operands)
    sizes = (spec.head_dim, spec.head_dim_v)

    def tiles(config):
        warpgroups = config.num_warps // 4
        rows = config.block_q // warpgroups
        return (
            plgpu.RefUnion(*(allocate_tile(q.dtype, warpgroups, rows, x) for x in sizes)),
            *(allocate_tile(k.dtype, config.num_stages, config.block_kv, x) for x in sizes),
        )

    def programs(config):
        tiles = count_sequence_tiles(spec.seq_q, offsets.num_sequences, config.block_q)
        return tiles * spec.heads_q * spec.batch

    out, lse = launch(
        "flash_fwd",
        functools.partial(flash_fwd_kernel, together=last_heads(spec, backend, PROGRAMS_OF_SM)),
        programs,
        (q, k, v, operands.sinks, offsets),
        (
            jax.ShapeDtypeStruct((*q.shape[:3], spec.head_dim_v), q.dtype),
            jax.ShapeDtypeStruct((spec.batch, spec.heads_q, spec.seq_q), jnp.float32),
        ),
        tiles,
        spec,
        backend,
    )
    return without_batch(spec, out, lse)
