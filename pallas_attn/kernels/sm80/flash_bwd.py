"""Flash attention, backward, for SM80, in the ways of its twin."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import program_barrier, warpgroup_barrier
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
from pallas_attn.kernels.explicit.lowering import SM80Params
from pallas_attn.kernels.explicit.mma import (
    CHUNK,
    add_chunks,
    add_product,
    add_product_shared,
    chunks,
    load_left,
    product_scores,
    zeros,
)
from pallas_attn.kernels.explicit.mma_launch import launch
from pallas_attn.kernels.explicit.mma_pairs import (
    own_keys,
    own_queries,
    pair_scores,
    tiles_of_keys,
    tiles_of_queries,
)
from pallas_attn.kernels.explicit.mma_sums import add_to_sums, read_sums
from pallas_attn.kernels.explicit.passes import Sums, postprocess, preprocess
from pallas_attn.kernels.explicit.registers import as_columns, as_rows
from pallas_attn.kernels.explicit.rows import load_vector
from pallas_attn.kernels.gradients import Inputs, make_flash_bwd
from pallas_attn.kernels.library.schedule import last_heads
from pallas_attn.kernels.library.sequences import count_sequence_tiles
from twin_attention.contract.spec import Window
from twin_attention.targets.sm80 import PROGRAMS_OF_SM

SUMS = Sums(SM80Params, padded_columns, read_sums)


def flash_bwd_dq_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    offsets,
    dq_ref,
    q_tile,
    dout_tile,
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
    together,
):
    """One program computes block_q rows of dq of one query head.

    Operands as in the portable kernel, of all heads and batch elements. Shared memory holds a tile
    of q and of dout, and num_stages tiles of k and of v (1: the next tiles are fetched at the end
    of a step; 2: during the whole step).
    """
    # Locate the tile of queries.
    rows = own_queries(offsets, q_ref, seq_q, seq_kv, block_q, num_warps, together)
    batch, head, warpgroup, warpgroups = rows.batch, rows.head, rows.warpgroup, rows.warpgroups
    layout = plgpu.Layout.MMA_ACC(q_ref.dtype)
    q, dout = (Head(ref, batch, head, rows.end) for ref in (q_ref, dout_ref))
    of_keys = batch, head // group_size, rows.first_other + rows.size_other
    k, v = Head(k_ref, *of_keys), Head(v_ref, *of_keys)
    fills_q, fills_kv = fills_tiles(rows.end, block_q), fills_tiles(rows.size_other, block_kv)
    steps = tiles_of_keys(rows, window, block_kv)

    def fetch(step, slot):
        start = steps.fetched(step)
        for source, tiles in ((k, k_tiles), (v, v_tiles)):
            fetch_tile(source, tiles.at[slot], start, block_kv, warpgroup, warpgroups, fills_kv)

    def fetch_next(step, slot):
        pl.when(step + 1 < steps.count)(lambda: fetch(step + 1, slot))
        commit()

    # Start to fetch q, dout, lse2, delta, and the first keys and values.
    q_tile, dout_tile = q_tile.at[warpgroup], dout_tile.at[warpgroup]
    fetch_tile(q, q_tile, rows.part, rows.size, all_exist=fills_q)
    fetch_tile(dout, dout_tile, rows.part, rows.size, all_exist=fills_q)
    fetch(batch * 0, 0)
    commit()
    own = pl.ds(rows.padded + rows.part, rows.size)
    lse2, delta = (
        load_vector(ref.at[batch, head, own], layout.reduce(1)) for ref in (lse2_ref, delta_ref)
    )

    # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
    def visit(step, dq, masked):
        # Wait for the keys and values; fetch the next ones.
        wait(0, warpgroups)
        slot = 0
        if num_stages == 2:
            slot = step % 2
            fetch_next(step, 1 - slot)
        # s = scale · q kᵀ
        start_kv, end = steps.start(step), None if fills_kv else rows.size_other
        s, dcap = pair_scores(
            q_tile, k_tiles.at[slot], head_dim, rows, start_kv, end, rule, window, masked
        )
        # p = exp(s - lse)
        p = jnp.exp2(s * rule.exp2_scale - as_rows(lse2, s))
        # dp = dout vᵀ
        dp = product_scores(dout_tile, v_tiles.at[slot], head_dim_v)
        # ds = p ∘ (dp - delta) ∘ dcap
        ds = p * (dp - as_rows(delta, dp)) * dcap
        # dq += ds k
        dq = add_product(dq, ds, k_tiles.at[slot])
        if num_stages == 1:
            # Fetch the next keys and values.
            program_barrier(warpgroups)
            fetch_next(step, 0)
        return dq

    dq = steps.walk(visit, zeros(rows.size, padded_columns(head_dim), q_ref.dtype))
    wait(0, warpgroups)

    # Scale and store.
    q_tile[...] = (dq * rule.scale).astype(dq_ref.dtype)
    warpgroup_barrier()
    num_rows = None if fills_q else rows.end
    store_rows(q_tile, tile_transforms(head_dim), dq_ref, batch, head, rows.part, num_rows)


class Tiles(NamedTuple):
    """Tiles of `flash_bwd_dkdv_kernel` in shared memory.

    Attributes:
        k, v: one tile for each warpgroup.
        q, dout: one tile for each stage.
        p, ds: each warpgroup's parts of pᵀ and of dsᵀ; None where they stay in registers.
    """

    k: Any
    v: Any
    q: Any
    dout: Any
    p: Any
    ds: Any


def flash_bwd_dkdv_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    offsets,
    dk_ref,
    dv_ref,
    dq_sum_ref,
    tiles,
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
    together,
):
    """One program computes block_kv rows of dk and dv of one kv head, summed over its query heads.

    Operands as in `flash_bwd_dq_kernel`, dk and dv like k and v. dq_sum is None, or dq's float32
    sums in the order of `add_to_sums`, 0 at first, with the rows of lse2; the order of the
    additions is not fixed. num_stages 1: the next dout is fetched after dv, and the next q after
    dk; 2: both during the whole step.

    p and ds stay in registers if a warp can have 32 whole rows, as in the twin.
    """
    k_tiles, v_tiles, q_tiles, dout_tiles, p_tiles, ds_tiles = tiles
    # Locate the tile of keys.
    rows = own_keys(offsets, k_ref, seq_q, seq_kv, block_kv, num_warps, together)
    batch, head_kv, warpgroup, warpgroups = rows.batch, rows.head, rows.warpgroup, rows.warpgroups
    fills_q, fills_kv = fills_tiles(rows.size_other, block_q), fills_tiles(rows.end, block_kv)
    columns = block_q // warpgroups
    p_in_registers = p_tiles is None
    m_warps = 4 if p_in_registers else 2
    layout = plgpu.Layout.MMA_ACC(k_ref.dtype, m_warps=m_warps)
    # Hide missing keys in every tile: dq multiplies their ds by 0, so it must be finite.
    hide_missing = dq_sum_ref is not None and not fills_kv
    end = rows.end + rows.diagonal if hide_missing else None
    steps = tiles_of_queries(rows, window, block_q, hide_missing)
    of_q, of_dout = (q_ref, q_tiles), (dout_ref, dout_tiles)

    def fetch(operands, member, step, slot):
        head, start = head_kv * group_size + member, steps.fetched(step)
        for ref, tiles in operands:
            source = Head(ref, batch, head, rows.first_other + rows.size_other)
            fetch_tile(source, tiles.at[slot], start, block_q, warpgroup, warpgroups, fills_q)

    def fetch_next(operands, member, step, slot):
        is_last = step + 1 == steps.count
        next_member = jnp.where(is_last, member + 1, member)
        next_step = jnp.where(is_last, 0, step + 1)
        pl.when(next_member < group_size)(lambda: fetch(operands, next_member, next_step, slot))
        commit()

    # Start to fetch the keys, the values and the first queries.
    k_tile, v_tile = k_tiles.at[warpgroup], v_tiles.at[warpgroup]
    for ref, tile in ((k_ref, k_tile), (v_ref, v_tile)):
        source = Head(ref, batch, head_kv, rows.end)
        fetch_tile(source, tile, rows.part, rows.size, all_exist=fills_kv)
    first = batch * 0
    fetch((of_q, of_dout), first, first, 0)
    commit()

    # Visit the tiles of queries that see these keys; only tiles at the edges are masked.
    def visit(step, sums, masked, member):
        dk, dv = sums
        head = head_kv * group_size + member
        start_q = steps.start(step)
        # Wait for the queries and dout; fetch the next ones.
        wait(0, warpgroups)
        slot = 0
        if num_stages == 2:
            slot = (member * steps.count + step) % 2
            fetch_next((of_q, of_dout), member, step, 1 - slot)
        own = pl.ds(rows.padded + start_q, block_q)
        lse2, delta = (
            load_vector(ref.at[batch, head, own], layout.reduce(0)) for ref in (lse2_ref, delta_ref)
        )
        # sᵀ = scale · k qᵀ
        s, dcap = pair_scores(
            k_tile, q_tiles.at[slot], head_dim, rows, start_q, end, rule, window, masked, m_warps,
            of_keys=True,
        )  # fmt: skip
        # pᵀ = exp(sᵀ - lse)
        p = jnp.exp2(s * rule.exp2_scale - as_columns(lse2, s, layout))
        # dpᵀ = v doutᵀ
        dp = product_scores(v_tile, dout_tiles.at[slot], head_dim_v, m_warps)
        # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
        ds = p * (dp - as_columns(delta, dp, layout)) * dcap
        if not p_in_registers:
            store_parts(p, p_tiles, warpgroup)
        if ds_tiles is not None:
            store_parts(ds, ds_tiles, warpgroup)
            program_barrier(warpgroups)
        # dv += pᵀ dout
        if p_in_registers:
            dv = add_product(dv, p, dout_tiles.at[slot])
        else:
            dv = add_stored(dv, p_tiles, dout_tiles.at[slot], warpgroup)
        if num_stages == 1:
            # Fetch the next dout.
            program_barrier(warpgroups)
            fetch_next((of_dout,), member, step, 0)
        # dk += dsᵀ q
        if p_in_registers:
            dk = add_product(dk, ds, q_tiles.at[slot])
        else:
            dk = add_stored(dk, ds_tiles, q_tiles.at[slot], warpgroup)
        if num_stages == 1:
            # Fetch the next queries.
            program_barrier(warpgroups)
            fetch_next((of_q,), member, step, 0)
        if dq_sum_ref is not None:
            # dq += ds k
            of_columns = [ds_tiles.at[w * warpgroups + warpgroup].T for w in range(warpgroups)]
            row = rows.padded + start_q + warpgroup * columns
            width = dq_columns(head_dim, window)
            add_dq(of_columns, k_tiles, width, dq_sum_ref, batch, head, row)
        return dk, dv

    def visit_head(member, sums):
        return steps.walk(functools.partial(visit, member=member), sums)

    sums = tuple(
        zeros(rows.size, padded_columns(size), k_ref.dtype, m_warps)
        for size in (head_dim, head_dim_v)
    )
    if group_size == 1:
        dk, dv = visit_head(first, sums)
    else:
        dk, dv = lax.fori_loop(first, group_size, visit_head, sums)
    wait(0, warpgroups)

    # Scale and store.
    k_tile[...] = (dk * rule.scale).astype(dk_ref.dtype)
    v_tile[...] = dv.astype(dv_ref.dtype)
    warpgroup_barrier()
    num_rows = None if fills_kv else rows.end
    for tile, ref, size in ((k_tile, dk_ref, head_dim), (v_tile, dv_ref, head_dim_v)):
        store_rows(tile, tile_transforms(size), ref, batch, head_kv, rows.part, num_rows)


def store_parts(x, tiles, warpgroup):
    """Store a warpgroup's rows of pᵀ or dsᵀ, split by the warpgroups' columns."""
    columns = tiles.shape[2]
    warpgroups = x.shape[1] // columns
    for w in range(warpgroups):
        part = x[:, w * columns : (w + 1) * columns]
        tiles[warpgroup * warpgroups + w] = part.astype(tiles.dtype)


def add_stored(acc, tiles, b, warpgroup):
    """Return acc + x · b, where x is what `store_parts` stored of the warpgroup."""
    columns = tiles.shape[2]
    warpgroups = b.shape[0] // columns
    for w in range(warpgroups):
        part = b.at[pl.ds(w * columns, columns)]
        acc = add_product_shared(acc, tiles.at[warpgroup * warpgroups + w], part)
    return acc


def dq_columns(size, window):
    """Return how many of dq's `size` columns to multiply at a time (`docs/history/sm80.md`)."""
    has_parts = size > 128 or (size > 96 and window != Window())
    return 64 if has_parts else padded_columns(size)


def add_dq(ds_tiles, k_tiles, width, sums_ref, *place):
    """Add ds k to the sums of dq, adding some columns while multiplying `width` others.

    Args:
        ds_tiles: tiles of dsᵀ with queries down, one for the keys of each tile of k.
        k_tiles: [tiles, keys, columns].
        sums_ref, *place: see `add_to_sums`.
    """
    columns = k_tiles.shape[2]
    parts = [(load_left(x, 2) for x in chunks(tile)) for tile in ds_tiles]
    if width < columns:  # each is used several times
        parts = [[*part] for part in parts]
    for first in range(0, columns, width):
        count = min(width, columns - first)
        dq = zeros(ds_tiles[0].shape[0], count, k_tiles.dtype, 2)
        for i, ds in enumerate(parts):
            dq = add_chunks(dq, ds, k_tiles.at[i, :, pl.ds(first, count)])
        add_to_sums(dq, sums_ref, *place, first)


def launch_dq(inputs, spec, backend, mask):
    q, sizes = inputs.q, (spec.head_dim, spec.head_dim_v)

    def tiles(config):
        warpgroups = config.num_warps // 4
        rows = config.block_q // warpgroups
        return (
            *(allocate_tile(q.dtype, warpgroups, rows, x) for x in sizes),
            *(allocate_tile(q.dtype, config.num_stages, config.block_kv, x) for x in sizes),
        )

    def programs(config):
        tiles = count_sequence_tiles(spec.seq_q, mask.offsets.num_sequences, config.block_q)
        return tiles * spec.heads_q * spec.batch

    (dq,) = launch(
        "flash_bwd_dq",
        functools.partial(flash_bwd_dq_kernel, together=last_heads(spec, backend, PROGRAMS_OF_SM)),
        programs,
        (*inputs, mask.offsets),
        (jax.ShapeDtypeStruct(q.shape, q.dtype),),
        tiles,
        spec,
        backend,
    )
    return dq


def launch_preprocess(sources, _spec, _backend, mask):
    lse2, delta, _none = preprocess(sources, mask.offsets.cu_seqlens_q, SUMS, has_sums=False)
    return lse2, delta


def launch_fused(sources, spec, backend, mask):
    q, k, v, dout, *_ = sources
    cu_seqlens_q = mask.offsets.cu_seqlens_q
    lse2, delta, dq_sum = preprocess(sources, cu_seqlens_q, SUMS, has_sums=True)
    inputs = Inputs(q, k, v, dout, lse2, delta)
    dk, dv, dq_sum = launch_dkdv(inputs, spec, backend, mask, "flash_bwd_fused", dq_sum)
    dq = postprocess(dq_sum, q, SUMS, spec.scale, cu_seqlens_q)
    return dq, dk, dv, lse2, delta


def launch_dkdv(inputs, spec, backend, mask, name="flash_bwd_dkdv", dq_sum=None):
    dtype, sizes = inputs.q.dtype, (spec.head_dim, spec.head_dim_v)

    def tiles(config):
        warpgroups = config.num_warps // 4
        rows, columns = config.block_kv // warpgroups, config.block_q // warpgroups
        p_tiles = ds_tiles = allocate_tile(dtype, warpgroups * warpgroups, rows, columns, CHUNK)
        if config.block_kv >= 32 * config.num_warps:
            p_tiles, ds_tiles = None, None if dq_sum is None else ds_tiles
        return (
            Tiles(
                *(allocate_tile(dtype, warpgroups, rows, x) for x in sizes),
                *(allocate_tile(dtype, config.num_stages, config.block_q, x) for x in sizes),
                p_tiles,
                ds_tiles,
            ),
        )

    heads = spec.heads_kv * spec.batch
    summed_heads = None if dq_sum is None else heads
    together = last_heads(spec, backend, PROGRAMS_OF_SM, summed_heads)

    def programs(config):
        tiles = count_sequence_tiles(spec.seq_kv, mask.offsets.num_sequences, config.block_kv)
        return tiles * heads

    return launch(
        name,
        functools.partial(flash_bwd_dkdv_kernel, together=together),
        programs,
        (*inputs, mask.offsets),
        tuple(
            None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
            for x in (inputs.k, inputs.v, dq_sum)
        ),
        tiles,
        spec,
        backend,
        aliased=() if dq_sum is None else (dq_sum,),
    )


flash_bwd = make_flash_bwd(launch_preprocess, launch_dq, launch_dkdv, launch_fused)
