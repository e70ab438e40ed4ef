"""Paged decode: attention of a few new tokens over a paged KV cache, split over the keys."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_attn.integers import quotient, remainder
from pallas_attn.kernels.library.arguments import decode_arguments
from pallas_attn.kernels.library.new_tokens import tree_mask_of_words, tree_words
from pallas_attn.kernels.library.pages import (
    keys_of_sequence,
    locate_keys,
    share_of_tiles,
    tiles_at_edges,
)
from pallas_attn.kernels.library.quantized import (
    add_pv,
    load_keys,
    load_q,
    load_values,
    no_keys,
    normalise,
    scores,
    store_out,
    with_packed_pools,
)
from pallas_attn.kernels.library.scores import attention_mask
from pallas_attn.kernels.library.softmax import online_softmax_update
from pallas_attn.kernels.library.terms import DecodeTerms, load_slopes, penalties
from pallas_attn.kernels.library.tiles import arange
from pallas_attn.kernels.portable.cascade import Cascade, attend_to_shared_pages, join_prefix
from pallas_attn.kernels.portable.combine import merge_splits
from pallas_attn.launch import ALL, COLUMNS, block_spec, config_of, launch
from pallas_attn.targets import num_sms
from twin_attention.contract.operands import DecodeOperands
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.splits import block_rows, choose_splits


def paged_decode_kernel(
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    len_ref,
    terms,
    k_scale_ref,
    v_scale_ref,
    tree_ref,
    cascade,
    out_ref,
    lse_ref,
    outs_ref,
    lses_ref,
    *,
    num_splits,
    block_shared,
    rule,
    window_left,
    tokens,
    group_size,
    head_dim,
    head_dim_v,
    block_d,
    block_dv,
    upcast,
    block_rows,
    block_kv,
):
    """One program computes block_rows rows of one kv head over one split of the keys.

    Operands, of this program's batch and kv head: q [T, group, D], pools k [P, page_size, D] and v
    [P, page_size, Dv], table [max_pages] and len [], int32; `DecodeTerms` of [group]; scales [],
    float32, or None; tree [T], int32, or None, the ends of `tree_mask`; out [T, group, Dv] and lse
    [group, T] (float32, natural log); outs [T, group, Dv] and lses [group, T] float32, None with a
    single split. Grid: (row tiles, kv heads, batch, splits).

    cascade: the `Cascade` of this sequence, with its prefix [], accs [N, T, group, Dv], maxima and
    sums [N, group, T]; or None. block_shared: keys of a tile of shared keys.
    """
    # Locate the rows and the split's share of the keys.
    tile, split = pl.program_id(0), pl.program_id(3)
    (num_pages, page_size, _), scale = k_ref.shape, rule.scale
    capacity = table_ref.shape[0] * page_size
    begin, length = keys_of_sequence(len_ref, capacity, tokens, window_left)
    if cascade is not None:
        begin = cascade.prefixes[...]
    first, count, total = share_of_tiles(begin, length, split, num_splits, block_kv)
    # A split with all tiles gives the result; otherwise each gives a part that `combine` merges.
    is_result = (split == 0) & (count == total)
    if cascade is not None and outs_ref is not None:
        is_result = False
    if k_scale_ref is not None:
        scale = scale * k_scale_ref[...]

    # Load the queries; they stay.
    row = tile * block_rows + arange(block_rows)
    token, head = quotient(row, group_size), remainder(row, group_size)
    is_row = token < tokens
    q, scale = load_q(
        q_ref, (token, head), is_row, scale, v_ref, head_dim, head_dim_v, block_d, block_dv, upcast
    )
    diagonal = length - tokens
    position = diagonal + token
    slope = load_slopes(terms, head)
    m_i, l_i, acc = no_keys(block_rows, block_dv, upcast)

    # Visit the tiles of keys; with a tree, tiles of older keys alone have a loop without a mask.
    full = 0
    if tree_ref is not None:
        words = tree_words(tree_ref, token, tokens)
        full = tiles_at_edges(diagonal - 1, length - 1, first, count, None, block_kv).full
    for masked in (False, True)[1 if tree_ref is None else 0 :]:

        def visit(index, carry, masked=masked):
            m_i, l_i, acc = carry
            start = (first + lax.convert_element_type(index, jnp.int32)) * block_kv
            key = start + arange(block_kv)
            exists = key < length
            if window_left is not None:
                exists &= key >= begin
            page, slot = locate_keys(table_ref, start, length, num_pages, page_size, block_kv)
            # s = scale · q kᵀ
            k = load_keys(
                k_ref, (page, slot), v_ref, exists, head_dim, head_dim_v, block_d, block_dv, upcast
            )
            added = penalties(slope, position, key)
            s = scores(q, k, rule._replace(scale=scale), added)
            if masked and tree_ref is None:
                s = attention_mask(
                    s, position[:, None], key[None, :], length, window_left,
                    0 if tokens > 1 else None,
                )  # fmt: skip
            elif masked:
                s = tree_mask_of_words(s, words, key - diagonal, tokens)
            # p = exp(s - max), and rescale what was accumulated
            p, alpha, m_i, l_i = online_softmax_update(
                s, m_i, l_i, rule.exp2_scale, slope is not None
            )
            acc = [x * alpha[:, None] for x in acc]
            p = p.astype(q[0].dtype)
            # acc += p v
            v = load_values(v_ref, (page, slot), exists, k, head_dim_v, block_dv, upcast)
            acc = add_pv(acc, p, v)
            return m_i, l_i, acc

        bounds = (full, count) if masked else (0, full)
        m_i, l_i, acc = lax.fori_loop(*bounds, visit, (m_i, l_i, acc))

    if cascade is not None:
        keys = jnp.where(split == 0, begin, 0)
        m_i, l_i, acc = join_prefix(
            cascade, block_shared, keys, token, head, is_row, (m_i, l_i, acc), head_dim_v, block_dv
        )

    # Normalise and store.
    sink = None
    if terms.sinks is not None:
        sink = jnp.where(is_result, terms.sinks[head], float("-inf"))
    out, lse = normalise(acc, m_i, l_i, sink, v_scale_ref, slope is None)
    writes = is_row & is_result
    plt.store(lse_ref.at[head, token], lse, mask=writes)
    store_out(out_ref, out, (token, head), writes, head_dim_v, block_dv)
    if outs_ref is not None:
        writes = is_row
        if cascade is None:
            writes = is_row & (count > 0) & (count < total)
        plt.store(lses_ref.at[head, token], lse, mask=writes)
        store_out(outs_ref, out, (token, head), writes, head_dim_v, block_dv)


def paged_decode(
    operands: DecodeOperands[Array], spec: DecodeSpec, backend: Backend
) -> tuple[Array, Array]:
    config = config_of("paged_decode", spec, backend)
    rows = block_rows(spec, config)
    splits = choose_splits(spec, config, num_sms(backend.target))
    operands = with_packed_pools(operands, spec.cache)
    if spec.cache.latent:
        operands = operands._replace(v_scale=operands.k_scale)
    q, k_pages, v_pages, block_tables, seq_lens, *optional = operands
    sinks, k_scale, v_scale, tree_ends, slopes = optional
    found = attend_to_shared_pages(operands, spec, config.block_kv, backend)
    cascade, block_shared = found or (None, None)
    shape = (spec.batch, spec.tokens, spec.heads_q, spec.head_dim_v)
    lse_shape = (spec.batch, spec.heads_q, spec.tokens)
    out = jax.ShapeDtypeStruct(shape, q.dtype)
    lse = jax.ShapeDtypeStruct(lse_shape, jnp.float32)
    outs = lses = None
    if splits > 1:
        outs = jax.ShapeDtypeStruct((splits, *shape), jnp.float32)
        lses = jax.ShapeDtypeStruct((splits, *lse_shape), jnp.float32)
    heads = "head", spec.group_size
    of_tokens, of_rows = ("batch", ALL, heads, COLUMNS), ("batch", heads, ALL)
    of_pool = ALL, ALL, "head", COLUMNS

    def place(tile, head, batch, split):
        return {"head": head, "batch": batch, "split": split}

    def of(x, *axes):
        return block_spec(x, place, *axes)

    of_slopes = None if slopes is None else of(slopes, *("batch", heads)[-slopes.ndim :])
    of_terms = DecodeTerms(of(sinks, heads), of_slopes)
    of_cascade = None
    if cascade is not None:
        of_statistics = of(cascade.maxima, ALL, *of_rows)
        of_cascade = Cascade(
            of(cascade.prefixes, "batch"), of(cascade.accs, ALL, *of_tokens), *[of_statistics] * 2
        )
    out, lse, outs, lses = launch(
        "paged_decode",
        paged_decode_kernel,
        lambda config: (pl.cdiv(spec.rows, rows), spec.heads_kv, spec.batch, splits),
        (*operands[:5], DecodeTerms(sinks, slopes), k_scale, v_scale, tree_ends, cascade),
        (
            of(q, *of_tokens), of(k_pages, *of_pool), of(v_pages, *of_pool),
            of(block_tables, "batch", ALL), of(seq_lens, "batch"), of_terms, of(k_scale, "head"),
            of(v_scale, "head"), of(tree_ends, "batch", ALL), of_cascade,
        ),
        (out, lse, outs, lses),
        (
            of(out, *of_tokens), of(lse, *of_rows), of(outs, "split", *of_tokens),
            of(lses, "split", *of_rows),
        ),
        decode_arguments(spec, k_pages, backend.target)
        | {
            "tokens": spec.tokens,
            "num_splits": splits,
            "block_shared": block_shared,
            "block_rows": rows,
        },
        spec,
        backend,
    )  # fmt: skip
    if outs is not None and lses is not None:
        block_kv = config.block_kv if cascade is None else None
        if cascade is not None:
            out = lse = None
        return merge_splits(outs, lses, out, lse, operands, spec, block_kv, backend)
    return out, lse
