"""Paged decode: attention of a few new tokens over a cache in pages, split over the keys.

Each split of a sequence's keys gives a partial output and its log-sum-exp; `combine` merges them.
Flash-Decoding (Dao et al. 2023) over the pages of PagedAttention (Kwon et al. 2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from torch_attn.kernels.portable.combine import merge_splits
from torch_attn.kernels.portable.pages import (
    keys_of_sequence,
    load_columns,
    load_keys,
    locate_keys,
    share_of_tiles,
    store_columns,
)
from torch_attn.kernels.portable.quantized import to_float16, unpack
from torch_attn.kernels.portable.scores import attention_mask, attention_scores
from torch_attn.kernels.portable.softmax import LN2, add_sink, online_softmax_update
from torch_attn.launch import (
    as_words,
    config_for,
    decode_arguments,
    launch,
    multiprocessors,
)
from twin_attention.contract.spec import DecodeSpec
from twin_attention.targets.config import block_rows, choose_splits


@triton.jit(do_not_specialize=["num_pages", "max_pages", "window_left"])
def paged_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    lens_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    lse_ptr,
    outs_ptr,
    lses_ptr,
    q_batch,
    q_token,
    q_head,
    k_scale_head,
    v_scale_head,
    tables_batch,
    batch_size,
    num_pages,
    max_pages,
    num_splits,
    scale,
    exp2_scale,
    softcap,
    window_left,
    K_PAGE: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    HEADS_KV: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    FLOAT8: tl.constexpr,
    WIDEN_LOW: tl.constexpr,
    WIDEN_HIGH: tl.constexpr,
    PAST_2G: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """One program computes BLOCK_ROWS rows of one kv head over one split of the keys.

    Row r is token ``r // GROUP_SIZE`` of query head ``r % GROUP_SIZE`` of the group, so that the
    keys and values are read once for all of them. Operands: q [B, T, Hq, D], pools k
    [P, page_size, Hkv, D] and v [P, page_size, Hkv, Dv] with the given strides and a contiguous
    last dimension; tables [B, max_pages] and lens [B], int32; sinks [Hq] and scales [] or [Hkv],
    float32; out [B, T, Hq, Dv] and lse [B, Hq, T] (float32, natural log), contiguous. Where more
    than one split has keys, each of them writes its part of outs [splits, B, T, Hq, Dv] and lses
    [splits, B, Hq, T] instead, float32 and contiguous; ONE_SPLIT: they are not there. Grid: (row
    tiles, kv heads, batch) in one axis, row tiles fastest, and splits. Loop invariant:
    `online_softmax_update`. Accumulation: float32, exponents in base 2, p cast to the products'
    dtype. A row that sees no key has lse -inf, or its sink. PAST_2G: the pools reach past 2^31
    elements. BLOCK_ROWS and BLOCK_KV are powers of two, at least 16.

    QUANTIZED: the products are in float16, and the pools are given as int16 words of two columns.
    HEAD_DIM and HEAD_DIM_V count words; even and odd columns are tiles of their own.

    PDL: a launch that depends on this one may begin to start (CUDA's programmatic dependent
    launch).
    """
    if PDL:
        gdc_launch_dependents()
    # Locate the rows and the split's share of the keys.
    num_tiles: tl.constexpr = (TOKENS * GROUP_SIZE + BLOCK_ROWS - 1) // BLOCK_ROWS
    tile = tl.program_id(0) % num_tiles
    head_kv = tl.program_id(0) // num_tiles % HEADS_KV
    batch = (tl.program_id(0) // num_tiles // HEADS_KV).to(tl.int64)
    split = 0 if ONE_SPLIT else tl.program_id(1)
    capacity = max_pages * PAGE_SIZE
    begin, length = keys_of_sequence(lens_ptr, batch, capacity, TOKENS, window_left, HAS_LEFT)
    first, count, total = share_of_tiles(begin, length, split, num_splits, BLOCK_KV)
    # A split with all tiles gives the result, else each gives a part that `combine` merges.
    is_result = (split == 0) & (count == total)
    table_ptr = tables_ptr + batch * tables_batch
    k_base = k_ptr + head_kv.to(tl.int64) * K_HEAD
    v_base = v_ptr + head_kv.to(tl.int64) * V_HEAD
    if QUANTIZED:
        scale *= tl.load(k_scale_ptr + head_kv * k_scale_head)

    # Load the queries; they stay.
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = row // GROUP_SIZE
    head = head_kv * GROUP_SIZE + row % GROUP_SIZE
    is_row = token < TOKENS
    q_rows = q_ptr + batch * q_batch + token * q_token + head * q_head
    if QUANTIZED:
        q = load_columns(q_rows, is_row, 0, 2, HEAD_DIM, BLOCK_D)
        q_odd = load_columns(q_rows, is_row, 1, 2, HEAD_DIM, BLOCK_D)
        q, q_odd, factor = to_float16(q, q_odd)
        scale *= factor[:, None]
        acc_odd = tl.zeros([BLOCK_ROWS, BLOCK_DV], tl.float32)
    else:
        q = load_columns(q_rows, is_row, 0, 1, HEAD_DIM, BLOCK_D)
    position = length - TOKENS + token
    m_i = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DV], tl.float32)

    # Visit the split's tiles of keys.
    for index in tl.range(0, count):
        start = (first + index) * BLOCK_KV
        key = start + tl.arange(0, BLOCK_KV)
        exists = key < length
        page, slot = locate_keys(table_ptr, start, length, num_pages, PAGE_SIZE, BLOCK_KV)
        # s = scale · q kᵀ
        k = load_keys(k_base, page, slot, exists, K_PAGE, K_SLOT, HEAD_DIM, BLOCK_D, PAST_2G)
        if QUANTIZED:
            k, k_odd = unpack(k, FLOAT8, WIDEN_LOW, WIDEN_HIGH)
            s = tl.dot(q_odd, tl.trans(k_odd))
            s = attention_scores(q, k, scale, softcap, SCALE_FIRST, HAS_SOFTCAP, s)
        else:
            s = attention_scores(q, k, scale, softcap, SCALE_FIRST, HAS_SOFTCAP)
        s = attention_mask(
            s, position[:, None], key[None, :], length, window_left, 0, HAS_LEFT, TOKENS > 1
        )
        # p = exp(s - max), and rescale what was accumulated
        p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, exp2_scale)
        acc = acc * alpha[:, None]
        p = p.to(q.dtype)
        # acc += p v
        v = load_keys(v_base, page, slot, exists, V_PAGE, V_SLOT, HEAD_DIM_V, BLOCK_DV, PAST_2G)
        if QUANTIZED:
            v, v_odd = unpack(v, FLOAT8, WIDEN_LOW, WIDEN_HIGH)
            acc_odd = tl.dot(p, v_odd, acc_odd * alpha[:, None])
        acc = tl.dot(p, v, acc)

    # Normalise and store.
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=is_row & is_result, other=float("-inf"))
        alpha, m_i, l_i = add_sink(sink, m_i, l_i)
        acc = acc * alpha[:, None]
        if QUANTIZED:
            acc_odd = acc_odd * alpha[:, None]
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    lse = m_i * LN2 + tl.log(l_safe)
    acc = acc / l_safe[:, None]
    heads_q: tl.constexpr = HEADS_KV * GROUP_SIZE
    lse_row = (batch * heads_q + head) * TOKENS + token
    out_row = (batch * TOKENS + token) * heads_q + head
    if QUANTIZED:
        v_scale = tl.load(v_scale_ptr + head_kv * v_scale_head)
        acc = acc * v_scale
        acc_odd = acc_odd / l_safe[:, None] * v_scale
    width: tl.constexpr = 2 if QUANTIZED else 1
    out_size: tl.constexpr = HEAD_DIM_V * width
    writes = is_row & is_result
    tl.store(lse_ptr + lse_row, lse, mask=writes)
    store_columns(out_ptr + out_row * out_size, acc, writes, 0, width, HEAD_DIM_V, BLOCK_DV)
    if QUANTIZED:
        store_columns(out_ptr + out_row * out_size, acc_odd, writes, 1, width, HEAD_DIM_V, BLOCK_DV)
    if not ONE_SPLIT:
        writes = is_row & (count > 0) & (count < total)
        rows = batch_size * TOKENS * heads_q
        lses_ptr += split.to(tl.int64) * rows
        outs_ptr += split.to(tl.int64) * rows * out_size
        tl.store(lses_ptr + lse_row, lse, mask=writes)
        store_columns(outs_ptr + out_row * out_size, acc, writes, 0, width, HEAD_DIM_V, BLOCK_DV)
        if QUANTIZED:
            store_columns(
                outs_ptr + out_row * out_size, acc_odd, writes, 1, width, HEAD_DIM_V, BLOCK_DV
            )


def paged_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    spec: DecodeSpec,
) -> tuple[Tensor, Tensor]:
    """Launch `paged_decode_kernel`, and `combine` where there is more than one split.

    Returns:
        out [B, T, Hq, Dv] in q's dtype and lse [B, Hq, T] float32, both contiguous.
    """
    target, config = config_for("paged_decode", spec, q.device)
    if spec.cache.is_quantized:
        k_pages, v_pages = as_words(k_pages), as_words(v_pages)
    rows = block_rows(spec, config)
    splits = choose_splits(spec, config, multiprocessors(q.device, target))
    tiles = triton.cdiv(spec.tokens * spec.group_size, rows)
    overlap = splits > 1 and target == "sm90"
    shape = (spec.batch, spec.tokens, spec.heads_q, spec.head_dim_v)
    lse_shape = (spec.batch, spec.heads_q, spec.tokens)
    out = torch.empty(shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    outs = lses = None
    if splits > 1:
        outs = torch.empty((splits, *shape), dtype=torch.float32, device=q.device)
        lses = torch.empty((splits, *lse_shape), dtype=torch.float32, device=q.device)

    def problem():
        return decode_arguments(spec, q, k_pages, v_pages, block_tables, k_scale, v_scale) | {
            "num_splits": splits,
            "ONE_SPLIT": splits == 1,
            "PDL": overlap,
            "HAS_SINKS": sinks is not None,
            "BLOCK_ROWS": rows,
        }

    launch(
        "paged_decode",
        paged_decode_kernel,
        lambda config: (tiles * spec.heads_kv * spec.batch, splits),
        (
            q,
            k_pages,
            v_pages,
            block_tables,
            seq_lens,
            sinks,
            k_scale,
            v_scale,
            out,
            lse,
            outs,
            lses,
        ),
        problem,
        spec,
        splits,
    )
    if outs is not None and lses is not None:
        merge_splits(outs, lses, out, lse, seq_lens, sinks, spec, config.block_kv, overlap)
    return out, lse
