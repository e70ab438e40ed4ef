"""Forwards with `batch_invariant`: one kernel, so one order of sums, for all four functions.

What decides a row's bits is in docs/semantics.md. Products round alike in tiles of any size.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.arguments import cache_of, decode_arguments
from torch_attn.kernels.library.pages import (
    Cache,
    PoolStrides,
    load_rows_at,
    locate_keys,
    store_rows_at,
)
from torch_attn.kernels.library.schedule import longest_first
from torch_attn.kernels.library.scores import attention_mask, attention_scores
from torch_attn.kernels.library.sequences import (
    Offsets,
    count_sequence_tiles,
    locate_tokens,
    offsets_of,
    rows_of_sequence,
)
from torch_attn.kernels.library.softmax import LN2
from torch_attn.kernels.library.spans import (
    PARTS,
    SPAN,
    add_block,
    add_parts,
    finish_rows,
    join_rows,
    update_maximum,
)
from torch_attn.kernels.library.tiles import padded_head_dim, visible_tiles
from torch_attn.launch import KernelCall, Prepared, config_of, flash_arguments, launch
from torch_attn.layouts import Layout
from torch_attn.targets import num_sms
from twin_attention.contract.operands import AttentionOperands, DecodeOperands, PagedOperands
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets import invariant
from twin_attention.targets.family import Backend
from twin_attention.targets.schedule import heads_together, programs_of_sm
from twin_attention.targets.splits import decode_kernel

UNSPECIALIZED = [
    "num_tokens", "num_keys", "num_sequences", "num_pages", "max_pages", "together",
    "window_left", "window_right",
]  # fmt: skip


class SpanParts(NamedTuple):
    """Running softmaxes of each span, float32: maxima and sums [spans, rows], accs [.., Dv]."""

    maxima: Any
    sums: Any
    accs: Any
    num_rows: Any = None


@triton.jit(do_not_specialize=UNSPECIALIZED)
def invariant_kernel(
    q_ptr, cache, offsets, sinks_ptr, out_ptr, lse_ptr, row_max_ptr, parts, q_strides, num_tokens,
    num_keys, num_sequences, num_pages, max_pages, together, rule, window_left, window_right,
    HEADS_KV: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, PAST_2G: tl.constexpr, FOLDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_ROWS rows of one kv head of a sequence, over all keys or a span.

    Row r of a sequence is its token ``r // GROUP_SIZE`` of query head ``r % GROUP_SIZE`` of the
    group. Operands: q [B, S, Hq, D], or [T, Hq, D] of packed tokens, with `Offsets`; a `Cache`,
    where without tables batch elements are pages; out, lse and row_max as in `flash_fwd_kernel`;
    or `SpanParts`. num_sequences is None without packed tokens. Grid: (row tiles · kv heads ·
    batch), in the order of `longest_first`, and spans with parts. Accumulation: float32, exponents
    in base 2, p cast to v's dtype. FOLDS: there may be several spans, and no parts. BLOCK_ROWS and
    BLOCK_KV are powers of two, and BLOCK_KV divides a span.
    """
    # Locate the rows and the sequence's keys.
    num_tiles = count_sequence_tiles(num_tokens * GROUP_SIZE, num_sequences, BLOCK_ROWS)
    index, tile = longest_first(num_tiles, together)
    head_kv, batch = (index % HEADS_KV).to(tl.int64), (index // HEADS_KV).to(tl.int64)
    sequence, first_token, tokens, start_row = batch, 0, num_tokens, tile * BLOCK_ROWS
    first_key, length, table_ptr = 0, num_keys, None
    if num_sequences is not None:
        sequence, first_token, tokens, start_row = locate_tokens(
            offsets.q, tile, num_tokens, num_sequences, GROUP_SIZE, BLOCK_ROWS
        )
    if cache.tables is not None:
        exists = True if num_sequences is None else sequence < num_sequences
        length = tl.load(cache.lens + sequence, mask=exists, other=0)
        length = tl.minimum(tl.maximum(length, 0), max_pages * cache.page_size)
        table_ptr = cache.tables + sequence.to(tl.int64) * cache.table_stride
    elif num_sequences is not None:
        first_key, length = rows_of_sequence(offsets.kv, sequence, num_keys, num_sequences, 0)

    # Load the queries; they stay.
    row = start_row + tl.arange(0, BLOCK_ROWS)
    token, head = row // GROUP_SIZE, head_kv * GROUP_SIZE + row % GROUP_SIZE
    is_row, query = token < tokens, (first_token + token).to(tl.int64)
    place = (query, head)
    if len(q_strides) == 3:
        place = (batch, query, head)
    q = load_rows_at(q_ptr, place, q_strides, is_row, HEAD_DIM, padded_head_dim(HEAD_DIM))

    # Find the tiles of keys that these queries see; the first token may share a tile before.
    first, diagonal = start_row // GROUP_SIZE, length - tokens
    TOKENS: tl.constexpr = BLOCK_ROWS // GROUP_SIZE + (2 if BLOCK_ROWS % GROUP_SIZE else 0)
    seen = visible_tiles(
        first, tokens, tl.where(first < tokens, length, 0), diagonal, window_left, window_right,
        TOKENS, BLOCK_KV,
    )  # fmt: skip
    begin = 0 if window_left is None else diagonal + first - window_left

    # Add up the keys of all spans, or of one.
    if FOLDS:
        m_i, l_i, acc = _no_keys(BLOCK_ROWS, HEAD_DIM_V)
        end = seen[0] + (seen[1] + seen[2] + seen[3]) * BLOCK_KV
        for span in tl.range(seen[0] // SPAN, tl.cdiv(end, SPAN)):
            m_span, l_span, acc_span = _add_span(
                q, cache, table_ptr, head_kv, batch, first_key, num_pages, diagonal + token, begin,
                length, seen, span, rule, window_left, window_right, HEAD_DIM, HEAD_DIM_V, PAST_2G,
                BLOCK_KV,
            )  # fmt: skip
            m_i, l_i, acc = _fold(m_i, l_i, acc, m_span, l_span, acc_span)
    else:
        m_i, l_i, acc = _add_span(
            q, cache, table_ptr, head_kv, batch, first_key, num_pages, diagonal + token, begin,
            length, seen, tl.program_id(1), rule, window_left, window_right, HEAD_DIM, HEAD_DIM_V,
            PAST_2G, BLOCK_KV,
        )  # fmt: skip

    # Normalise and store.
    heads_q: tl.constexpr = HEADS_KV * GROUP_SIZE
    at = (batch * num_tokens + query) * heads_q + head
    if parts is not None:
        at += tl.program_id(1).to(tl.int64) * parts.num_rows
        has_keys = is_row & (m_i != float("-inf"))
        tl.store(parts.maxima + at, m_i, mask=is_row)
        tl.store(parts.sums + at, l_i, mask=has_keys)
        store_rows_at(
            parts.accs, acc, (at,), (HEAD_DIM_V,), has_keys, HEAD_DIM_V, padded_head_dim(HEAD_DIM_V)
        )
    else:
        at_lse = (batch * heads_q + head) * num_tokens + query
        if row_max_ptr is not None:
            tl.store(row_max_ptr + at_lse, m_i * LN2, mask=is_row)
        _store_rows(
            sinks_ptr, out_ptr, lse_ptr, head, at, at_lse, is_row, m_i, l_i, acc, HEAD_DIM_V
        )


@triton.jit
def _no_keys(ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return a running softmax over no key: maxima in base 2, sums, and sums of values."""
    maxima = tl.full([ROWS], float("-inf"), tl.float32)
    return maxima, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, padded_head_dim(SIZE)], tl.float32)


@triton.jit
def _add_span(
    q, cache, table_ptr, head_kv, batch, first_key, num_pages, position, begin, length, seen, span,
    rule, window_left, window_right, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    PAST_2G: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Return the running softmax over a span's blocks among the tiles `seen`, left to right."""
    k_base, v_base = cache.k + head_kv * cache.k_strides.head, cache.v
    v_base += head_kv * cache.v_strides.head
    m_i, _, acc = _no_keys(q.shape[0], HEAD_DIM_V)
    sums = tl.zeros([q.shape[0], PARTS], tl.float32)
    stop = seen[0] // BLOCK_KV
    for kind in tl.static_range(3):  # tiles before and after the full ones are masked
        start, stop = stop, stop + seen[kind + 1]
        if kind != 0 or window_left is not None:
            block = tl.maximum(start, span * (SPAN // BLOCK_KV))
            for step in tl.range(0, tl.minimum(stop, (span + 1) * (SPAN // BLOCK_KV)) - block):
                start_kv = (block + step) * BLOCK_KV
                key = start_kv + tl.arange(0, BLOCK_KV)
                exists = key < length
                if window_left is not None:
                    exists = exists & (key >= begin)
                page, slot = batch, first_key + key
                if table_ptr is not None:
                    page, slot = locate_keys(
                        table_ptr, start_kv, length, num_pages, cache.page_size, BLOCK_KV, PAST_2G
                    )
                elif PAST_2G:
                    slot = slot.to(tl.int64)
                # s = scale · q kᵀ
                k = load_rows_at(
                    k_base,
                    (page, slot),
                    cache.k_strides,
                    exists,
                    HEAD_DIM,
                    padded_head_dim(HEAD_DIM),
                )
                s = attention_scores(
                    q, k, rule.scale, rule.softcap, rule.scale_first, rule.precision
                )
                if kind != 1:
                    s = attention_mask(
                        s, position[:, None], key[None, :], length, window_left, window_right
                    )
                # p = exp(s - max), and rescale what was accumulated
                p, alpha, m_i = update_maximum(s, m_i, rule.exp2_scale, True)
                sums = add_block(sums, alpha, p)
                acc = acc * alpha[:, None]
                # acc += p v
                v = load_rows_at(
                    v_base, (page, slot), cache.v_strides, exists, HEAD_DIM_V, acc.shape[1]
                )
                acc = tl.dot(p.to(v.dtype), v, acc)
    return m_i, add_parts(sums), acc


@triton.jit
def _fold(m_i, l_i, acc, m_span, l_span, acc_span):
    """Add the running softmax of the next span to that of the spans before."""
    m_i, l_i, alpha, beta = join_rows(m_i, l_i, m_span, l_span)
    return m_i, l_i, tl.fma(acc, alpha[:, None], acc_span * beta[:, None])


@triton.jit
def _store_rows(
    sinks_ptr, out_ptr, lse_ptr, head, at, at_lse, is_row, m_i, l_i, acc, SIZE: tl.constexpr
):
    sink = None
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=is_row, other=float("-inf"))
    factor, lse = finish_rows(m_i, l_i, sink)
    tl.store(lse_ptr + at_lse, lse, mask=is_row)
    out = tl.fma(acc, factor[:, None], 0.0)  # no -0.0
    store_rows_at(out_ptr, out, (at,), (SIZE,), is_row, SIZE, acc.shape[1])


@triton.jit
def merge_spans_kernel(
    out_ptr, lse_ptr, parts, sinks_ptr, num_spans, tokens, HEADS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    """One program merges a row's `SpanParts` from left to right; those at -inf were not written."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    spans = tl.arange(0, BLOCK_SPANS)
    at = spans * parts.num_rows + tl.program_id(0)
    maxima = tl.load(parts.maxima + at, mask=spans < num_spans, other=float("-inf"))
    is_seen = maxima != float("-inf")
    begin = tl.min(tl.where(is_seen, spans, num_spans), 0)
    end = tl.max(tl.where(is_seen, spans + 1, 0), 0)
    m_i, l_i, acc = _no_keys(1, HEAD_DIM_V)
    for span in tl.range(begin, end, num_stages=4):
        at_span = tl.cast(span, tl.int64) * parts.num_rows + row
        m_span = tl.load(parts.maxima + at_span)
        has_keys = m_span != float("-inf")
        l_span = tl.load(parts.sums + at_span, mask=has_keys, other=0.0)
        acc_span = load_rows_at(
            parts.accs, (at_span,), (HEAD_DIM_V,), has_keys, HEAD_DIM_V, acc.shape[1]
        )
        m_i, l_i, acc = _fold(m_i, l_i, acc, m_span, l_span, acc_span)
    head, token = row % HEADS, row // HEADS
    at_lse = (token // tokens * HEADS + head) * tokens + token % tokens
    _store_rows(sinks_ptr, out_ptr, lse_ptr, head, row, at_lse, row >= 0, m_i, l_i, acc, HEAD_DIM_V)


def flash_fwd(
    operands: AttentionOperands[Tensor],
    out: Tensor,
    lse: Tensor,
    row_max: Tensor | None,
    spec: AttentionSpec,
    backend: Backend,
) -> None:
    keys = Cache(operands.k, operands.v, None, None, None, None)
    tensors = operands.q, keys, offsets_of(operands), operands.sinks, out, lse, row_max, None
    launch("flash_fwd", invariant_kernel, _prepare_flash, tensors, spec, backend)


def _prepare_flash(call: KernelCall) -> Prepared:
    spec, (q, keys, *_), rows = call.spec, call.layouts, call.config.block_q
    tiles = invariant.row_tiles(spec, rows)
    programs = programs_of_sm(rows, spec.head_dim_v) * num_sms(call.device, call.target)
    strides = {"k_strides": _strides_of(keys.k), "v_strides": _strides_of(keys.v)}
    return (tiles * spec.heads_kv * spec.batch,), flash_arguments(spec) | {
        "cache": keys._replace(**strides),
        "q_strides": q.strides[:-1],
        "num_tokens": spec.seq_q,
        "num_keys": spec.seq_kv,
        "num_pages": 0,
        "max_pages": 0,
        "together": heads_together(spec, tiles, programs),
        "HEADS_KV": spec.heads_kv,
        "PAST_2G": max(spec.seq_kv * x.strides[-3] for x in (keys.k, keys.v)) >= 2**31,
        "FOLDS": spec.seq_kv > invariant.SPAN,
        "BLOCK_ROWS": rows,
    }


def _strides_of(layout: Layout) -> PoolStrides:
    *batch, row, head, _ = layout.strides
    return PoolStrides(batch[0] if batch else 0, tl.constexpr(row), tl.constexpr(head))


def paged_fwd(
    operands: DecodeOperands[Tensor] | PagedOperands[Tensor], spec: DecodeSpec, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Launch `invariant_kernel` over pages; for several spans also `merge_spans_kernel`.

    Return what `paged_decode` and `paged_attention` do.
    """
    kernel, q = decode_kernel(spec), operands.q
    rows = config_of(kernel, spec, backend, q.device).max_rows
    spans = invariant.choose_spans(spec, rows, num_sms(q.device, backend.target))
    out = q.new_empty((*q.shape[:-1], spec.head_dim_v))
    lse = q.new_empty((*q.shape[:-3], spec.heads_q, spec.tokens), dtype=torch.float32)
    parts = None
    if spans > 1:
        maxima, sums = (lse.new_empty((spans, lse.numel())) for _ in range(2))
        parts = SpanParts(maxima, sums, lse.new_empty((spans, lse.numel(), spec.head_dim_v)))
    offsets = Offsets(operands.cu_seqlens_q if isinstance(operands, PagedOperands) else None)
    tensors = q, cache_of(operands), offsets, operands.sinks, out, lse, None, parts
    launch(kernel, invariant_kernel, _prepare_paged, tensors, spec, backend, spans)
    if parts is not None:
        tensors = out, lse, parts, operands.sinks
        launch("combine", merge_spans_kernel, _prepare_merge, tensors, spec.merge(spans), backend)
    return out, lse


def _prepare_paged(call: KernelCall) -> Prepared:
    spec, (spans,), rows = call.spec, call.constants, call.config.max_rows
    q, cache, offsets, *_, parts = call.layouts
    if parts is not None:
        parts = parts._replace(num_rows=parts.maxima.shape[1])
    programs = invariant.row_tiles(spec, rows) * spec.heads_kv * spec.merge(1).batch
    return (programs, spans), decode_arguments(spec, call.target, q, cache) | {
        "parts": parts,
        "num_tokens": spec.tokens,
        "num_keys": 0,
        "num_sequences": None if offsets.q is None else spec.batch,
        "together": 1,
        "window_right": 0,
        "FOLDS": spans == 1 and spec.cache.capacity > invariant.SPAN,
        "BLOCK_ROWS": rows,
    }


def _prepare_merge(call: KernelCall) -> Prepared:
    spec, (_, _, parts, _) = call.spec, call.layouts
    rows = parts.maxima.shape[1]
    return (rows,), {
        "parts": parts._replace(num_rows=rows),
        "num_spans": spec.num_states,
        "tokens": spec.tokens,
        "HEADS": spec.heads,
        "HEAD_DIM_V": spec.head_dim_v,
        "BLOCK_SPANS": triton.next_power_of_2(spec.num_states),
    }
