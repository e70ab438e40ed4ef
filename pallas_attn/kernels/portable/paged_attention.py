"""Paged attention: any number of new tokens per sequence over a paged KV cache, split by keys."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_attn.integers import quotient, remainder
from pallas_attn.kernels.library.arguments import decode_arguments
from pallas_attn.kernels.library.new_tokens import tree_mask
from pallas_attn.kernels.library.pages import (
    keys_of_tokens,
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
from pallas_attn.kernels.library.query_ranges import bounds_of_queries, keys_in_ranges
from pallas_attn.kernels.library.scores import attention_mask
from pallas_attn.kernels.library.sequences import locate_tokens
from pallas_attn.kernels.library.softmax import online_softmax_update
from pallas_attn.kernels.library.terms import DecodeTerms, load_slopes, penalties
from pallas_attn.kernels.library.tiles import Visible, arange, count_tiles, tile_start
from pallas_attn.kernels.portable.combine import merge_splits
from pallas_attn.launch import ALL, COLUMNS, block_spec, config_of, launch
from pallas_attn.targets import num_sms
from twin_attention.contract.operands import PagedOperands
from twin_attention.contract.paged_spec import PagedSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.splits import (
    block_rows,
    choose_splits,
    decode_kernel,
    num_row_tiles,
    skips_masks,
)


def paged_attention_kernel(
    q_ref,
    k_ref,
    v_ref,
    tables_ref,
    lens_ref,
    cu_seqlens_q_ref,
    terms,
    k_scale_ref,
    v_scale_ref,
    tree_ref,
    ranges_ref,
    out_ref,
    lse_ref,
    *,
    num_splits,
    rule,
    window_left,
    heads_kv,
    group_size,
    head_dim,
    head_dim_v,
    block_d,
    block_dv,
    upcast,
    skips_masks,
    block_rows,
    block_kv,
):
    """One program computes block_rows rows of one kv head of a sequence over one split of the keys.

    Operands, of this program's kv head: q [Tq, group, D], pools k [P, page_size, D] and v [P,
    page_size, Dv]; tables [B, max_pages], lens [B] and cu_seqlens_q [B + 1], int32; `DecodeTerms`
    of [group], slopes also [B, group]; scales [], float32, or None; tree [Tq], int32, or None, the
    ends of `tree_mask`; ranges [Tq, R, 2], int32, or None; out [Tq, group, Dv] and lse [group, Tq]
    (float32, natural log) of its split. Grid: (kv heads, row tiles of `locate_tokens`) in one axis,
    kv heads fastest, and splits.
    """
    # Locate the rows and the split's share of the keys that they see.
    (num_pages, page_size, _), scale, split = k_ref.shape, rule.scale, pl.program_id(1)
    num_sequences, max_pages = tables_ref.shape
    tile = quotient(pl.program_id(0), heads_kv)
    sequence, first_token, tokens, start_row = locate_tokens(
        cu_seqlens_q_ref, tile, q_ref.shape[0], group_size, block_rows
    )
    length = plt.load(
        lens_ref.at[jnp.minimum(sequence, num_sequences - 1)],
        mask=sequence < num_sequences,
        other=0,
    )
    length = jnp.minimum(jnp.maximum(length, 0), max_pages * page_size)
    first = quotient(start_row, group_size)
    last = jnp.minimum(quotient(start_row + block_rows - 1, group_size), tokens - 1)
    begin, end = keys_of_tokens(length, tokens, first, last, window_left)
    window_begin = begin
    if ranges_ref is not None:
        own = first_token + first + arange(block_rows)
        for bounds in bounds_of_queries(ranges_ref, own, own <= first_token + last, length):
            begin, end = jnp.minimum(begin, bounds.begin), jnp.maximum(end, bounds.end)
    first_tile, count, _ = share_of_tiles(begin, end, split, num_splits, block_kv)
    if k_scale_ref is not None:
        scale = scale * k_scale_ref[...]

    # Load the queries; they stay.
    row = start_row + arange(block_rows)
    token, head = quotient(row, group_size), remainder(row, group_size)
    is_row = token < tokens
    q_row = first_token + token
    q, scale = load_q(
        q_ref, (q_row, head), is_row, scale, v_ref, head_dim, head_dim_v, block_d, block_dv, upcast
    )
    diagonal = length - tokens
    position = diagonal + token
    slope = load_slopes(terms, head, sequence)
    m_i, l_i, acc = no_keys(block_rows, block_dv, upcast)

    # Visit the split's tiles of keys; only tiles at the edges are masked.
    visible = Visible(0, count, 0, 0)
    if skips_masks:
        # A tree hides some of the new tokens' keys from later tokens.
        least = diagonal + first if tree_ref is None else diagonal - 1
        visible = tiles_at_edges(least, diagonal + last, first_tile, count, window_left, block_kv)
    for masked in (False, True)[0 if skips_masks else 1 :]:

        def visit(index, carry, masked=masked):
            m_i, l_i, acc = carry
            start = first_tile * block_kv + tile_start(index, visible, block_kv, masked)
            key = start + arange(block_kv)
            exists = key < end
            if masked and ranges_ref is not None:
                shown = keys_in_ranges(
                    ranges_ref, q_row[:, None], is_row[:, None], key[None, :], exists[None, :]
                )
            if masked and window_left is not None:
                in_window = key >= window_begin
                if ranges_ref is not None:
                    in_window |= jnp.max(shown.astype(jnp.int32), 0) > 0
                exists &= in_window
            page, slot = locate_keys(
                tables_ref, start, end, num_pages, page_size, block_kv, sequence
            )
            # s = scale · q kᵀ
            k = load_keys(
                k_ref, (page, slot), v_ref, exists, head_dim, head_dim_v, block_d, block_dv, upcast
            )
            added = penalties(slope, position, key)
            s = scores(q, k, rule._replace(scale=scale), added)
            unmasked = s
            if masked and tree_ref is None:
                s = attention_mask(s, position[:, None], key[None, :], end, window_left, 0)
            elif masked:
                s = tree_mask(s, tree_ref, first_token, token, key - diagonal, exists)
            if masked and ranges_ref is not None:
                s = jnp.where(shown, unmasked, s)
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

        tiles = count_tiles(visible, masked)
        m_i, l_i, acc = lax.fori_loop(0, tiles, visit, (m_i, l_i, acc))

    # Normalise and store.
    sink = None
    if terms.sinks is not None:
        sink = terms.sinks[head]
    out, lse = normalise(acc, m_i, l_i, sink, v_scale_ref, slope is None)
    plt.store(lse_ref.at[head, q_row], lse, mask=is_row)
    store_out(out_ref, out, (q_row, head), is_row, head_dim_v, block_dv)


def paged_attention(
    operands: PagedOperands[Array], spec: PagedSpec, backend: Backend
) -> tuple[Array, Array]:
    kernel = decode_kernel(spec)
    config = config_of(kernel, spec, backend)
    rows, group, heads_kv = block_rows(spec, config), spec.group_size, spec.heads_kv
    splits = choose_splits(spec, config, num_sms(backend.target))
    operands = with_packed_pools(operands, spec.cache)
    q, k_pages, v_pages, block_tables, seq_lens, offsets, *optional = operands
    sinks, k_scale, v_scale, tree_ends, slopes, q_ranges = optional
    if spec.cache.latent:
        v_scale = k_scale
    if splits > 1:
        sinks = None  # they count once, in the merge
    shape = (splits, spec.tokens, spec.heads_q, spec.head_dim_v)
    outs = jax.ShapeDtypeStruct(shape, q.dtype if splits == 1 else jnp.float32)
    lses = jax.ShapeDtypeStruct((splits, spec.heads_q, spec.tokens), jnp.float32)

    heads, of_pool = ("head", group), (ALL, ALL, "head", COLUMNS)

    def place(program, split):
        return {"head": remainder(program, heads_kv), "split": split}

    def of(x, *axes):
        return block_spec(x, place, *axes)

    of_slopes = None if slopes is None else of(slopes, *(ALL, heads)[-slopes.ndim :])
    of_terms = DecodeTerms(of(sinks, heads), of_slopes)
    outs, lses = launch(
        kernel,
        paged_attention_kernel,
        lambda config: (num_row_tiles(spec, rows) * heads_kv, splits),
        (*operands[:6], DecodeTerms(sinks, slopes), k_scale, v_scale, tree_ends, q_ranges),
        (
            of(q, ALL, heads, COLUMNS), of(k_pages, *of_pool), of(v_pages, *of_pool),
            of(block_tables, ALL, ALL), of(seq_lens, ALL), of(offsets, ALL), of_terms,
            of(k_scale, "head"), of(v_scale, "head"), of(tree_ends, ALL),
            of(q_ranges, ALL, ALL, ALL),
        ),
        (outs, lses),
        (of(outs, "split", ALL, heads, COLUMNS), of(lses, "split", heads, ALL)),
        decode_arguments(spec, k_pages, backend.target)
        | {
            "num_splits": splits,
            "heads_kv": heads_kv,
            "skips_masks": skips_masks(spec),
            "block_rows": rows,
        },
        spec,
        backend,
    )  # fmt: skip
    if splits == 1:
        return outs[0], lses[0]
    outs, lses = outs[:, None], lses[:, None]
    out, lse = merge_splits(outs, lses, None, None, operands, spec, None, backend)
    return out[0], lse[0]
