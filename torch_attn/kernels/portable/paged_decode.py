"""Paged decode: attention of a few new tokens over a paged KV cache, split over the keys.

Each split gives a partial output and its log-sum-exp; `kernels.merge` merges them.
Flash-Decoding (Dao et al. 2023) over the pages of PagedAttention (Kwon et al. 2023).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_attn.kernels.library.arguments import cache_of, decode_arguments
from torch_attn.kernels.library.new_tokens import (
    ends_of,
    tree_argument,
    tree_mask_of_words,
    tree_words,
)
from torch_attn.kernels.library.pages import (
    keys_of_sequence,
    locate_keys,
    share_of_tiles,
    tiles_at_edges,
)
from torch_attn.kernels.library.quantized import (
    add_pv,
    load_keys,
    load_q,
    load_values,
    locate_pools,
    no_keys,
    normalise,
    scores,
    store_out,
    with_packed_pools,
)
from torch_attn.kernels.library.scores import attention_mask
from torch_attn.kernels.library.softmax import online_softmax_update
from torch_attn.kernels.library.terms import DecodeTerms, load_slopes, penalties, with_stride
from torch_attn.kernels.merge import merge_splits
from torch_attn.kernels.portable import invariant
from torch_attn.kernels.portable.cascade import (
    attend_to_shared_pages,
    cascade_argument,
    join_prefix,
)
from torch_attn.launch import KernelCall, Prepared, config_of, launch
from torch_attn.targets import num_sms
from twin_attention.contract.operands import DecodeOperands
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.splits import block_rows, choose_splits


class Parts(NamedTuple):
    """Results of each split: outs [splits, B, T, Hq, Dv], lses [splits, B, Hq, T], float32."""

    outs: Any
    lses: Any


@triton.jit(do_not_specialize=["num_pages", "max_pages", "window_left"])
def paged_decode_kernel(
    q_ptr, cache, terms, tree, cascade, out_ptr, lse_ptr, parts, q_strides, batch_size, num_pages,
    max_pages, num_splits, rule, window_left, HEADS_KV: tl.constexpr, TOKENS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UPCAST: tl.constexpr, PAST_2G: tl.constexpr,
    PDL: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_ROWS rows of one kv head over one split of the keys.

    Row r is token ``r // GROUP_SIZE`` of query head ``r % GROUP_SIZE`` of the group, so that keys
    and values are read once for all of them. Operands: q [B, T, Hq, D] with the given strides; a
    `Cache`; `DecodeTerms`; a `TreeEnds` and a `Cascade`, each or None; out [B, T, Hq, Dv] and lse
    [B, Hq, T] (float32, natural log), contiguous. If more than one split has keys, each of them
    writes its `Parts` instead; in a cascade all splits do. With a single split there are none.
    Grid: (row tiles, kv heads, batch) in one axis, row tiles fastest, and splits. Loop invariant:
    `online_softmax_update`. Accumulation: float32, exponents in base 2, p cast to the products'
    dtype. A row that sees no key has lse -inf, or its sink. PAST_2G: a head of a pool spans 2^31
    elements or more. BLOCK_ROWS and BLOCK_KV are powers of two, at least 16.

    UPCAST: the pools are 8-bit, given as packed pairs of columns, and the products are in float16;
    HEAD_DIM and HEAD_DIM_V count pairs. q, k, v, acc and out are tuples of tiles (`quantized`).

    PDL: a launch that depends on this one may begin to start. In a cascade this one has started
    early itself, and waits for the shared keys. The first split, which always has keys, continues
    their running softmaxes.
    """
    if PDL:
        gdc_launch_dependents()
    # Locate the rows and the split's share of the keys.
    num_tiles: tl.constexpr = (TOKENS * GROUP_SIZE + BLOCK_ROWS - 1) // BLOCK_ROWS
    tile = tl.program_id(0) % num_tiles
    head_kv = (tl.program_id(0) // num_tiles % HEADS_KV).to(tl.int64)
    batch = (tl.program_id(0) // num_tiles // HEADS_KV).to(tl.int64)
    split = tl.program_id(1) if parts is not None else 0
    capacity = max_pages * cache.page_size
    begin, length = keys_of_sequence(cache.lens, batch, capacity, TOKENS, window_left)
    if cascade is not None:
        if PDL:
            gdc_wait()
        begin = tl.load(cascade.prefixes + batch)
    first, count, total = share_of_tiles(begin, length, split, num_splits, BLOCK_KV)
    # A split with all tiles gives the result, any other a part.
    is_result = (split == 0) & (count == total)
    if cascade is not None and parts is not None:
        is_result = False
    table_ptr = cache.tables + batch * cache.table_stride
    k_base, v_base, scale = locate_pools(cache, head_kv, rule.scale)

    # Load the queries; they stay.
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = row // GROUP_SIZE
    head = head_kv * GROUP_SIZE + row % GROUP_SIZE
    is_row = token < TOKENS
    place = batch, token.to(tl.int64), head
    q, scale = load_q(
        q_ptr, place, q_strides, is_row, scale, cache,
        HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, UPCAST,
    )  # fmt: skip
    diagonal = length - TOKENS
    position = diagonal + token
    if tree is not None:
        words = tree_words(tree.ends + batch * tree.stride, token, TOKENS)
    slope = load_slopes(terms, batch, head, is_row)
    m_i, l_i, acc = no_keys(BLOCK_ROWS, BLOCK_DV, UPCAST)

    # Visit the tiles of keys; with a tree, tiles of older keys alone have a loop without a mask.
    RIGHT: tl.constexpr = 0 if TOKENS > 1 else None
    full = 0
    if tree is not None:
        _, full, _ = tiles_at_edges(diagonal - 1, length - 1, first, count, None, BLOCK_KV)
    for masked in tl.static_range(1 if tree is None else 0, 2):
        for index in tl.range(full if masked else 0, count if masked else full):
            start = (first + index) * BLOCK_KV
            key = start + tl.arange(0, BLOCK_KV)
            exists = key < length
            if window_left is not None:
                exists = exists & (key >= begin)
            page, slot = locate_keys(
                table_ptr, start, length, num_pages, cache.page_size, BLOCK_KV, PAST_2G
            )
            # s = scale · q kᵀ
            k = load_keys(
                k_base, (page, slot), cache, exists, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, UPCAST
            )
            added = penalties(slope, position, key)
            s = scores(q, k, scale, rule.softcap, rule.scale_first, added)
            if masked and tree is None:
                s = attention_mask(s, position[:, None], key[None, :], length, window_left, RIGHT)
            elif masked:
                s = tree_mask_of_words(s, words, key - diagonal, TOKENS)
            # p = exp(s - max), and rescale what was accumulated
            p, alpha, m_i, l_i = online_softmax_update(
                s, m_i, l_i, rule.exp2_scale, slope is not None
            )
            acc = [x * alpha[:, None] for x in acc]
            p = p.to(q[0].dtype)
            # acc += p v
            v = load_values(v_base, (page, slot), cache, exists, k, HEAD_DIM_V, BLOCK_DV, UPCAST)
            acc = add_pv(acc, p, v)

    heads_q: tl.constexpr = HEADS_KV * GROUP_SIZE
    lse_row = (batch * heads_q + head) * TOKENS + token
    out_row = (batch * TOKENS + token) * heads_q + head
    rows = batch_size * TOKENS * heads_q
    if cascade is not None:
        keys = begin if split == 0 else 0
        acc, m_i, l_i = join_prefix(
            cascade, keys, rows, lse_row, out_row, is_row, acc, m_i, l_i, HEAD_DIM_V, BLOCK_DV
        )

    # Normalise and store.
    writes = is_row & is_result
    sink = None
    if terms.sinks is not None:
        sink = tl.load(terms.sinks + head, mask=writes, other=float("-inf"))
    out, lse = normalise(acc, m_i, l_i, sink, cache, head_kv, slope is not None)
    row_size: tl.constexpr = HEAD_DIM_V * len(out)
    tl.store(lse_ptr + lse_row, lse, mask=writes)
    store_out(out_ptr, out, (out_row,), (row_size,), writes, HEAD_DIM_V, BLOCK_DV)
    if parts is not None:
        writes = is_row
        if cascade is None:
            writes = is_row & (count > 0) & (count < total)
        first_row = split.to(tl.int64) * rows
        tl.store(parts.lses + first_row + lse_row, lse, mask=writes)
        outs_ptr = parts.outs + first_row * row_size
        store_out(outs_ptr, out, (out_row,), (row_size,), writes, HEAD_DIM_V, BLOCK_DV)


def paged_decode(
    operands: DecodeOperands[Tensor], spec: DecodeSpec, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Launch `paged_decode_kernel`, and `combine` for several splits.

    Return out [B, T, Hq, Dv] in q's dtype and lse [B, Hq, T] float32, contiguous.
    """
    if spec.batch_invariant:
        return invariant.paged_fwd(operands, spec, backend)
    config = config_of("paged_decode", spec, backend, operands.q.device)
    operands = with_packed_pools(operands, spec.cache)
    q = operands.q
    splits = choose_splits(spec, config, num_sms(q.device, backend.target))
    shape = (spec.batch, spec.tokens, spec.heads_q, spec.head_dim_v)
    lse_shape = (spec.batch, spec.heads_q, spec.tokens)
    out = q.new_empty(shape)
    lse = q.new_empty(lse_shape, dtype=torch.float32)
    parts = None
    if splits > 1:
        parts = Parts(lse.new_empty((splits, *shape)), lse.new_empty((splits, *lse_shape)))
    shared = attend_to_shared_pages(operands, spec, config.block_kv, backend)
    cascade, tiles = shared or (None, None)
    terms = DecodeTerms(operands.sinks, operands.alibi_slopes)

    launch(
        "paged_decode",
        paged_decode_kernel,
        _prepare,
        (q, cache_of(operands), terms, ends_of(operands), cascade, out, lse, parts),
        spec,
        backend,
        splits,
        tiles,
        config.block_kv,
        launch_pdl=cascade is not None and backend.target == "sm90",
    )
    if parts is not None:
        block_kv = config.block_kv if cascade is None else None
        merge_splits(*parts, out, lse, operands, spec, block_kv, backend)
    return out, lse


def _prepare(call: KernelCall) -> Prepared:
    spec, (splits, tiles, block_kv) = call.spec, call.constants
    assert call.config.block_kv == block_kv, "the merge counts other tiles"
    q, cache, terms, tree, cascade, *_ = call.layouts
    rows = block_rows(spec, call.config)
    arguments = decode_arguments(spec, call.target, q, cache)
    programs = triton.cdiv(spec.rows, rows) * spec.heads_kv * spec.batch
    return (programs, splits), arguments | {
        "terms": with_stride(terms),
        "tree": tree_argument(tree),
        "cascade": cascade_argument(cascade, tiles),
        "batch_size": spec.batch,
        "num_splits": splits,
        "TOKENS": spec.tokens,
        "PDL": (splits > 1 or cascade is not None) and call.target == "sm90",
        "BLOCK_ROWS": rows,
    }
