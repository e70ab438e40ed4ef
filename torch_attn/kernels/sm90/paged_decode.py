"""Attention over paged latent caches with many query heads, for SM90.

The formula of `torch_attn.kernels.portable.paged_decode`, the roles of `halves`, and a TMA
instruction for each page of a tile of keys, whose first columns are the values. DeepSeek-AI 2024
(DeepSeek-V2, multi-head latent attention), over the pages of PagedAttention (Kwon et al. 2023).
"""

from typing import Any, NamedTuple

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
    FIRST_READ,
    OTHER_READ,
    P_READ,
    REST_READ,
    allocate_barriers,
    arrive,
    wait_for_all,
    wait_for_step,
)
from torch_attn.kernels.explicit.pages import find_pages, load_pages
from torch_attn.kernels.explicit.registers import pack, unpack
from torch_attn.kernels.explicit.sequences import find_sequence
from torch_attn.kernels.explicit.softmax import add_columns
from torch_attn.kernels.explicit.steps import step_start
from torch_attn.kernels.explicit.tma import (
    allocate_tile,
    box_layout,
    clear_rows,
    load_tile,
    maps_of,
    num_pieces,
)
from torch_attn.kernels.explicit.wgmma import (
    add_product,
    add_scores,
    product_layout,
    rescale,
    scale_rows,
    store_rows,
    wait_product,
    zeros,
)
from torch_attn.kernels.explicit.wgmma_scores import hide, scaled_scores, softmax_update
from torch_attn.kernels.library.pages import keys_of_tokens, share_of_tiles, tiles_at_edges
from torch_attn.kernels.library.sequences import rows_of_sequence
from torch_attn.kernels.library.softmax import LOG2E, add_sink, row_statistics
from torch_attn.kernels.merge import merge_splits
from torch_attn.kernels.sm90.halves import (
    add_handed,
    allocate_halves,
    first_columns,
    hand_over,
    hand_over_factor,
    receive_factor,
)
from torch_attn.launch import KernelCall, Prepared, config_of, launch, rule_argument
from torch_attn.layouts import Layout
from torch_attn.targets import num_sms
from torch_attn.tensor_maps import TensorMap
from twin_attention.contract.operands import DecodeOperands, PagedOperands
from twin_attention.contract.paged_spec import DecodeSpec, PagedSpec
from twin_attention.targets import sm90
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import WarpDecodeConfig
from twin_attention.targets.splits import choose_splits


class TokenRows(NamedTuple):
    """The rows of a program: heads from `head` on of a token, and the keys `visits` that it sees.

    Attributes:
        place: where q has the token: batch and token.
        row: of its first head's out among all rows of all splits.
        lse_row, lse_stride: of its first head's lse, and from one head to the next.
        visits: the first tile's first key, and how many tiles are before, full and after.
        begin, end: of the keys; position: the token's own.
    """

    place: Any
    head: Any
    row: Any
    lse_row: Any
    lse_stride: Any
    visits: Any
    begin: Any
    end: Any
    position: Any


@gluon.jit(
    do_not_specialize=[
        "tokens", "num_sequences", "num_pages", "capacity", "num_splits", "window_left",
    ]
)  # fmt: skip
def latent_kernel(
    q, k, tables_ptr, lens_ptr, cu_seqlens_q_ptr, sinks_ptr, out_ptr, lse_ptr, table_stride,
    tokens, num_sequences, num_pages, capacity, num_splits, rule, window_left,
    HEADS_Q: gl.constexpr, GROUP_SIZE: gl.constexpr, PAGE_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_KV: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """One program computes 64 query heads of one token over one split of the keys.

    A producer loads tiles of keys in three parts: the columns behind the values, the first 256
    values and the others. The first consumer reads all for the scores, and the first values for 256
    columns of out; the second gets p from it and reads the other values. So one consumer is the
    last to read a part, and alone tells the producer. Loop invariant, accumulation and the row that
    sees no key: as in the portable `paged_decode_kernel`, but m_i is at most RESCALE_ABOVE below
    the row maximum so far.

    q and k are TMA descriptors, one for each column piece: of [B, T, Hq, D], with packed tokens a
    batch of one, and of [P, Hkv, page_size, D]. tokens: T. cu_seqlens_q [B + 1], or None where each
    sequence has T. out [splits, B, T, Hq, Dv] and lse [splits, B, Hq, T] are contiguous: with
    several splits parts, without sinks. Grid: (64 heads, tokens, batch) in one axis, heads fastest
    and the last tokens first, as they see most keys; and splits. GROUP_SIZE is a multiple of 64,
    PAGE_SIZE a power of two from 16 on.
    """
    # With one the next tile would wait for itself; the next barriers' numbers are of `halves`.
    gl.static_assert(NUM_STAGES == 2)
    q_tile = allocate_tile(q[0].dtype, 1, 64, HEAD_DIM)
    k_tile = allocate_tile(q[0].dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM)
    halves = allocate_halves(q[0].dtype, BLOCK_KV)
    q_full = allocate_barriers(1)
    k_full = ()
    for _ in gl.static_range(3):
        k_full = k_full + (allocate_barriers(NUM_STAGES),)
    fence_async_shared()

    # Locate the rows, and the split's share of the keys that they see.
    tiles_of_heads: gl.constexpr = HEADS_Q // 64
    program = gl.num_programs(0) - 1 - gl.program_id(0)
    head = program % tiles_of_heads * 64
    token = program // tiles_of_heads
    if cu_seqlens_q_ptr is None:
        sequence = token // tokens
        batch, first, count = sequence, sequence * tokens, tokens
    else:
        sequence = find_sequence(cu_seqlens_q_ptr, token, num_sequences, 1, 1)
        batch = 0
        first, count = rows_of_sequence(cu_seqlens_q_ptr, sequence, tokens, num_sequences, tokens)
    length = gl.load(lens_ptr + sequence, mask=sequence < num_sequences, other=0)
    length = gl.minimum(gl.maximum(length, 0), capacity)
    begin, end = keys_of_tokens(length, count, token - first, token - first, window_left)
    split = gl.program_id(1)
    first_tile, share, _total = share_of_tiles(begin, end, split, num_splits, BLOCK_KV)
    before, full, after = tiles_at_edges(end - 1, end - 1, first_tile, share, window_left, BLOCK_KV)
    # Where nothing is visible there is one masked tile.
    before = gl.maximum(before, 1 - full - after)
    all_tokens = gl.num_programs(0) // tiles_of_heads
    row = (split.to(gl.int64) * all_tokens + token) * HEADS_Q + head
    of_batch = token - batch * tokens
    lse_row = (split.to(gl.int64) * all_tokens + batch * tokens) * HEADS_Q
    lse_row += head.to(gl.int64) * tokens
    rows = TokenRows(
        (batch, of_batch), head, row, lse_row + of_batch, tokens,
        (first_tile * BLOCK_KV, before, full, after), begin, end, length - count + token - first,
    )  # fmt: skip

    table_ptr = tables_ptr + sequence.to(gl.int64) * table_stride
    # Variables would turn constants, and what may be None, into tensors.
    gl.warp_specialize(
        [
            (_consume_keys, (
                q_tile, k_tile, (q_full, k_full), halves, rows, out_ptr, lse_ptr, sinks_ptr, rule,
                window_left, HEAD_DIM, HEAD_DIM_V,
            )),
            (_consume_values, (k_tile, k_full[2], halves, rows, out_ptr, HEAD_DIM_V)),
            (_produce, (
                q_tile, k_tile, (q_full, k_full), (q, k), rows, table_ptr, num_pages, GROUP_SIZE,
                PAGE_SIZE, HEAD_DIM, HEAD_DIM_V,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _produce(
    q_tile, k_tile, barriers, loads, rows, table_ptr, num_pages, GROUP_SIZE: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    q_full, k_full = barriers
    q, k = loads
    batch, token = rows.place
    begin, before, full, after = rows.visits
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    COUNT: gl.constexpr = num_pieces(HEAD_DIM)
    REST: gl.constexpr = num_pieces(HEAD_DIM_V)  # before it are the first values and the others
    load_tile(q, q_tile, 0, batch, token, rows.head, q_full.index(0), HEAD_DIM)
    for i in range(before + full + after):
        slot = i % NUM_STAGES
        start = step_start(i, begin, before, full, after, BLOCK_KV)
        pages = find_pages(table_ptr, start, rows.end, num_pages, PAGE_SIZE, BLOCK_KV)
        for part in gl.static_range(0 if COUNT > REST else 1, 3):
            if i >= NUM_STAGES:
                wait_for_all((REST_READ, FIRST_READ, OTHER_READ)[part] + slot, 128 + 32)
            load_pages(
                k, k_tile, slot, pages, start, rows.head // GROUP_SIZE,
                k_full[part].index(slot), PAGE_SIZE, HEAD_DIM, (REST, 0, 1)[part],
                (COUNT, 1, REST)[part],
            )  # fmt: skip


@gluon.jit
def _consume_keys(
    q_tile, k_tile, barriers, halves, rows, out_ptr, lse_ptr, sinks_ptr, rule, window_left,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Compute the scores, p and the first columns of out."""
    q_full, k_full = barriers
    _begin, before, full, after = rows.visits
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    layout: gl.constexpr = product_layout(BLOCK_KV)
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    offset = gl.arange(0, 64, of_row)
    m_i = gl.full([64], float("-inf"), gl.float32, of_row)
    l_i = add_columns(gl.zeros([64, BLOCK_KV], gl.float32, layout))
    if sinks_ptr is not None:
        # Start the maximum at the sink, so that acc is not rescaled for it at the end.
        sink = gl.load(sinks_ptr + rows.head + offset)
        m_i = gl.maximum(m_i, sink * LOG2E)
    acc = zeros(64, first_columns(HEAD_DIM_V))

    # Visit the tiles of keys; only tiles at the edges are masked. The last one has no next tile.
    mbarrier.wait(q_full.index(0), 0)
    s = _start_scores(q_tile, k_tile, k_full, 0, HEAD_DIM, HEAD_DIM_V)
    s = warpgroup_mma_wait(0, deps=(s,))
    if HEAD_DIM > HEAD_DIM_V:
        arrive(REST_READ, 128 + 32)
    index, last = 0, before + full + after - 1
    for masked in gl.static_range(1, -1, -1):
        while index < (gl.minimum(before + after, last) if masked else last):
            acc, p, m_i, l_i = _visit(
                k_tile, k_full, halves, rows, rule, window_left, index, s, m_i, l_i, acc, masked,
                "edge" if masked else "full", HEAD_DIM_V,
            )  # fmt: skip
            # Start s = q kᵀ of the next tile behind p v. No wait is in between for tensor cores.
            s = _start_scores(q_tile, k_tile, k_full, index + 1, HEAD_DIM, HEAD_DIM_V)
            acc, p = wait_product(acc, p, len(q_tile))
            arrive(FIRST_READ + index % NUM_STAGES, 128 + 32)
            s = warpgroup_mma_wait(0, deps=(s,))
            index += 1
            if HEAD_DIM > HEAD_DIM_V:
                arrive(REST_READ + index % NUM_STAGES, 128 + 32)
    acc, p, m_i, l_i = _visit(
        k_tile, k_full, halves, rows, rule, window_left, index, s, m_i, l_i, acc, True, "last",
        HEAD_DIM_V,
    )  # fmt: skip

    # Reduce the row sums over each quad; normalise and store.
    l_i = gl.convert_layout(gl.sum(l_i, 1), of_row)
    if sinks_ptr is not None:
        _alpha, m_i, l_i = add_sink(sink, m_i, l_i)
    l_safe, lse = row_statistics(m_i, l_i)
    gl.store(lse_ptr + rows.lse_row + offset * rows.lse_stride, lse)
    acc, p = wait_product(acc, p)
    hand_over_factor(halves, 1.0 / l_safe)
    acc = scale_rows(acc, 1.0 / l_safe)
    store_rows(out_ptr, acc, rows.row + offset, offset < 64, HEAD_DIM_V)


@gluon.jit
def _start_scores(q_tile, k_tile, k_full, step, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr):
    """Start q kᵀ of a tile of keys, whose parts are waited for in the order of their loads."""
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    REST: gl.constexpr = HEAD_DIM - HEAD_DIM_V
    FIRST: gl.constexpr = first_columns(HEAD_DIM_V)
    slot = step % k_tile[0].shape[0]
    s = gl.zeros([64, BLOCK_KV], gl.float32, product_layout(BLOCK_KV))
    if REST > 0:
        wait_for_step(k_full[0], step)
        s = add_scores(s, q_tile[2:], 0, k_tile[2:], slot, REST, False)
    wait_for_step(k_full[1], step)
    s = add_scores(s, q_tile, 0, k_tile, slot, FIRST, REST > 0)
    wait_for_step(k_full[2], step)
    return add_scores(s, q_tile[1:], 0, k_tile[1:], slot, HEAD_DIM_V - FIRST)


@gluon.jit
def _visit(
    k_tile, k_full, halves, rows, rule, window_left, index, s, m_i, l_i, acc,
    MASKED: gl.constexpr, PLACE: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Compute p of a tile of keys, start acc + p v and hand p over; return (acc, p, m_i, l_i)."""
    begin, before, full, after = rows.visits
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    layout: gl.constexpr = product_layout(BLOCK_KV)
    slot = index % NUM_STAGES
    if MASKED:
        start = step_start(index, begin, before, full, after, BLOCK_KV)
        position = gl.full([64], rows.position, gl.int32, gl.SliceLayout(1, layout))
        s = hide(scaled_scores(s, rule), position, start, rows.end, window_left, None)
        values = k_tile[: num_pieces(HEAD_DIM_V)]
        loaded, phase = k_full[1].index(slot), index // NUM_STAGES & 1
        clear_rows(values, slot, rows.end - start, loaded, phase)
        if window_left is not None:
            clear_rows(values, slot, rows.begin - start, loaded, phase, BEFORE=True)
    e, alpha, m_i, l_i = softmax_update(s, m_i, l_i, rule, MASKED, True)
    acc = rescale(acc, alpha, True)
    packed = pack(e, k_tile[0].dtype)
    p = unpack(packed, k_tile[0].dtype, layout, PLACE)
    acc = add_product(acc, p, k_tile, slot)
    hand_over(halves, packed, (alpha,), PLACE + ", given")
    return acc, p, m_i, l_i


@gluon.jit
def _consume_values(k_tile, others_full, halves, rows, out_ptr, HEAD_DIM_V: gl.constexpr):
    """Compute the other columns of out, from the p that the first consumer hands over."""
    _begin, before, full, after = rows.visits
    layout: gl.constexpr = product_layout(k_tile[0].shape[3])
    acc = zeros(64, HEAD_DIM_V - first_columns(HEAD_DIM_V))
    arrive(P_READ, 256)
    for i in range(before + full + after):
        acc = receive_factor(halves, acc, True)
        acc = add_handed(halves, acc, k_tile, others_full, i)
        arrive(OTHER_READ + i % k_tile[0].shape[0], 128 + 32)
    acc = receive_factor(halves, acc, False)
    offset = gl.arange(0, 64, gl.SliceLayout(1, layout))
    store_rows(out_ptr, acc, rows.row + offset, offset < 64, HEAD_DIM_V, 1)


def paged_decode(
    operands: DecodeOperands[Tensor] | PagedOperands[Tensor], spec: DecodeSpec, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Launch `latent_kernel`, and `combine` for several splits; also for packed tokens.

    Return out [B, T, Hq, Dv] or [Tq, Hq, Dv] in q's dtype and lse [B, Hq, T] or [Hq, Tq] float32,
    contiguous.
    """
    q, offsets = operands.q, None
    if isinstance(operands, PagedOperands):
        offsets = operands.cu_seqlens_q
    config = config_of("paged_decode", spec, backend, q.device)
    assert isinstance(config, WarpDecodeConfig)
    splits = choose_splits(spec, config, num_sms(q.device, backend.target))
    out = q.new_empty((*q.shape[:-1], spec.head_dim_v))
    lse = q.new_empty((*q.shape[:-3], spec.heads_q, spec.tokens), dtype=torch.float32)
    outs, lses, sinks = out, lse, operands.sinks
    if splits > 1:
        batch = 1 if offsets is not None else spec.batch
        outs = lse.new_empty((splits, batch, spec.tokens, spec.heads_q, spec.head_dim_v))
        lses = lse.new_empty((splits, batch, spec.heads_q, spec.tokens))
        sinks = None  # they count once, in the merge

    # One consumer; Triton adds the other partitions' warps.
    launch(
        "paged_decode", latent_kernel, _prepare,
        (q, operands.k_pages, operands.block_tables, operands.seq_lens, offsets, sinks, outs, lses),
        spec, backend, splits, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        merge_splits(outs, lses, out, lse, operands, spec, None, backend)
    return out, lse


def _prepare(call: KernelCall) -> Prepared:
    spec, (splits,) = call.spec, call.constants
    assert isinstance(spec, DecodeSpec)
    assert isinstance(call.config, WarpDecodeConfig)
    q, k_pages, block_tables, *_ = call.layouts
    cache = spec.cache
    arguments = {
        "q": _query_maps(q),
        "k": maps_of(k_pages, min(cache.page_size, call.config.block_kv)),
        "table_stride": block_tables.strides[0],
        "tokens": spec.tokens,
        "num_sequences": spec.batch,
        "num_pages": cache.num_pages,
        "capacity": cache.capacity,
        "num_splits": splits,
        "rule": rule_argument(spec.scores),
        "window_left": spec.bounded_window.left,
        "HEADS_Q": spec.heads_q,
        "GROUP_SIZE": spec.group_size,
        "PAGE_SIZE": cache.page_size,
        "HEAD_DIM": spec.head_dim,
        "HEAD_DIM_V": spec.head_dim_v,
    }
    tokens = spec.tokens if isinstance(spec, PagedSpec) else spec.batch * spec.tokens
    return (tokens * (spec.heads_q // 64), splits), arguments


def _query_maps(layout: Layout) -> tuple[TensorMap, ...]:
    """Describe 64 heads of a token of [B, T, Hq, D] or [Tq, Hq, D]."""
    shape, strides = layout.shape, layout.strides
    if len(shape) == 3:
        shape, strides = (1, *shape), (0, *strides)
    return tuple(
        TensorMap.of_boxes(layout.operand, shape, strides, (1, 1, 64, width), box_layout(width))
        for width in sm90.column_pieces(shape[-1])
    )
