"""Flash attention, backward.

With p recomputed from lse, ``dp = dout vᵀ`` and ``delta = rowsum(dout ∘ out) - dlse``:
``ds = p ∘ (dp - delta) ∘ dcap``, where dcap is the softcap's derivative, ``dq = scale · ds k``,
``dk = scale · dsᵀ q``, ``dv = pᵀ dout``. A sink is a score without a value, so its dp is 0.
Dao 2023, FlashAttention-2, algorithm 2. dq is computed in one of two ways. Its own kernel makes
the same bits every time, with seven products in all. Or the kernel of dk and dv adds it up in
float32, in any order, with five.
"""

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
from pallas_attn.kernels.explicit.mma_scores import visible_scores
from pallas_attn.kernels.explicit.mma_sums import add_to_sums, read_sums
from pallas_attn.kernels.explicit.passes import Sums, postprocess, preprocess
from pallas_attn.kernels.explicit.registers import as_columns, as_rows, iota
from pallas_attn.kernels.explicit.rows import load_vector
from pallas_attn.kernels.explicit.sequences import locate_tile
from pallas_attn.kernels.explicit.steps import step_start
from pallas_attn.kernels.gradients import Inputs, make_flash_bwd
from pallas_attn.kernels.library.schedule import last_heads, longest_first
from pallas_attn.kernels.library.sequences import (
    count_sequence_tiles,
    first_tile,
)
from pallas_attn.kernels.library.tiles import ROW_PADDING, visible_tiles
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

    Operands: q and dq [B, Sq, Hq, D], k [B, Skv, Hkv, D], v [B, Skv, Hkv, Dv], dout [B, Sq, Hq,
    Dv]; lse2 and delta [B, Hq, Sq rounded up to ROW_PADDING] float32. lse2 is in base 2, and +inf
    where a row saw no key or does not exist. Shared memory holds a tile of q and of dout, and
    num_stages tiles of k and of v (1: the next tiles are fetched at the end of a step; 2: during
    the whole step). Grid, rule, together: as in `flash_fwd_kernel`. Packed sequences: as there,
    with lse2 and delta of `preprocess`. Loop invariant: dq is Σ ds k over the keys so far.
    Accumulation: float32, exponents in base 2, ds cast to k's dtype for ds·k. A row that sees no
    key gives 0.
    """
    # Locate the tile of queries.
    warpgroups = num_warps // 4
    warpgroup = lax.axis_index("warpgroup") if warpgroups > 1 else 0
    program = lax.axis_index("program")
    heads_q = q_ref.shape[2]
    num_tiles = count_sequence_tiles(seq_q, offsets.num_sequences, block_q)
    num_heads = q_ref.shape[0] * heads_q
    index, tile = longest_first(program, num_tiles, num_heads, together(num_tiles))
    sequence, first_q, start_q, seq_q, first_kv, seq_kv = locate_tile(
        *offsets, tile, seq_q, seq_kv, block_q
    )
    diagonal = seq_kv - seq_q
    first_row = first_tile(first_q, sequence, ROW_PADDING) * ROW_PADDING - first_q
    head = index % heads_q
    batch = index // heads_q
    rows = block_q // warpgroups
    layout = plgpu.Layout.MMA_ACC(q_ref.dtype)
    start_row = start_q + warpgroup * rows
    head_kv = head // group_size
    q, dout = (Head(ref, batch, head, seq_q) for ref in (q_ref, dout_ref))
    k, v = (Head(ref, batch, head_kv, first_kv + seq_kv) for ref in (k_ref, v_ref))
    fills_q, fills_kv = fills_tiles(seq_q, block_q), fills_tiles(seq_kv, block_kv)
    visible = visible_tiles(
        start_q, seq_q, seq_kv, diagonal, window.left, window.right, block_q, block_kv
    )
    _begin, before, full, after = visible
    steps = before + full + after
    last_start = pl.cdiv(seq_kv, block_kv) * block_kv - block_kv

    def fetch(step, slot):
        """Fetch the keys and values of a step; a program without steps fetches any tile."""
        start = step_start(step, visible, block_kv)
        if offsets.num_sequences is None and window != Window():
            start = jnp.clip(start, 0, last_start)
        start = first_kv + start
        for source, tiles in ((k, k_tiles), (v, v_tiles)):
            fetch_tile(source, tiles.at[slot], start, block_kv, warpgroup, warpgroups, fills_kv)

    def fetch_next(step, slot):
        """Fetch the keys and values of the next step, if there is one."""
        pl.when(step + 1 < steps)(lambda: fetch(step + 1, slot))
        commit()

    # Start to fetch q, dout, lse2, delta, and the first keys and values.
    q_tile, dout_tile = q_tile.at[warpgroup], dout_tile.at[warpgroup]
    fetch_tile(q, q_tile, start_row, rows, all_exist=fills_q)
    fetch_tile(dout, dout_tile, start_row, rows, all_exist=fills_q)
    fetch(program * 0, 0)
    commit()
    lse2, delta = (
        load_vector(ref.at[batch, head, pl.ds(first_row + start_row, rows)], layout.reduce(1))
        for ref in (lse2_ref, delta_ref)
    )

    # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
    def visit(step, dq, masked):
        start_kv = step_start(step, visible, block_kv)
        # Wait for the keys and values; fetch the next ones.
        wait(0, warpgroups)
        slot = 0
        if num_stages == 2:
            slot = step % 2
            fetch_next(step, 1 - slot)
        # s = scale · q kᵀ
        s = product_scores(q_tile, k_tiles.at[slot], head_dim)
        position = key = None
        if masked:
            position = iota(s.shape, 0, layout) + (start_row + diagonal)
            key = iota(s.shape, 1, layout) + start_kv
        end = None if fills_kv else seq_kv
        s, dcap = visible_scores(s, position, key, end, rule, window, masked, layout)
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

    dq = zeros(rows, padded_columns(head_dim), q_ref.dtype)
    for masked, lower, upper in ((True, 0, before + after), (False, before + after, steps)):
        if not (isinstance(upper, int) and lower == upper):
            dq = lax.fori_loop(lower, upper, functools.partial(visit, masked=masked), dq)
    wait(0, warpgroups)

    # Scale and store.
    q_tile[...] = (dq * rule.scale).astype(dq_ref.dtype)
    warpgroup_barrier()
    num_rows = None if fills_q else seq_q
    store_rows(q_tile, tile_transforms(head_dim), dq_ref, batch, head, start_row, num_rows)


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

    Operands and packed sequences as in `flash_bwd_dq_kernel`, dk and dv like k and v. dq_sum is
    None, or dq's float32 sums in the order of `add_to_sums`, 0 at first, with the rows of lse2. The
    program adds ds k to them; the order of these additions is not fixed. Shared memory holds a tile
    of k and of v, num_stages tiles of q and of dout (1: the next dout is fetched after dv, and the
    next q after dk; 2: both during the whole step), and what p and ds need. Grid: (key tiles · kv
    heads · batch), in the order of `longest_first`. Tiles of s, p, dp, ds are transposed (keys
    down, queries across). Loop invariant: dk is Σ dsᵀ q and dv is Σ pᵀ dout over the query heads
    and queries so far. Accumulation: float32, exponents in base 2, p and ds cast to the inputs'
    dtype for their products. A key that no query sees gives 0.

    Where each warp can have 32 rows, it has them whole, so p and ds are left operands in the
    registers where they were computed. Otherwise two warps share 32 rows, each with half of the
    columns, and p and ds go through shared memory. This reads less shared memory than 16 whole rows
    a warp.
    """
    k_tiles, v_tiles, q_tiles, dout_tiles, p_tiles, ds_tiles = tiles
    # Locate the tile of keys.
    warpgroups = num_warps // 4
    warpgroup = lax.axis_index("warpgroup") if warpgroups > 1 else 0
    program = lax.axis_index("program")
    heads_kv = k_ref.shape[2]
    num_tiles = count_sequence_tiles(seq_kv, offsets.num_sequences, block_kv)
    num_heads = q_ref.shape[0] * heads_kv
    index, tile = longest_first(program, num_tiles, num_heads, together(num_tiles))
    tile = num_tiles - 1 - tile  # the first keys have the most queries
    sequence, _first_kv, start_kv, seq_kv, first_q, seq_q = locate_tile(
        *reversed(offsets), tile, seq_kv, seq_q, block_kv
    )
    diagonal = seq_kv - seq_q
    first_row = first_tile(first_q, sequence, ROW_PADDING) * ROW_PADDING
    fills_q, fills_kv = fills_tiles(seq_q, block_q), fills_tiles(seq_kv, block_kv)
    head_kv = index % heads_kv
    batch = index // heads_kv
    rows = block_kv // warpgroups
    columns = block_q // warpgroups
    p_in_registers = p_tiles is None
    m_warps = 4 if p_in_registers else 2
    layout = plgpu.Layout.MMA_ACC(k_ref.dtype, m_warps=m_warps)
    start_row = start_kv + warpgroup * rows
    visible = visible_tiles(
        start_kv, seq_kv, seq_q, -diagonal, window.right, window.left, block_kv, block_q
    )
    end = None
    if dq_sum_ref is not None and not fills_kv:
        # Hide missing keys in every tile: dq multiplies their ds by 0, so it must be finite.
        end = seq_kv - diagonal
        visible = visible.mask_all(start_kv + block_kv > seq_kv)
    _begin, before, full, after = visible
    steps = before + full + after
    last_start = pl.cdiv(seq_q, block_q) * block_q - block_q

    of_q, of_dout = (q_ref, q_tiles), (dout_ref, dout_tiles)

    def fetch(operands, member, step, slot):
        """Fetch a step's rows of q, dout or both; a program without steps fetches any tile."""
        head = head_kv * group_size + member
        start = step_start(step, visible, block_q)
        if offsets.num_sequences is None and window != Window():
            start = jnp.clip(start, 0, last_start)
        start = first_q + start
        for ref, tiles in operands:
            source = Head(ref, batch, head, first_q + seq_q)
            fetch_tile(source, tiles.at[slot], start, block_q, warpgroup, warpgroups, fills_q)

    def fetch_next(operands, member, step, slot):
        """Fetch the rows of the next step, if there is one."""
        is_last = step + 1 == steps
        next_member = jnp.where(is_last, member + 1, member)
        next_step = jnp.where(is_last, 0, step + 1)
        pl.when(next_member < group_size)(lambda: fetch(operands, next_member, next_step, slot))
        commit()

    def store(x, tiles):
        """Store this warpgroup's rows of pᵀ or dsᵀ, split by the warpgroups' columns."""
        for w in range(warpgroups):
            part = x[:, w * columns : (w + 1) * columns]
            tiles[warpgroup * warpgroups + w] = part.astype(tiles.dtype)

    def add_stored(acc, tiles, b):
        """Return acc + x · b, where x is what this warpgroup stored."""
        for w in range(warpgroups):
            part = b.at[pl.ds(w * columns, columns)]
            acc = add_product_shared(acc, tiles.at[warpgroup * warpgroups + w], part)
        return acc

    # Start to fetch the keys, the values and the first queries.
    k_tile, v_tile = k_tiles.at[warpgroup], v_tiles.at[warpgroup]
    k, v = (Head(ref, batch, head_kv, seq_kv) for ref in (k_ref, v_ref))
    fetch_tile(k, k_tile, start_row, rows, all_exist=fills_kv)
    fetch_tile(v, v_tile, start_row, rows, all_exist=fills_kv)
    first = program * 0
    fetch((of_q, of_dout), first, first, 0)
    commit()

    # Visit the tiles of queries that see these keys; only tiles at the edges are masked.
    def visit(step, carry, member, masked):
        dk, dv = carry
        head = head_kv * group_size + member
        start_q = step_start(step, visible, block_q)
        # Wait for the queries and dout; fetch the next ones.
        wait(0, warpgroups)
        slot = 0
        if num_stages == 2:
            slot = (member * steps + step) % 2
            fetch_next((of_q, of_dout), member, step, 1 - slot)
        lse2, delta = (
            load_vector(ref.at[batch, head, pl.ds(first_row + start_q, block_q)], layout.reduce(0))
            for ref in (lse2_ref, delta_ref)
        )
        # sᵀ = scale · k qᵀ
        s = product_scores(k_tile, q_tiles.at[slot], head_dim, m_warps)
        position = key = None
        if masked:
            position = iota(s.shape, 1, layout) + start_q
            key = iota(s.shape, 0, layout) + (start_row - diagonal)  # in query coordinates
        s, dcap = visible_scores(s, position, key, end, rule, window, masked, layout)
        # pᵀ = exp(sᵀ - lse)
        p = jnp.exp2(s * rule.exp2_scale - as_columns(lse2, s, layout))
        # dpᵀ = v doutᵀ
        dp = product_scores(v_tile, dout_tiles.at[slot], head_dim_v, m_warps)
        # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
        ds = p * (dp - as_columns(delta, dp, layout)) * dcap
        if not p_in_registers:
            store(p, p_tiles)
        if ds_tiles is not None:
            store(ds, ds_tiles)
            program_barrier(warpgroups)
        # dv += pᵀ dout
        if p_in_registers:
            dv = add_product(dv, p, dout_tiles.at[slot])
        else:
            dv = add_stored(dv, p_tiles, dout_tiles.at[slot])
        if num_stages == 1:
            # Fetch the next dout.
            program_barrier(warpgroups)
            fetch_next((of_dout,), member, step, 0)
        # dk += dsᵀ q
        if p_in_registers:
            dk = add_product(dk, ds, q_tiles.at[slot])
        else:
            dk = add_stored(dk, ds_tiles, q_tiles.at[slot])
        if num_stages == 1:
            # Fetch the next queries.
            program_barrier(warpgroups)
            fetch_next((of_q,), member, step, 0)
        if dq_sum_ref is not None:
            # dq += ds k
            of_columns = [ds_tiles.at[w * warpgroups + warpgroup].T for w in range(warpgroups)]
            row = first_row + start_q + warpgroup * columns
            width = dq_columns(head_dim, window)
            add_dq(of_columns, k_tiles, width, dq_sum_ref, batch, head, row)
        return dk, dv

    def visit_head(member, carry):
        for masked, lower, upper in ((True, 0, before + after), (False, before + after, steps)):
            if not (isinstance(upper, int) and lower == upper):
                body = functools.partial(visit, member=member, masked=masked)
                carry = lax.fori_loop(lower, upper, body, carry)
        return carry

    carry = tuple(
        zeros(rows, padded_columns(size), k_ref.dtype, m_warps) for size in (head_dim, head_dim_v)
    )
    if group_size == 1:
        dk, dv = visit_head(first, carry)
    else:
        dk, dv = lax.fori_loop(first, group_size, visit_head, carry)
    wait(0, warpgroups)

    # Scale and store.
    k_tile[...] = (dk * rule.scale).astype(dk_ref.dtype)
    v_tile[...] = dv.astype(dv_ref.dtype)
    warpgroup_barrier()
    num_rows = None if fills_kv else seq_kv
    for tile, ref, size in ((k_tile, dk_ref, head_dim), (v_tile, dv_ref, head_dim_v)):
        store_rows(tile, tile_transforms(size), ref, batch, head_kv, start_row, num_rows)


def dq_columns(size, window):
    """Return how many of dq's `size` columns to multiply at a time.

    That is all of them where parts were not faster or were not timed: `docs/history/sm80.md`.
    """
    has_parts = size > 128 or (size > 96 and window != Window())
    return 64 if has_parts else padded_columns(size)


def add_dq(ds_tiles, k_tiles, width, sums_ref, *place):
    """Add ds k to the sums of dq, adding some columns while multiplying others.

    Args:
        ds_tiles: tiles of dsᵀ with queries down, one for the keys of each tile of k.
        k_tiles: [tiles, keys, columns].
        width: how many columns to multiply at a time.
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
    """Call `flash_bwd_dq_kernel`; return dq."""
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
    """Compute lse2 and delta."""
    lse2, delta, _none = preprocess(sources, mask.offsets.cu_seqlens_q, SUMS, has_sums=False)
    return lse2, delta


def launch_fused(sources, spec, backend, mask):
    """Call `flash_bwd_dkdv_kernel` with sums for dq; return dq, dk, dv, lse2 and delta."""
    q, k, v, dout, *_ = sources
    cu_seqlens_q = mask.offsets.cu_seqlens_q
    lse2, delta, dq_sum = preprocess(sources, cu_seqlens_q, SUMS, has_sums=True)
    inputs = Inputs(q, k, v, dout, lse2, delta)
    dk, dv, dq_sum = launch_dkdv(inputs, spec, backend, mask, "flash_bwd_fused", dq_sum)
    dq = postprocess(dq_sum, q, SUMS, spec.scale, cu_seqlens_q)
    return dq, dk, dv, lse2, delta


def launch_dkdv(inputs, spec, backend, mask, name="flash_bwd_dkdv", dq_sum=None):
    """Call `flash_bwd_dkdv_kernel`; return dk and dv, and the sums of dq if they are given."""
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
