"""Paged decode, split over the keys: the portable kernel's formula, by warps.

Each warp has its own keys, copies them from their pages to shared memory some tiles ahead, and
waits for no other warp. The warps meet once, at the end, to merge their results.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import warpgroup_barrier
from pallas_attn.kernels.explicit.cp_async import commit, padded_columns, tile_transforms
from pallas_attn.kernels.explicit.mma import CHUNK, as_left_operand, load_right, zeros
from pallas_attn.kernels.explicit.mma_launch import fitting_config, launch
from pallas_attn.kernels.explicit.mma_scores import visible_scores
from pallas_attn.kernels.explicit.registers import (
    ROWS,
    WARPS,
    as_rows,
    iota,
    thread_index,
    upcast_pairs,
)
from pallas_attn.kernels.explicit.softmax import online_softmax_update
from pallas_attn.kernels.library.pages import share_of_tiles
from pallas_attn.kernels.library.quantized import as_packed
from pallas_attn.kernels.library.softmax import LOG2E, row_statistics
from pallas_attn.kernels.paged.combine import merge_splits
from pallas_attn.kernels.paged.memory import (
    copy_keys,
    gather,
    load_queries,
    load_split_queries,
    wait_of_warp,
)
from pallas_attn.kernels.paged.merge import (
    merge_rows,
    share_sums,
    store_merged,
    store_rows_of_heads,
)
from pallas_attn.targets import num_sms
from twin_attention.contract.operands import DecodeOperands
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import Window
from twin_attention.targets.family import Backend
from twin_attention.targets.ptx import choose_upcast
from twin_attention.targets.splits import block_rows, choose_splits


def paged_decode_kernel(
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    len_ref,
    sinks_ref,
    k_scale_ref,
    v_scale_ref,
    out_ref,
    lse_ref,
    outs_ref,
    lses_ref,
    k_tiles_and_sums,
    v_tiles,
    numbers,
    *,
    num_splits,
    rule,
    window_left,
    tokens,
    group_size,
    upcast,
    block_rows,
    block_kv,
    num_stages,
):
    """One program computes block_rows rows of one kv head over one split of the keys.

    Operands are those of the portable kernel, of all sequences and heads; scales are [1] or [Hkv],
    outs [splits · B, T, Hq, Dv], lses [splits · B, Hq, T]. Shared memory holds num_stages tiles of
    k and of v, block_kv / WARPS keys for each warp, and room to merge. Grid: (row tiles · kv heads
    · batch · splits). Accumulation and loop invariant: `pallas_attn.kernels.sm80.flash_fwd`, for
    each warp. block_rows is a multiple of 16.
    """
    # Locate the rows and the split's share of the keys.
    batches, heads_kv, total_rows = len_ref.shape[0], k_ref.shape[2], tokens * group_size
    program, tiles = lax.axis_index("program"), pl.cdiv(total_rows, block_rows)
    tile, rest = program % tiles, program // tiles
    head_kv, rest = rest % heads_kv, rest // heads_kv
    batch, split = rest % batches, rest // batches
    num_pages, page_size = k_ref.shape[:2]
    end = jnp.clip(len_ref[batch], 0, table_ref.shape[1] * page_size)
    begin = 0 if window_left is None else jnp.maximum(end - tokens - window_left, 0)
    first, count, total = share_of_tiles(begin, end, split, num_splits, block_kv)
    k_tiles, sums = k_tiles_and_sums
    thread = thread_index()
    warp, lane = lax.div(thread, 32), lax.rem(thread, 32)
    keys = block_kv // WARPS
    start_warp = first * block_kv + warp * keys
    end_fetch = jnp.minimum(end, (first + count) * block_kv)

    def locate(step):
        """Return the place in the pool of this lane's key in a step, or -1 if there is none."""
        key = start_warp + step * block_kv + lane
        page = page_of_key(table_ref, batch, key, end, num_pages, page_size)
        exists = key < end_fetch
        if window_left is not None:
            exists &= key >= begin
        return jnp.where(exists, page * page_size + lax.rem(key, page_size), -1)

    def fetch(slot, places):
        for pool, tiles in ((k_ref, k_tiles), (v_ref, v_tiles)):
            target = tiles.at[slot, warp]
            copy_keys(pool, target, tile_transforms(pool.shape[3]), head_kv, places)
        commit()

    # Start to fetch keys and values.
    ahead = num_stages - 1
    for step in range(ahead):
        fetch(step, locate(step))
    places = locate(ahead)

    # Load the queries, which stay in registers.
    dtype = jnp.dtype(q_ref.dtype if upcast is None else "float16")
    layout = plgpu.Layout.MMA_ACC(dtype)
    of_warps = iota((WARPS * block_rows,), 0, ROWS)
    row = tile * block_rows + lax.div(of_warps, 64) * 16 + lax.rem(of_warps, 16)
    first_head = head_kv * group_size
    rows, columns = (batch, first_head, row, total_rows, group_size), padded_columns(k_ref.shape[3])
    q, scale = load_q(q_ref, rows, columns, rule.scale, k_scale_ref, head_kv, upcast)
    position = lax.div(row, group_size) + (end - tokens)

    # Visit the split's tiles of keys.
    def visit(step, carry):
        places, m_i, l_i, acc = carry
        # Wait for this step's keys and values; fetch a later step's.
        wait_of_warp(max(ahead - 1, 0))
        slot = lax.rem(step, num_stages)
        fetch(lax.rem(step + ahead, num_stages), places)
        if ahead == 0:
            wait_of_warp(0)
        places = locate(step + num_stages)
        # s = scale · q kᵀ
        s = zeros(WARPS * block_rows, keys, dtype)
        for a, b in zip(q, unpack(load_right(k_tiles.at[slot, warp].T), upcast), strict=True):
            s = plgpu.mma(s, a, b)
        to_scores = rule if upcast is None else rule._replace(scale=as_rows(scale, s))
        key = iota(s.shape, 1, layout) + (start_warp + step * block_kv)
        s, _ = visible_scores(
            s, as_rows(position, s), key, end, to_scores,
            Window(window_left, 0 if tokens > 1 else None), True, layout,
        )  # fmt: skip
        # p = exp(s - max), and rescale what was accumulated
        p, m_i, l_i, acc = online_softmax_update(s, m_i, l_i, acc, rule.exp2_scale, layout)
        # acc += p v
        acc = add_pv(acc, p.astype(dtype), v_tiles.at[slot, warp], upcast)
        return places, m_i, l_i, acc

    rows = WARPS * block_rows
    columns = padded_columns(v_ref.shape[3])
    m_i = plgpu.layout_cast(jnp.full((rows,), float("-inf"), jnp.float32), ROWS)
    acc = [zeros(rows, columns, dtype) for _ in q]
    carry = places, m_i, zeros(rows, 8, dtype), acc
    _, m_i, l_i, acc = lax.fori_loop(0, count, visit, carry)
    wait_of_warp(0)
    warpgroup_barrier()

    # Merge the warps' results.
    # A split with all tiles gives the result; otherwise each gives a part that `combine` merges.
    is_result = (split == 0) & (count == total)
    m_all = merge_rows(m_i, numbers.at[0], add=False)
    if sinks_ref is not None:
        head = jnp.minimum(lax.rem(row, group_size) + first_head, sinks_ref.shape[0] - 1)
        sink = gather(sinks_ref, head) * LOG2E
        sink = jnp.where(is_result, sink, float("-inf"))
        m_all = jnp.maximum(m_all, sink)
    m_safe = jnp.where(m_all == float("-inf"), 0.0, m_all)
    alpha = jnp.exp2(m_i - m_safe)
    l_all = merge_rows(l_i.sum(axis=1) * alpha, numbers.at[1], add=True)
    share_sums([x * as_rows(alpha, x) for x in acc], sums)

    # Normalise and store.
    if sinks_ref is not None:
        l_all = l_all + jnp.exp2(sink - m_safe)
    l_safe, lse = row_statistics(m_all, l_all)
    factor = 1.0 / l_safe
    if v_scale_ref is not None:
        factor = factor * of_head(v_scale_ref, head_kv)

    def store(out, lse_out, index):
        where = (index, first_head), row, total_rows, group_size
        store_rows_of_heads(lse, lse_out, *where)
        store_merged(sums, factor, out, *where, columns, len(acc))

    pl.when(is_result)(lambda: store(out_ref, lse_ref, batch))
    if outs_ref is not None:
        is_part = (count > 0) & (count < total)
        pl.when(is_part)(lambda: store(outs_ref, lses_ref, split * batches + batch))


def page_of_key(table_ref, batch, key, end, num_pages, page_size):
    """Return the page of a key, or the last key's for one from `end` on."""
    last_page = lax.div(jnp.maximum(end - 1, 0), page_size)
    page = table_ref[batch, jnp.minimum(lax.div(key, page_size), last_page)]
    return jnp.clip(page, 0, num_pages - 1)


def load_q(q_ref, rows, width, scale, k_scale_ref, head_kv, upcast):
    """Return q's operands of rows (see `load_queries`), and the scale of their scores."""
    if upcast is None:
        return [load_queries(q_ref, *rows, width)], scale
    *q, factor = load_split_queries(q_ref, *rows, width)
    return q, factor * (scale * of_head(k_scale_ref, head_kv))


def of_head(scale_ref, head):
    return scale_ref[head if scale_ref.shape[0] > 1 else 0]


def unpack(x, upcast):
    if upcast is None:
        return [x]
    return [upcast_pairs(x, code) for code in (upcast.low, upcast.high)]


def add_pv(acc, p, v, upcast):
    for start in range(0, v.shape[0], CHUNK):
        left = as_left_operand(p[:, start : start + CHUNK])
        right = unpack(load_right(v.at[pl.ds(start, CHUNK)]), upcast)
        acc = [plgpu.mma(x, left, y) for x, y in zip(acc, right, strict=True)]
    return acc


def paged_decode(
    operands: DecodeOperands[Array], spec: DecodeSpec, backend: Backend
) -> tuple[Array, Array]:
    pools = operands.k_pages, operands.v_pages
    if spec.cache.is_quantized:
        pools = tuple(map(as_packed, pools))
    k_pages, v_pages = pools
    q, _, _, block_tables, seq_lens, sinks, *scales, _, _ = operands

    def tile(config, pool):
        size = pool.shape[3]
        shape = (config.num_stages, WARPS, config.block_kv // WARPS, padded_columns(size))
        return plgpu.SMEM(shape, pool.dtype, transforms=tile_transforms(size))

    def scratch(config):
        rows = WARPS * block_rows(spec, config)
        parts = spec.head_dim_v // v_pages.shape[3]
        sums = plgpu.SMEM((parts * rows * padded_columns(v_pages.shape[3]),), jnp.float32)
        return (
            plgpu.RefUnion(tile(config, k_pages), sums),
            tile(config, v_pages),
            plgpu.SMEM((2, rows), jnp.float32),
        )

    config = fitting_config("paged_decode", scratch, spec, backend)
    rows = block_rows(spec, config)
    splits = choose_splits(spec, config, num_sms(backend.target))
    shape = (spec.batch, spec.tokens, spec.heads_q, spec.head_dim_v)
    lse_shape = (spec.batch, spec.heads_q, spec.tokens)
    out = jax.ShapeDtypeStruct(shape, q.dtype)
    lse = jax.ShapeDtypeStruct(lse_shape, jnp.float32)
    outs = lses = None
    if splits > 1:
        outs = jax.ShapeDtypeStruct((splits * spec.batch, *shape[1:]), jnp.float32)
        lses = jax.ShapeDtypeStruct((splits * spec.batch, *lse_shape[1:]), jnp.float32)
    tiles = pl.cdiv(spec.tokens * spec.group_size, rows)
    results = launch(
        "paged_decode",
        paged_decode_kernel,
        lambda config: tiles * spec.heads_kv * spec.batch * splits,
        (
            q,
            *pools,
            block_tables,
            seq_lens,
            sinks,
            *(None if x is None else x.reshape(-1) for x in scales),
        ),
        (out, lse, outs, lses),
        scratch,
        spec,
        backend,
        problem={
            "num_splits": splits,
            "rule": spec.scores,
            "window_left": spec.bounded_window.left,
            "tokens": spec.tokens,
            "group_size": spec.group_size,
            "upcast": choose_upcast(spec.cache.dtype, backend.target),
            "block_rows": rows,
        },
    )
    if splits > 1:
        out, lse, outs, lses = results
        return merge_splits(outs, lses, out, lse, operands, spec, config.block_kv, backend)
    return results
