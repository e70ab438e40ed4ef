"""Paged decode: attention of a few new tokens over a cache in pages, split over the keys.

Each split of a sequence's keys gives a partial output and its log-sum-exp; `combine` merges them.
Flash-Decoding (Dao et al. 2023) over the pages of PagedAttention (Kwon et al. 2023).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_attn.dispatch import multiprocessors
from pallas_attn.kernels.portable.combine import merge_splits
from pallas_attn.kernels.portable.pages import (
    keys_of_sequence,
    load_rows_at,
    locate_keys,
    share_of_tiles,
    store_rows_at,
)
from pallas_attn.kernels.portable.quantized import as_words, to_float16, unpack
from pallas_attn.kernels.portable.scores import attention_mask, attention_scores, dot
from pallas_attn.kernels.portable.softmax import LN2, add_sink, online_softmax_update
from pallas_attn.kernels.portable.tiles import arange
from pallas_attn.launch import (
    config_for,
    decode_arguments,
    launch,
    of_pool,
    of_scale,
    of_sequence,
    of_split,
    of_tokens,
)
from twin_attention.contract.spec import DecodeSpec
from twin_attention.targets.config import block_rows, choose_splits


def paged_decode_kernel(
    *refs,
    num_pages,
    max_pages,
    num_splits,
    scale,
    exp2_scale,
    softcap,
    window_left,
    tokens,
    group_size,
    page_size,
    head_dim,
    head_dim_v,
    block_d,
    block_dv,
    scale_first,
    has_sinks,
    quantized,
    float8,
    widenings,
    block_rows,
    block_kv,
):
    """One program computes block_rows rows of one kv head over one split of the keys.

    Row r is token ``r // group_size`` of query head ``r % group_size`` of the group, so that the
    keys and values are read once for all of them. Operands, of this program's batch and kv head:
    q [T, group, D], pools k [P, page_size, D] and v [P, page_size, Dv], table [max_pages] and len
    [], int32; sinks [group] if has_sinks, scales [] if quantized, float32; out
    [T, group, Dv] and lse [group, T] (float32, natural log). Where more than one split has keys,
    each of them writes its outs [T, group, Dv] and lses [group, T] instead, float32; with a single
    split they are not there. Grid: (row tiles, kv heads, batch, splits). Loop invariant:
    `online_softmax_update`. Accumulation: float32, exponents in base 2, p cast to the products'
    dtype. A row that sees no key has lse -inf, or its sink.
    block_rows and block_kv are powers of two, at least 16.

    quantized: the products are in float16, and the pools are given as int16 words of two columns.
    head_dim and head_dim_v count words; even and odd columns are tiles of their own.
    """
    # Locate the rows and the split's share of the keys.
    q_ref, k_ref, v_ref, table_ref, len_ref, *optional, out_ref, lse_ref = refs
    if num_splits > 1:
        *optional, out_ref, lse_ref, outs_ref, lses_ref = (*optional, out_ref, lse_ref)
    tile, split = pl.program_id(0), pl.program_id(3)
    begin, length = keys_of_sequence(len_ref, max_pages * page_size, tokens, window_left)
    first, count, total = share_of_tiles(begin, length, split, num_splits, block_kv)
    # A split with all tiles gives the result, else each gives a part that `combine` merges.
    is_result = (split == 0) & (count == total)
    if quantized:
        *optional, k_scale_ref, v_scale_ref = optional
        scale = scale * k_scale_ref[...]

    # Load the queries; they stay.
    row = tile * block_rows + arange(block_rows)
    token, member = row // group_size, row % group_size
    is_row = token < tokens
    halves = range(2 if quantized else 1)
    q = [
        load_rows_at(q_ref, (token, member), is_row, head_dim, block_d, half, len(halves))
        for half in halves
    ]
    if quantized:
        *q, factor = to_float16(*q)
        scale = scale * factor[:, None]
    position = length - tokens + token
    m_i = jnp.full((block_rows,), float("-inf"), jnp.float32)
    l_i = jnp.zeros((block_rows,), jnp.float32)
    acc = [jnp.zeros((block_rows, block_dv), jnp.float32) for _ in halves]

    # Visit the split's tiles of keys.
    def visit(index, carry):
        m_i, l_i, acc = carry
        start = (first + lax.convert_element_type(index, jnp.int32)) * block_kv
        key = start + arange(block_kv)
        exists = key < length
        page, slot = locate_keys(table_ref, start, length, num_pages, page_size, block_kv)
        # s = scale · q kᵀ
        k = [load_rows_at(k_ref, (page, slot), exists, head_dim, block_d)]
        more = None
        if quantized:
            k = unpack(*k, float8, widenings)
            more = dot(q[1], k[1].T)
        s = attention_scores(q[0], k[0], scale, softcap, scale_first, more)
        s = attention_mask(
            s, position[:, None], key[None, :], length, window_left, 0 if tokens > 1 else None
        )
        # p = exp(s - max), and rescale what was accumulated
        p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, exp2_scale)
        p = p.astype(q[0].dtype)
        # acc += p v
        v = [load_rows_at(v_ref, (page, slot), exists, head_dim_v, block_dv)]
        if quantized:
            v = unpack(*v, float8, widenings)
        acc = [acc[half] * alpha[:, None] + dot(p, v[half]) for half in halves]
        return m_i, l_i, acc

    m_i, l_i, acc = lax.fori_loop(0, count, visit, (m_i, l_i, acc))

    # Normalise and store.
    if has_sinks:
        (sinks_ref,) = optional
        sink = jnp.where(is_result, sinks_ref[member], float("-inf"))
        alpha, m_i, l_i = add_sink(sink, m_i, l_i)
        acc = [x * alpha[:, None] for x in acc]
    l_safe = jnp.where(l_i == 0.0, 1.0, l_i)
    lse = m_i * LN2 + jnp.log(l_safe)
    out = [x / l_safe[:, None] for x in acc]
    if quantized:
        out = [x * v_scale_ref[...] for x in out]
    places = [(out_ref, lse_ref, is_row & is_result)]
    if num_splits > 1:
        places.append((outs_ref, lses_ref, is_row & (count > 0) & (count < total)))
    for to_out, to_lse, writes in places:
        plt.store(to_lse.at[member, token], lse, mask=writes)
        for half in halves:
            store_rows_at(
                to_out, out[half], (token, member), writes, head_dim_v, block_dv, half, len(halves)
            )


def paged_decode(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    seq_lens: Array,
    sinks: Array | None,
    k_scale: Array | None,
    v_scale: Array | None,
    spec: DecodeSpec,
    *,
    backend: str,
) -> tuple[Array, Array]:
    """Call `paged_decode_kernel`, and `combine` where there is more than one split.

    Args:
        backend: "interpret", or the target to compile for, "sm80" or "sm90".

    Returns:
        out [B, T, Hq, Dv] in q's dtype and lse [B, Hq, T] float32.
    """
    config = config_for("paged_decode", spec, backend)
    rows = block_rows(spec, config)
    splits = choose_splits(spec, config, multiprocessors(backend))
    tiles = pl.cdiv(spec.tokens * spec.group_size, rows)
    has_sinks = sinks is not None
    if spec.cache.is_quantized:
        k_pages, v_pages = as_words(k_pages), as_words(v_pages)
    operands = [q, k_pages, v_pages, block_tables, seq_lens]
    in_specs = [
        of_tokens(q, spec.group_size),
        of_pool(k_pages),
        of_pool(v_pages),
        of_sequence(block_tables),
        of_sequence(seq_lens),
    ]
    if has_sinks:
        operands.append(sinks)
        in_specs.append(pl.BlockSpec((spec.group_size,), lambda tile, head, *_: (head,)))
    if spec.cache.is_quantized:
        operands += [k_scale, v_scale]
        in_specs += [of_scale(k_scale), of_scale(v_scale)]
    shape = (spec.batch, spec.tokens, spec.heads_q, spec.head_dim_v)
    lse_shape = (spec.batch, spec.heads_q, spec.tokens)
    results = [jax.ShapeDtypeStruct(shape, q.dtype), jax.ShapeDtypeStruct(lse_shape, jnp.float32)]
    out_specs = [of_tokens(x, spec.group_size) for x in results]
    if splits > 1:
        parts = [jax.ShapeDtypeStruct((splits, *x.shape), jnp.float32) for x in results]
        results += parts
        out_specs += [of_split(x, spec.group_size) for x in parts]
    out, lse, *parts = launch(
        "paged_decode",
        paged_decode_kernel,
        lambda config: (tiles, spec.heads_kv, spec.batch, splits),
        operands,
        in_specs,
        results,
        out_specs,
        decode_arguments(spec, k_pages, v_pages, backend)
        | {"num_splits": splits, "has_sinks": has_sinks, "block_rows": rows},
        spec,
        backend,
    )
    if splits == 1:
        return out, lse
    return merge_splits(*parts, out, lse, seq_lens, sinks, spec, config.block_kv, backend=backend)
