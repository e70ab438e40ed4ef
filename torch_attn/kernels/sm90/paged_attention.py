"""Paged attention of long chunks of new tokens, for SM90.

The formula of `torch_attn.kernels.portable.paged_attention`, the roles of `flash_fwd`, with a TMA
instruction for each page of a tile of keys. Shah et al. 2024, FlashAttention-3, over the pages of
PagedAttention (Kwon et al. 2023).
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from torch_attn.kernels.explicit.barriers import (
    K_READ,
    MAX_STAGES,
    TURN,
    V_READ,
    allocate_barriers,
    arrive,
    pass_turn,
    take_turn,
    wait_for_all,
    wait_for_step,
)
from torch_attn.kernels.explicit.pages import find_pages, load_pages
from torch_attn.kernels.explicit.registers import pack, unpack
from torch_attn.kernels.explicit.sequences import locate_tokens
from torch_attn.kernels.explicit.softmax import add_columns, rescales_on_demand
from torch_attn.kernels.explicit.steps import step_start
from torch_attn.kernels.explicit.tma import (
    allocate_tile,
    box_layout,
    clear_rows,
    load_box,
    maps_of,
    num_pieces,
    piece_start,
    piece_width,
    tile_bytes,
)
from torch_attn.kernels.explicit.wgmma import (
    add_product,
    product_layout,
    product_scores,
    rescale,
    scale_rows,
    store_rows,
    wait_product,
    zeros,
)
from torch_attn.kernels.explicit.wgmma_scores import hide, scaled_scores, softmax_update
from torch_attn.kernels.library.pages import keys_of_tokens, share_of_tiles, tiles_at_edges
from torch_attn.kernels.library.softmax import LOG2E, add_sink, row_statistics
from torch_attn.kernels.library.spans import finish_rows, sum_block
from torch_attn.kernels.sm90.paged_decode import paged_decode
from torch_attn.kernels.sm90.spans import (
    add_sums,
    end_span,
    from_left,
    join_span,
    no_spans,
    normalise,
    tiles_to_span,
    update_in_span,
)
from torch_attn.launch import KernelCall, Prepared, launch, rule_argument
from torch_attn.layouts import Layout
from torch_attn.tensor_maps import TensorMap
from twin_attention.contract.operands import PagedOperands
from twin_attention.contract.paged_spec import PagedSpec
from twin_attention.targets import sm90
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import SpecializedConfig
from twin_attention.targets.splits import num_row_tiles


@gluon.jit(
    do_not_specialize=["num_tokens", "num_sequences", "num_pages", "capacity", "window_left"]
)
def paged_attention_kernel(
    q, k, v, tables_ptr, lens_ptr, cu_seqlens_q_ptr, sinks_ptr, out_ptr, lse_ptr, table_stride,
    num_tokens, num_sequences, num_pages, capacity, rule, window_left, HEADS_KV: gl.constexpr,
    GROUP_SIZE: gl.constexpr, PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
    NUM_STAGES: gl.constexpr, PING_PONG: gl.constexpr, IN_SPANS: gl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_Q rows of one kv head of a sequence.

    Rows, and what they see, are those of the portable `paged_attention_kernel`, without splits. A
    producer and two consumers work as in `flash_fwd_kernel`, in turn with PING_PONG; so do loop
    invariant and accumulation. GROUP_SIZE is a power of two up to 64, PAGE_SIZE one from 16 on.
    IN_SPANS: with the order of sums of `batch_invariant`.

    q, k and v are TMA descriptors, one for each column piece: of [Tq, Hq, D], and of
    [P, Hkv, page_size, D]. out [Tq, Hq, Dv] and lse [Hq, Tq] are contiguous. Grid: (kv heads, row
    tiles of `locate_tokens`) in one axis, kv heads fastest and the last tiles first, as they see
    most keys.
    """
    gl.static_assert(BLOCK_Q == 128)
    gl.static_assert(NUM_STAGES <= MAX_STAGES)
    q_tile = allocate_tile(q[0].dtype, 2, 64, HEAD_DIM)
    k_tile = allocate_tile(q[0].dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM)
    v_tile = allocate_tile(q[0].dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM_V)
    sums_tile = ()
    if IN_SPANS:
        sums_tile = allocate_tile(q[0].dtype, 4, 64, HEAD_DIM_V)
    q_full = allocate_barriers(1)
    k_full = allocate_barriers(NUM_STAGES)
    v_full = allocate_barriers(NUM_STAGES)
    fence_async_shared()

    # Locate the rows, and the keys that they see.
    program = gl.num_programs(0) - 1 - gl.program_id(0)
    head_kv = program % HEADS_KV
    sequence, first_token, tokens, start_row = locate_tokens(
        cu_seqlens_q_ptr, program // HEADS_KV, num_tokens, num_sequences, GROUP_SIZE, BLOCK_Q
    )
    length = gl.load(lens_ptr + sequence, mask=sequence < num_sequences, other=0)
    length = gl.minimum(gl.maximum(length, 0), capacity)
    table_ptr = tables_ptr + sequence.to(gl.int64) * table_stride

    tiles = (q_tile, k_tile, v_tile, sums_tile)
    barriers = (q_full, k_full, v_full)
    place = (head_kv, first_token, tokens, start_row, length)
    # Variables would turn constants, and what may be None, into tensors.
    gl.warp_specialize(
        [
            (_consume, (
                tiles, barriers, out_ptr, lse_ptr, place, num_tokens, rule, window_left, sinks_ptr,
                0, HEADS_KV, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V, BLOCK_Q, PING_PONG,
            )),
            (_consume, (
                tiles, barriers, out_ptr, lse_ptr, place, num_tokens, rule, window_left, sinks_ptr,
                1, HEADS_KV, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V, BLOCK_Q, PING_PONG,
            )),
            (_produce, (
                tiles, barriers, (q, k, v), place, table_ptr, num_pages, window_left,
                GROUP_SIZE, PAGE_SIZE, HEAD_DIM, HEAD_DIM_V, BLOCK_Q,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def _visible_tiles(
    place, window_left, GROUP_SIZE: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr
):
    """Return the tiles of keys that a program's rows see: (begin, end, before, full, after,
    hidden).

    begin, end: the first tile's first key, and the end of the visible keys. hidden: how many of the
    first tile's keys no row's window reaches. Where nothing is visible there is one masked tile, so
    that each consumer has one; a program without rows has no tiles.
    """
    _head_kv, _first_token, tokens, start_row, length = place
    first = start_row // GROUP_SIZE
    last = gl.minimum((start_row + BLOCK_Q - 1) // GROUP_SIZE, tokens - 1)
    begin, end = keys_of_tokens(length, tokens, first, last, window_left)
    first_tile, count, _total = share_of_tiles(begin, end, 0, 1, BLOCK_KV)
    diagonal = length - tokens
    before, full, after = tiles_at_edges(
        diagonal + first, diagonal + last, first_tile, count, window_left, BLOCK_KV
    )
    before = gl.where(first < tokens, gl.maximum(before, 1 - full - after), 0)
    start = first_tile * BLOCK_KV
    return start, end, before, full, after, begin - start


@gluon.jit
def _produce(
    tiles, barriers, loads, place, table_ptr, num_pages, window_left, GROUP_SIZE: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    BLOCK_Q: gl.constexpr,
):  # fmt: skip
    q_tile, k_tile, v_tile, sums_tile = tiles
    q_full, k_full, v_full = barriers
    q, k, v = loads
    head_kv, first_token, _tokens, start_row, _length = place
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    READERS: gl.constexpr = 2 * 128 + 32
    begin, end, before, full, after, _hidden = _visible_tiles(
        place, window_left, GROUP_SIZE, BLOCK_Q, BLOCK_KV
    )
    total = before + full + after
    if len(sums_tile) > 0:
        begin, before, full, after = from_left((begin, before, full, after))
    for i in range(gl.where(total > 0, total + 1, 0)):
        # Keys are loaded one tile ahead of values, in the order of use.
        if i < total:
            slot = i % NUM_STAGES
            start = step_start(i, begin, before, full, after, BLOCK_KV)
            pages = find_pages(table_ptr, start, end, num_pages, PAGE_SIZE, BLOCK_KV)
            if i >= NUM_STAGES:
                wait_for_all(K_READ + slot, READERS)
            load_pages(
                k, k_tile, slot, pages, start, head_kv, k_full.index(slot), PAGE_SIZE, HEAD_DIM
            )
        if i == 0:
            token = first_token + start_row // GROUP_SIZE
            mbarrier.expect(q_full.index(0), tile_bytes(BLOCK_Q, HEAD_DIM))
            for consumer in gl.static_range(2):
                first = token + consumer * (64 // GROUP_SIZE)
                _load_queries(
                    q, q_tile, consumer, first, head_kv, q_full.index(0), GROUP_SIZE, HEAD_DIM
                )
        else:
            slot = (i - 1) % NUM_STAGES
            start = step_start(i - 1, begin, before, full, after, BLOCK_KV)
            pages = find_pages(table_ptr, start, end, num_pages, PAGE_SIZE, BLOCK_KV)
            if i > NUM_STAGES:
                wait_for_all(V_READ + slot, READERS)
            load_pages(
                v, v_tile, slot, pages, start, head_kv, v_full.index(slot), PAGE_SIZE, HEAD_DIM_V
            )


@gluon.jit
def _load_queries(
    maps, tile, slot, token, head_kv, full, GROUP_SIZE: gl.constexpr, SIZE: gl.constexpr
):
    for i in gl.static_range(num_pieces(SIZE)):
        box = tile[i].index(slot).reshape([64 // GROUP_SIZE, GROUP_SIZE, piece_width(SIZE, i)])
        load_box(maps[i], [token, head_kv * GROUP_SIZE, piece_start(SIZE, i)], full, box)


@gluon.jit
def _consume(
    tiles, barriers, out_ptr, lse_ptr, place, num_tokens, rule, window_left, sinks_ptr,
    CONSUMER: gl.constexpr, HEADS_KV: gl.constexpr, GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_Q: gl.constexpr,
    PING_PONG: gl.constexpr,
):  # fmt: skip
    q_tile, k_tile, v_tile, sums_tile = tiles
    q_full, k_full, v_full = barriers
    head_kv, first_token, tokens, start_row, length = place
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    READERS: gl.constexpr = 2 * 128 + 32
    IN_SPANS: gl.constexpr = len(sums_tile) > 0
    ON_DEMAND: gl.constexpr = rescales_on_demand(HEAD_DIM_V)
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_KV)
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    begin, end, before, full, after, hidden = _visible_tiles(
        place, window_left, GROUP_SIZE, BLOCK_Q, BLOCK_KV
    )
    if before + full + after > 0:
        if PING_PONG and CONSUMER == 1:
            arrive(TURN, 256)
        rows = start_row + CONSUMER * 64 + gl.arange(0, 64, of_row)
        token = rows // GROUP_SIZE
        head = head_kv * GROUP_SIZE + rows % GROUP_SIZE
        position = length - tokens + token
        is_row = token < tokens
        m_i = gl.full([64], float("-inf"), gl.float32, of_row)
        no_scores = gl.zeros([64, BLOCK_KV], gl.float32, layout)
        spans = ()
        if IN_SPANS:
            l_i, spans = sum_block(no_scores), no_spans(m_i)
        else:
            l_i = add_columns(no_scores)
        if sinks_ptr is not None and not IN_SPANS:
            # Start the maximum at the sink, so that acc is not rescaled for it at the end.
            m_i = gl.maximum(m_i, gl.load(sinks_ptr + head) * LOG2E)
        acc = zeros(64, HEAD_DIM_V)

        # The first tile of keys
        mbarrier.wait(q_full.index(0), 0)
        mbarrier.wait(k_full.index(0), 0)
        s = product_scores(q_tile, CONSUMER, k_tile, 0, HEAD_DIM, layout)
        s = warpgroup_mma_wait(0, deps=(s,))
        arrive(K_READ, READERS)
        visits = (begin, before, full, after)
        if IN_SPANS:
            visits = from_left(visits)
        start = step_start(0, *visits, BLOCK_KV)
        s = hide(scaled_scores(s, rule), position, start, end, window_left, 0)
        if IN_SPANS:
            e, _alpha, m_i, l_i = update_in_span(s, m_i, l_i, rule.exp2_scale, True)
        else:
            e, _alpha, m_i, l_i = softmax_update(s, m_i, l_i, rule, True, ON_DEMAND)
        packed = pack(e, dtype)
        clear_rows(v_tile, 0, end - start, v_full.index(0), 0)
        if window_left is not None:
            clear_rows(v_tile, 0, hidden, v_full.index(0), 0, BEFORE=True)

        # Visit the other tiles of keys that these rows see; only tiles at the edges are masked.
        own = (position, end, visits, window_left)
        index, total = 1, before + full + after
        if IN_SPANS:
            span_end = tiles_to_span(begin, BLOCK_KV)
            while index < total:
                span_end = gl.minimum(span_end, total)
                for kind in gl.static_range(1 if window_left is None else 0, 3):
                    steps = span_end
                    if kind < 2:
                        steps = gl.minimum(before + full if kind else before, span_end)
                    while index < steps:
                        packed, m_i, l_i, acc, spans = _visit(
                            tiles, barriers, own, rule, index, packed, m_i, l_i, acc, spans,
                            kind != 1, False, CONSUMER, HEAD_DIM, HEAD_DIM_V, PING_PONG,
                        )  # fmt: skip
                        index += 1
                if index < total:
                    packed, m_i, l_i, acc, spans = _visit(
                        tiles, barriers, own, rule, index, packed, m_i, l_i, acc, spans,
                        True, True, CONSUMER, HEAD_DIM, HEAD_DIM_V, PING_PONG,
                    )  # fmt: skip
                    index += 1
                span_end += tiles_to_span(0, BLOCK_KV)
        else:
            for masked in gl.static_range(1, -1, -1):
                while index < (before + after if masked else total):
                    packed, m_i, l_i, acc, spans = _visit(
                        tiles, barriers, own, rule, index, packed, m_i, l_i, acc, spans,
                        masked, False, CONSUMER, HEAD_DIM, HEAD_DIM_V, PING_PONG,
                    )  # fmt: skip
                    index += 1

        # The last p·v
        previous = (index - 1) % NUM_STAGES
        mbarrier.wait(v_full.index(previous), (index - 1) // NUM_STAGES & 1)
        p = unpack(packed, dtype, layout, "last")
        acc = add_product(acc, p, v_tile, previous)
        sink = None
        if sinks_ptr is not None:
            sink = gl.load(sinks_ptr + head)
        if IN_SPANS:
            spans, alpha, beta = join_span(spans, m_i, l_i)
            factor, lse = finish_rows(spans.m_i, spans.l_i, sink)
        else:
            # Reduce the row sums over each quad.
            l_i = gl.convert_layout(gl.sum(l_i, 1), of_row)
            if sinks_ptr is not None:
                _alpha, m_i, l_i = add_sink(sink, m_i, l_i)
            l_safe, lse = row_statistics(m_i, l_i)
        gl.store(lse_ptr + head.to(gl.int64) * num_tokens + first_token + token, lse, mask=is_row)
        acc, p = wait_product(acc, p)

        # Normalise and store.
        if IN_SPANS:
            acc = add_sums(sums_tile, spans, acc, alpha, beta, CONSUMER)
            acc = normalise(acc, factor)
        else:
            acc = scale_rows(acc, 1.0 / l_safe)
        out_row = (first_token + token).to(gl.int64) * (HEADS_KV * GROUP_SIZE) + head
        store_rows(out_ptr, acc, out_row, is_row, HEAD_DIM_V)


@gluon.jit
def _visit(
    tiles, barriers, own, rule, index, packed, m_i, l_i, acc, spans, MASKED: gl.constexpr,
    STARTS: gl.constexpr, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """Compute p of a tile of keys while p·v of the previous one runs; STARTS: it starts a span."""
    q_tile, k_tile, v_tile, sums_tile = tiles
    _q_full, k_full, v_full = barriers
    position, end, visits, window_left = own
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    READERS: gl.constexpr = 2 * 128 + 32
    ON_DEMAND: gl.constexpr = rescales_on_demand(HEAD_DIM_V)
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_KV)
    slot, previous = index % NUM_STAGES, (index - 1) % NUM_STAGES
    # s = scale · q kᵀ, and acc += p v for the previous tile
    wait_for_step(k_full, index)
    if PING_PONG:
        take_turn(CONSUMER)
    s = product_scores(q_tile, CONSUMER, k_tile, slot, HEAD_DIM, layout)
    wait_for_step(v_full, index - 1)
    p = unpack(packed, dtype, layout, "edge" if MASKED else "full")
    acc = add_product(acc, p, v_tile, previous)
    if PING_PONG:
        pass_turn(CONSUMER, 2)
    s = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s,))
    arrive(K_READ + slot, READERS)
    # p = exp(s - max)
    start = step_start(index, *visits, BLOCK_KV)
    if MASKED:
        s = hide(scaled_scores(s, rule), position, start, end, window_left, 0)
    if STARTS:
        spans, of_spans, of_span = join_span(spans, m_i, l_i)
        m_i, l_i = gl.full_like(m_i, float("-inf")), gl.zeros_like(l_i)
    if len(sums_tile) > 0:
        if not MASKED:
            s = scaled_scores(s, rule)
        e, alpha, m_i, l_i = update_in_span(s, m_i, l_i, rule.exp2_scale, MASKED)
    else:
        e, alpha, m_i, l_i = softmax_update(s, m_i, l_i, rule, MASKED, ON_DEMAND)
    # Rescale what was accumulated
    acc, p = wait_product(acc, p)
    arrive(V_READ + previous, READERS)
    if STARTS:
        acc = end_span(sums_tile, spans, acc, of_spans, of_span, CONSUMER)
    else:
        acc = rescale(acc, alpha, ON_DEMAND)
    packed = pack(e, dtype)
    if MASKED:
        clear_rows(v_tile, slot, end - start, v_full.index(slot), index // NUM_STAGES & 1)
    return packed, m_i, l_i, acc, spans


def paged_attention(
    operands: PagedOperands[Tensor], spec: PagedSpec, backend: Backend
) -> tuple[Tensor, Tensor]:
    if spec.cache.latent:
        return paged_decode(operands, spec, backend)
    q = operands.q
    out = q.new_empty((spec.tokens, spec.heads_q, spec.head_dim_v))
    lse = q.new_empty((spec.heads_q, spec.tokens), dtype=torch.float32)
    tensors = (*operands[: PagedOperands._fields.index("k_scale")], out, lse)
    # One consumer; Triton adds the other partitions' warps.
    launch("paged_attention", paged_attention_kernel, _prepare, tensors, spec, backend, num_warps=4)
    return out, lse


def _prepare(call: KernelCall) -> Prepared:
    spec, config = call.spec, call.config
    assert isinstance(spec, PagedSpec)
    assert isinstance(config, SpecializedConfig)
    q, k_pages, v_pages, block_tables, *_ = call.layouts
    cache = spec.cache
    page_rows = min(cache.page_size, config.block_kv)
    arguments = {
        "q": _query_maps(q, spec.group_size),
        "k": maps_of(k_pages, page_rows),
        "v": maps_of(v_pages, page_rows),
        "table_stride": block_tables.strides[0],
        "num_tokens": spec.tokens,
        "num_sequences": spec.batch,
        "num_pages": cache.num_pages,
        "capacity": cache.capacity,
        "rule": rule_argument(spec.scores),
        "window_left": spec.bounded_window.left,
        "HEADS_KV": spec.heads_kv,
        "GROUP_SIZE": spec.group_size,
        "PAGE_SIZE": cache.page_size,
        "HEAD_DIM": spec.head_dim,
        "HEAD_DIM_V": spec.head_dim_v,
        "IN_SPANS": spec.batch_invariant,
    }
    return (num_row_tiles(spec, config.block_q) * spec.heads_kv,), arguments


def _query_maps(layout: Layout, group_size: int) -> tuple[TensorMap, ...]:
    return tuple(
        TensorMap.of_boxes(
            layout.operand, layout.shape, layout.strides, (64 // group_size, group_size, width),
            box_layout(width, rank=3),
        )
        for width in sm90.column_pieces(layout.shape[2])
    )  # fmt: skip
