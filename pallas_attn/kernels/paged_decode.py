"""Paged decode: attention of a few new tokens over a cache in pages, split over the keys.

Each split of a sequence's keys gives a partial output and its log-sum-exp; `combine` merges them.
Flash-Decoding (Dao et al. 2023) over the pages of PagedAttention (Kwon et al. 2023).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from interop.contract.config import block_rows, choose_splits
from interop.contract.spec import DecodeSpec
from pallas_attn.dispatch import multiprocessors
from pallas_attn.kernels.combine import combine
from pallas_attn.kernels.primitives import (
    LN2,
    add_sink,
    arange,
    attention_mask,
    attention_scores,
    dot,
    load_rows_at,
    locate_keys,
    online_softmax_update,
    share_of_tiles,
    store_rows_at,
)
from pallas_attn.kernels.quantized import as_words, to_float16, unpack
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
    [], int32; sinks [group] if has_sinks, scales [] if quantized, float32; of its split, out
    [T, group, Dv] and lse [group, T] (float32, natural log). Grid: (row tiles, kv heads, splits,
    batch). Loop invariant: `online_softmax_update`. Accumulation: float32, exponents in base 2, p
    cast to the products' dtype. A row that sees no key in this split has lse -inf, and an output
    only where the split has keys. A single split writes the result itself, and counts the sink.
    block_rows and block_kv are powers of two, at least 16.

    quantized: the products are in float16, and the pools are given as int16 words of two columns.
    head_dim and head_dim_v count words; even and odd columns are tiles of their own.
    """
    # Locate the rows and the split's share of the keys.
    q_ref, k_ref, v_ref, table_ref, len_ref, *optional, out_ref, lse_ref = refs
    tile, split = pl.program_id(0), pl.program_id(2)
    length = jnp.minimum(jnp.maximum(len_ref[...], 0), max_pages * page_size)
    begin = 0
    if window_left is not None:
        begin = jnp.maximum(length - tokens - window_left, 0)
    first, count = share_of_tiles(begin, length, split, num_splits, block_kv)
    if quantized:
        *optional, k_scale_ref, v_scale_ref = optional
        scale = scale * k_scale_ref[...]

    # Load the queries; they stay.
    row = tile * block_rows + arange(block_rows)
    token, member = row // group_size, row % group_size
    is_row = token < tokens
    parts = range(2 if quantized else 1)
    q = [
        load_rows_at(q_ref, (token, member), is_row, head_dim, block_d, part, len(parts))
        for part in parts
    ]
    if quantized:
        *q, factor = to_float16(*q)
        scale = scale * factor[:, None]
    position = length - tokens + token
    m_i = jnp.full((block_rows,), float("-inf"), jnp.float32)
    l_i = jnp.zeros((block_rows,), jnp.float32)
    acc = [jnp.zeros((block_rows, block_dv), jnp.float32) for _ in parts]

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
        acc = [acc[part] * alpha[:, None] + dot(p, v[part]) for part in parts]
        return m_i, l_i, acc

    m_i, l_i, acc = lax.fori_loop(0, count, visit, (m_i, l_i, acc))

    # Normalise and store.
    alpha = jnp.ones_like(l_i)
    if has_sinks:
        (sinks_ref,) = optional
        alpha, m_i, l_i = add_sink(sinks_ref[member], m_i, l_i)
    l_safe = jnp.where(l_i == 0.0, 1.0, l_i)
    lse = m_i * LN2 + jnp.log(l_safe)
    plt.store(lse_ref.at[member, token], lse, mask=is_row)
    writes = is_row
    if num_splits > 1:
        writes = token < jnp.minimum(count, 1) * tokens
    for part in parts:
        out = acc[part] * alpha[:, None] / l_safe[:, None]
        if quantized:
            out = out * v_scale_ref[...]
        store_rows_at(out_ref, out, (token, member), writes, head_dim_v, block_dv, part, len(parts))


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
    has_sinks = sinks is not None and splits == 1
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
    shape = (splits, spec.batch, spec.tokens, spec.heads_q, spec.head_dim_v)
    out = jax.ShapeDtypeStruct(shape, q.dtype if splits == 1 else jnp.float32)
    lse_shape = (splits, spec.batch, spec.heads_q, spec.tokens)
    lse = jax.ShapeDtypeStruct(lse_shape, jnp.float32)
    out, lse = launch(
        "paged_decode",
        paged_decode_kernel,
        lambda config: (tiles, spec.heads_kv, splits, spec.batch),
        operands,
        in_specs,
        (out, lse),
        (of_split(out, spec.group_size), of_split(lse, spec.group_size)),
        decode_arguments(spec, k_pages, v_pages, backend)
        | {"num_splits": splits, "has_sinks": has_sinks, "block_rows": rows},
        spec,
        backend,
    )
    if splits == 1:
        return out[0], lse[0]
    return combine(out, lse, spec.merge(splits), sinks, backend=backend)
