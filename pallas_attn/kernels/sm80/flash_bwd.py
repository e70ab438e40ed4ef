"""Flash attention, backward: dq, then dk and dv.

With p recomputed from lse, ``dp = dout vᵀ`` and ``delta = rowsum(dout ∘ out) - dlse``:
``ds = p ∘ (dp - delta) ∘ dcap``, where dcap is the softcap's derivative, ``dq = scale · ds k``,
``dk = scale · dsᵀ q``, ``dv = pᵀ dout``. A sink is a score without a value, so that its dp is 0.
Dao 2023, FlashAttention-2, algorithm 2, with a kernel for dq of its own instead of atomic
additions: the result is the same bits every time.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.portable.softmax import LOG2E
from pallas_attn.kernels.portable.tiles import ROW_PADDING, visible_tiles
from pallas_attn.kernels.sm80.launch import launch
from pallas_attn.kernels.sm80.pipeline import (
    Head,
    add_product,
    allocate_tile,
    fetch_tile,
    load_vector,
    padded_columns,
    product_scores,
    step_start,
    tile_transforms,
    wait,
    zeros,
)
from pallas_attn.kernels.sm80.scores import as_columns, as_rows, iota, visible_scores
from pallas_attn.kernels.sm80.workarounds import commit, store_rows, warpgroup_barrier
from pallas_attn.launch import flash_arguments
from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend


def flash_bwd_dq_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    dq_ref,
    q_tile,
    dout_tile,
    k_tiles,
    v_tiles,
    *,
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
    """One program computes block_q rows of dq of one query head.

    Operands: q and dq [B, Sq, Hq, D], k [B, Skv, Hkv, D], v [B, Skv, Hkv, Dv], dout [B, Sq, Hq,
    Dv]; lse2 and delta [B, Hq, Sq rounded up to ROW_PADDING] float32, lse2 in base 2 and +inf where
    a row saw no key or does not exist; in shared memory a tile of q and of dout, and num_stages, 2,
    of k and of v. Grid, diagonal, rule: as in `flash_fwd_kernel`. Loop invariant: dq is Σ ds k over
    the keys so far. Accumulation: float32, exponents in base 2, ds cast to k's dtype for ds·k. A
    row that sees no key gives 0.
    """
    # Locate the tile of queries.
    warpgroups = num_warps // 4
    warpgroup = lax.axis_index("warpgroup") if warpgroups > 1 else 0
    program = lax.axis_index("program")
    heads_q = q_ref.shape[2]
    num_tiles = pl.cdiv(seq_q, block_q)
    start_q = (num_tiles - 1 - program % num_tiles) * block_q
    head = program // num_tiles % heads_q
    batch = program // (num_tiles * heads_q)
    rows = block_q // warpgroups
    layout = plgpu.Layout.MMA_ACC(q_ref.dtype)
    start_row = start_q + warpgroup * rows
    head_kv = head // group_size
    k, v = (Head(ref, batch, head_kv) for ref in (k_ref, v_ref))
    begin, before, full, after = visible_tiles(
        start_q, seq_q, seq_kv, diagonal, window_left, window_right, block_q, block_kv
    )
    steps = before + full + after
    last_start = pl.cdiv(seq_kv, block_kv) * block_kv - block_kv

    def fetch(step, slot):
        """Fetch the keys and values of a step; a program without steps fetches some tile."""
        start = step_start(step, begin, before, full, after, block_kv)
        if window_left is not None or window_right is not None:
            start = jnp.clip(start, 0, last_start)
        for source, tiles in ((k, k_tiles), (v, v_tiles)):
            fetch_tile(
                source, tiles.at[slot], start, block_kv, warpgroup, warpgroups,
                seq_kv % block_kv == 0,
            )  # fmt: skip

    # Start to fetch the queries, what belongs to their rows, and the first keys and values.
    q_tile, dout_tile = q_tile.at[warpgroup], dout_tile.at[warpgroup]
    all_exist = seq_q % block_q == 0
    fetch_tile(Head(q_ref, batch, head), q_tile, start_row, rows, all_exist=all_exist)
    fetch_tile(Head(dout_ref, batch, head), dout_tile, start_row, rows, all_exist=all_exist)
    fetch(program * 0, 0)
    commit()
    lse2, delta = (
        load_vector(ref.at[batch, head, pl.ds(start_row, rows)], layout.reduce(1))
        for ref in (lse2_ref, delta_ref)
    )

    # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
    def visit(step, dq, masked):
        start_kv = step_start(step, begin, before, full, after, block_kv)
        # Wait for the keys and values; fetch the next ones.
        wait(0, warpgroups)
        slot = step % 2
        pl.when(step + 1 < steps)(lambda: fetch(step + 1, 1 - slot))
        commit()
        # s = scale · q kᵀ
        s = product_scores(q_tile, k_tiles.at[slot], head_dim)
        position = key = None
        if masked:
            position = iota(s.shape, 0, layout) + (start_row + diagonal)
            key = iota(s.shape, 1, layout) + start_kv
        end = seq_kv if seq_kv % block_kv else None
        s, dcap = visible_scores(
            s, position, key, end, rule, window_left, window_right, masked, layout
        )
        # p = exp(s - lse)
        p = jnp.exp2(s * rule.exp2_scale - as_rows(lse2, s))
        # dp = dout vᵀ
        dp = product_scores(dout_tile, v_tiles.at[slot], head_dim_v)
        # ds = p ∘ (dp - delta) ∘ dcap
        ds = p * (dp - as_rows(delta, dp)) * dcap
        # dq += ds k
        return add_product(dq, ds, k_tiles.at[slot])

    dq = zeros(rows, padded_columns(head_dim), q_ref.dtype)
    for masked, lower, upper in ((True, 0, before + after), (False, before + after, steps)):
        if not (isinstance(upper, int) and lower == upper):
            dq = lax.fori_loop(lower, upper, functools.partial(visit, masked=masked), dq)
    wait(0, warpgroups)

    # Scale and store.
    q_tile[...] = (dq * rule.scale).astype(dq_ref.dtype)
    warpgroup_barrier()
    num_rows = None if all_exist else seq_q
    store_rows(q_tile, tile_transforms(head_dim), dq_ref, batch, head, start_row, num_rows)


def flash_bwd_dkdv_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    dk_ref,
    dv_ref,
    k_tile,
    v_tile,
    q_tiles,
    dout_tiles,
    *,
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
    """One program computes block_kv rows of dk and dv of one kv head, summed over its query heads.

    Operands as in `flash_bwd_dq_kernel`, dk and dv like k and v; in shared memory a tile of k and
    of v, and num_stages, 2, of q and of dout. Grid: (key tiles · kv heads · batch), first tile
    first, since under a causal mask it is the longest. Tiles of s, p, dp, ds are transposed (keys
    down, queries across), so that they are left operands as they are. Loop invariant: dk is Σ dsᵀ q
    and dv is Σ pᵀ dout over the query heads and queries so far. Accumulation: float32, exponents in
    base 2, p and ds cast to the inputs' dtype for their products. A key that no query sees gives 0.
    """
    # Locate the tile of keys.
    warpgroups = num_warps // 4
    warpgroup = lax.axis_index("warpgroup") if warpgroups > 1 else 0
    program = lax.axis_index("program")
    heads_kv = k_ref.shape[2]
    num_tiles = pl.cdiv(seq_kv, block_kv)
    start_kv = program % num_tiles * block_kv
    head_kv = program // num_tiles % heads_kv
    batch = program // (num_tiles * heads_kv)
    rows = block_kv // warpgroups
    layout = plgpu.Layout.MMA_ACC(k_ref.dtype)
    start_row = start_kv + warpgroup * rows
    begin, before, full, after = visible_tiles(
        start_kv, seq_kv, seq_q, -diagonal, window_right, window_left, block_kv, block_q
    )
    steps = before + full + after
    last_start = pl.cdiv(seq_q, block_q) * block_q - block_q

    def fetch(member, step, slot):
        """Fetch the queries and dout of a step; a program without steps fetches some tile."""
        head = head_kv * group_size + member
        start = step_start(step, begin, before, full, after, block_q)
        if window_left is not None or window_right is not None:
            start = jnp.clip(start, 0, last_start)
        for ref, tiles in ((q_ref, q_tiles), (dout_ref, dout_tiles)):
            fetch_tile(
                Head(ref, batch, head), tiles.at[slot], start, block_q, warpgroup, warpgroups,
                seq_q % block_q == 0,
            )  # fmt: skip

    # Start to fetch the keys, the values and the first queries.
    k_tile, v_tile = k_tile.at[warpgroup], v_tile.at[warpgroup]
    all_exist = seq_kv % block_kv == 0
    fetch_tile(Head(k_ref, batch, head_kv), k_tile, start_row, rows, all_exist=all_exist)
    fetch_tile(Head(v_ref, batch, head_kv), v_tile, start_row, rows, all_exist=all_exist)
    first = program * 0
    fetch(first, first, 0)
    commit()

    # Visit the tiles of queries that see these keys; only tiles at the edges are masked.
    def visit(step, carry, member, masked):
        dk, dv = carry
        head = head_kv * group_size + member
        start_q = step_start(step, begin, before, full, after, block_q)
        # Wait for the queries and dout; fetch the next ones.
        wait(0, warpgroups)
        slot = (member * steps + step) % 2
        is_last = step + 1 == steps
        next_member = jnp.where(is_last, member + 1, member)
        next_step = jnp.where(is_last, 0, step + 1)
        pl.when(next_member < group_size)(lambda: fetch(next_member, next_step, 1 - slot))
        commit()
        lse2, delta = (
            load_vector(ref.at[batch, head, pl.ds(start_q, block_q)], layout.reduce(0))
            for ref in (lse2_ref, delta_ref)
        )
        # sᵀ = scale · k qᵀ
        s = product_scores(k_tile, q_tiles.at[slot], head_dim)
        position = key = None
        if masked:
            position = iota(s.shape, 1, layout) + start_q
            key = iota(s.shape, 0, layout) + (start_row - diagonal)  # counted as queries are
        s, dcap = visible_scores(
            s, position, key, None, rule, window_left, window_right, masked, layout
        )
        # pᵀ = exp(sᵀ - lse)
        p = jnp.exp2(s * rule.exp2_scale - as_columns(lse2, s))
        # dpᵀ = v doutᵀ
        dp = product_scores(v_tile, dout_tiles.at[slot], head_dim_v)
        # dv += pᵀ dout
        dv = add_product(dv, p, dout_tiles.at[slot])
        # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
        ds = p * (dp - as_columns(delta, dp)) * dcap
        # dk += dsᵀ q
        dk = add_product(dk, ds, q_tiles.at[slot])
        return dk, dv

    def visit_head(member, carry):
        for masked, lower, upper in ((True, 0, before + after), (False, before + after, steps)):
            if not (isinstance(upper, int) and lower == upper):
                body = functools.partial(visit, member=member, masked=masked)
                carry = lax.fori_loop(lower, upper, body, carry)
        return carry

    carry = tuple(zeros(rows, padded_columns(size), k_ref.dtype) for size in (head_dim, head_dim_v))
    if group_size == 1:
        dk, dv = visit_head(first, carry)
    else:
        dk, dv = lax.fori_loop(first, group_size, visit_head, carry)
    wait(0, warpgroups)

    # Scale and store.
    k_tile[...] = (dk * rule.scale).astype(dk_ref.dtype)
    v_tile[...] = dv.astype(dv_ref.dtype)
    warpgroup_barrier()
    num_rows = None if all_exist else seq_kv
    for tile, ref, size in ((k_tile, dk_ref, head_dim), (v_tile, dv_ref, head_dim_v)):
        store_rows(tile, tile_transforms(size), ref, batch, head_kv, start_row, num_rows)


def flash_bwd(
    dout: Array,
    dlse: Array | None,
    operands: FlashOperands[Array],
    out: Array,
    lse: Array,
    spec: AttentionSpec,
    backend: Backend,
) -> FlashOperands[Array]:
    """Call the two kernels of the backward.

    Args:
        dout: [B, Sq, Hq, Dv].
        dlse: [B, Hq, Sq] float32, or None for zero.
        operands, out, lse: inputs and outputs of the forward.

    Returns:
        The gradient of each operand, in its dtype.
    """
    q, k, v = operands[:3]
    lse2, delta = prepare_rows(dout, dlse, out, lse)
    configs, group = backend.configs(spec), spec.group_size
    inputs = (q, k, v, dout, lse2, delta)
    arguments = flash_arguments(spec) | {"group_size": group}

    def kept(config, rows, size):
        """Return the tiles that stay, one a warpgroup."""
        warpgroups = config.num_warps // 4
        return allocate_tile(q.dtype, warpgroups, rows // warpgroups, size)

    config = configs["flash_bwd_dq"]
    (dq,) = launch(
        "flash_bwd_dq",
        flash_bwd_dq_kernel,
        pl.cdiv(spec.seq_q, config.block_q) * spec.heads_q * spec.batch,
        config.num_warps,
        inputs,
        (jax.ShapeDtypeStruct(q.shape, q.dtype),),
        (
            kept(config, config.block_q, spec.head_dim),
            kept(config, config.block_q, spec.head_dim_v),
            allocate_tile(k.dtype, config.num_stages, config.block_kv, spec.head_dim),
            allocate_tile(v.dtype, config.num_stages, config.block_kv, spec.head_dim_v),
        ),
        arguments | vars(config),
    )
    config = configs["flash_bwd_dkdv"]
    dk, dv = launch(
        "flash_bwd_dkdv",
        flash_bwd_dkdv_kernel,
        pl.cdiv(spec.seq_kv, config.block_kv) * spec.heads_kv * spec.batch,
        config.num_warps,
        inputs,
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)),
        (
            kept(config, config.block_kv, spec.head_dim),
            kept(config, config.block_kv, spec.head_dim_v),
            allocate_tile(q.dtype, config.num_stages, config.block_q, spec.head_dim),
            allocate_tile(q.dtype, config.num_stages, config.block_q, spec.head_dim_v),
        ),
        arguments | vars(config),
    )
    dsinks = None
    if operands.sinks is not None:
        p = jnp.exp2(operands.sinks[:, None] * LOG2E - lse2)
        dsinks = -jnp.sum(p * delta, (0, 2))
    return FlashOperands(dq, dk, dv, dsinks)


def prepare_rows(dout: Array, dlse: Array | None, out: Array, lse: Array) -> tuple[Array, Array]:
    """Compute lse2 and delta of every row, [B, Hq, Sq rounded up to ROW_PADDING] float32.

    XLA makes one kernel of it. lse2 is lse in base 2, or +inf where a row saw no key or does not
    exist, so that ``exp2(s - lse2)`` is 0 there.
    """
    products = dout.astype(jnp.float32) * out.astype(jnp.float32)
    delta = jnp.swapaxes(jnp.sum(products, 3), 1, 2)
    if dlse is not None:
        delta = delta - dlse
    lse2 = jnp.where(lse == float("-inf"), float("inf"), lse) * LOG2E
    padding = ((0, 0), (0, 0), (0, -lse.shape[2] % ROW_PADDING))
    return (
        jnp.pad(lse2, padding, constant_values=float("inf")),
        jnp.pad(delta, padding),
    )
