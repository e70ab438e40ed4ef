"""Paged attention: any number of new tokens per sequence over a paged KV cache, split by keys.

A `paged_decode` of packed tokens (`sequences`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from torch_attn.kernels.library.arguments import cache_of, decode_arguments
from torch_attn.kernels.library.new_tokens import mask_argument, mask_of, tree_mask
from torch_attn.kernels.library.pages import (
    keys_of_tokens,
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
    swizzled_alike,
    with_packed_pools,
)
from torch_attn.kernels.library.query_ranges import bounds_of_queries, keys_in_ranges
from torch_attn.kernels.library.scores import attention_mask
from torch_attn.kernels.library.sequences import locate_tokens
from torch_attn.kernels.library.softmax import online_softmax_update
from torch_attn.kernels.library.terms import DecodeTerms, load_slopes, penalties, with_stride
from torch_attn.kernels.library.tiles import count_tiles, tile_start
from torch_attn.kernels.merge import merge_splits
from torch_attn.kernels.portable import invariant
from torch_attn.launch import KernelCall, Prepared, config_of, launch
from torch_attn.targets import num_sms
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


@triton.jit(
    do_not_specialize=["num_tokens", "num_sequences", "num_pages", "max_pages", "window_left"]
)
def paged_attention_kernel(
    q_ptr, cache, cu_seqlens_q_ptr, terms, mask, out_ptr, lse_ptr, q_strides, num_tokens,
    num_sequences, num_pages, max_pages, num_splits, rule, window_left, HEADS_KV: tl.constexpr,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UPCAST: tl.constexpr, PAST_2G: tl.constexpr,
    PDL: tl.constexpr, SKIPS_MASKS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_ROWS rows of one kv head of a sequence over one split of the keys.

    Row r of a sequence is its token ``r // GROUP_SIZE`` of query head ``r % GROUP_SIZE`` of the
    group. Operands and accumulation: as in `paged_decode_kernel`, without a cascade; q [Tq, Hq, D];
    cu_seqlens_q [B + 1], int32; out [splits, Tq, Hq, Dv] and lse [splits, Hq, Tq]: with several
    splits parts, without sinks. Grid: (kv heads, row tiles of `locate_tokens`) in one axis, kv
    heads fastest, and splits. A row that sees no key, such as padding, gives 0, and -inf or its
    sink.

    SKIPS_MASKS: tiles of keys that all rows see have a separate loop, without a mask. PDL: a launch
    that depends on this one may begin to start.
    """
    if PDL:
        gdc_launch_dependents()
    # Locate the rows and the split's share of the keys that they see.
    head_kv = (tl.program_id(0) % HEADS_KV).to(tl.int64)
    split = tl.program_id(1)
    sequence, first_token, tokens, start_row = locate_tokens(
        cu_seqlens_q_ptr, tl.program_id(0) // HEADS_KV, num_tokens, num_sequences, GROUP_SIZE,
        BLOCK_ROWS,
    )  # fmt: skip
    length = tl.load(cache.lens + sequence, mask=sequence < num_sequences, other=0)
    length = tl.minimum(tl.maximum(length, 0), max_pages * cache.page_size)
    first = start_row // GROUP_SIZE
    last = tl.minimum((start_row + BLOCK_ROWS - 1) // GROUP_SIZE, tokens - 1)
    begin, end = keys_of_tokens(length, tokens, first, last, window_left)
    window_begin = begin
    if mask.bounds is not None:
        own = first_token + first + tl.arange(0, BLOCK_ROWS)
        of_any, until_any, _, _ = bounds_of_queries(mask, own, own <= first_token + last, length)
        begin = tl.minimum(begin, tl.min(of_any, 0))
        end = tl.maximum(end, tl.max(until_any, 0))
    first_tile, count, _ = share_of_tiles(begin, end, split, num_splits, BLOCK_KV)
    table_ptr = cache.tables + sequence.to(tl.int64) * cache.table_stride
    k_base, v_base, scale = locate_pools(cache, head_kv, rule.scale)

    # Load the queries; they stay.
    row = start_row + tl.arange(0, BLOCK_ROWS)
    token = row // GROUP_SIZE
    head = head_kv * GROUP_SIZE + row % GROUP_SIZE
    is_row = token < tokens
    query = first_token + token
    q_row = query.to(tl.int64)
    q, scale = load_q(
        q_ptr, (q_row, head), q_strides, is_row, scale, cache,
        HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, UPCAST,
    )  # fmt: skip
    diagonal = length - tokens
    position = diagonal + token
    if mask.ends is not None:
        ends_ptr = mask.ends + first_token * mask.stride
    slope = load_slopes(terms, sequence, head, is_row & (sequence < num_sequences))
    m_i, l_i, acc = no_keys(BLOCK_ROWS, BLOCK_DV, UPCAST)

    # Visit the split's tiles of keys; only tiles at the edges are masked.
    before, full, after = count, 0, 0
    if SKIPS_MASKS:
        # A tree hides some new tokens' keys from later tokens.
        least = diagonal + first if mask.ends is None else diagonal - 1
        before, full, after = tiles_at_edges(
            least, diagonal + last, first_tile, count, window_left, BLOCK_KV
        )
    for masked in tl.static_range(0 if SKIPS_MASKS else 1, 2):
        for index in tl.range(0, count_tiles(before, full, after, masked)):
            start = tile_start(index, first_tile * BLOCK_KV, before, full, BLOCK_KV, masked)
            key = start + tl.arange(0, BLOCK_KV)
            exists = key < end
            if masked and window_left is not None:
                in_window = key >= window_begin
                if mask.bounds is not None:
                    shown = keys_in_ranges(
                        mask, query[:, None], is_row[:, None], key[None, :], exists[None, :]
                    )
                    in_window |= tl.max(shown.to(tl.int32), 0) > 0
                exists = exists & in_window
            page, slot = locate_keys(
                table_ptr, start, end, num_pages, cache.page_size, BLOCK_KV, PAST_2G
            )
            # s = scale · q kᵀ
            k = load_keys(
                k_base, (page, slot), cache, exists, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, UPCAST
            )
            added = penalties(slope, position, key)
            s = scores(q, k, scale, rule.softcap, rule.scale_first, added)
            unmasked = s
            if masked and mask.ends is None:
                s = attention_mask(s, position[:, None], key[None, :], end, window_left, 0)
            elif masked:
                s = tree_mask(s, ends_ptr, token, key - diagonal, exists)
            if masked and mask.bounds is not None:
                shown = keys_in_ranges(
                    mask, query[:, None], is_row[:, None], key[None, :], exists[None, :]
                )
                s = tl.where(shown, unmasked, s)
            # p = exp(s - max), and rescale what was accumulated
            p, alpha, m_i, l_i = online_softmax_update(
                s, m_i, l_i, rule.exp2_scale, slope is not None
            )
            acc = [x * alpha[:, None] for x in acc]
            p = p.to(q[0].dtype)
            # acc += p v
            v = load_values(v_base, (page, slot), cache, exists, k, HEAD_DIM_V, BLOCK_DV, UPCAST)
            acc = add_pv(acc, p, v)

    # Normalise and store.
    sink = None
    if terms.sinks is not None:
        sink = tl.load(terms.sinks + head, mask=is_row, other=float("-inf"))
    out, lse = normalise(acc, m_i, l_i, sink, cache, head_kv, slope is not None)
    heads_q: tl.constexpr = HEADS_KV * GROUP_SIZE
    row_size: tl.constexpr = HEAD_DIM_V * len(out)
    split = split.to(tl.int64)
    lse_row = (split * heads_q + head) * num_tokens + q_row
    out_row = (split * num_tokens + q_row) * heads_q + head
    tl.store(lse_ptr + lse_row, lse, mask=is_row)
    store_out(out_ptr, out, (out_row,), (row_size,), is_row, HEAD_DIM_V, BLOCK_DV)


def paged_attention(
    operands: PagedOperands[Tensor], spec: PagedSpec, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Launch `paged_attention_kernel`, and `combine` for several splits.

    Return out [Tq, Hq, Dv] in q's dtype and lse [Hq, Tq] float32, contiguous.
    """
    if spec.batch_invariant:
        return invariant.paged_fwd(operands, spec, backend)
    kernel = decode_kernel(spec)
    config = config_of(kernel, spec, backend, operands.q.device)
    operands = with_packed_pools(operands, spec.cache)
    q = operands.q
    splits = choose_splits(spec, config, num_sms(q.device, backend.target))
    out = q.new_empty((spec.tokens, spec.heads_q, spec.head_dim_v))
    lse = q.new_empty((spec.heads_q, spec.tokens), dtype=torch.float32)
    outs, lses, terms = out, lse, DecodeTerms(operands.sinks, operands.alibi_slopes)
    if splits > 1:
        outs = lse.new_empty((splits, *out.shape))
        lses = lse.new_empty((splits, *lse.shape))
        terms = terms._replace(sinks=None)  # they count once, in the merge

    launch(
        kernel,
        paged_attention_kernel,
        _prepare,
        (q, cache_of(operands), operands.cu_seqlens_q, terms, mask_of(operands), outs, lses),
        spec,
        backend,
        splits,
    )
    if splits > 1:
        merge_splits(outs.unsqueeze(1), lses.unsqueeze(1), out, lse, operands, spec, None, backend)
    return out, lse


def _prepare(call: KernelCall) -> Prepared:
    spec, (splits,) = call.spec, call.constants
    q, cache, _, terms, mask, *_ = call.layouts
    rows = block_rows(spec, call.config)
    arguments = decode_arguments(spec, call.target, q, cache)
    if spec.cache.is_quantized and call.target == "sm90":
        arguments["BLOCK_DV"] = swizzled_alike(arguments["BLOCK_DV"], arguments["BLOCK_D"])
    return (num_row_tiles(spec, rows) * spec.heads_kv, splits), arguments | {
        "terms": with_stride(terms),
        "mask": mask_argument(mask, spec),
        "num_tokens": spec.tokens,
        "num_sequences": spec.batch,
        "num_splits": splits,
        "PDL": splits > 1 and call.target == "sm90",
        "SKIPS_MASKS": skips_masks(spec),
        "BLOCK_ROWS": rows,
    }
