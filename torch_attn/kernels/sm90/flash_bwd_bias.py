"""The gradient of a bias of pairs that heads or batch elements share, for SM90: sums of ds.

The formulas of `torch_attn.kernels.flash_bwd_bias`. A program adds up ds of a tile over all heads
and batch elements in order, in float32 registers: the same bits every time, rounded once. Only the
gradient's own memory grows with the square of a length.
"""

from dataclasses import replace

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from torch_attn.kernels.explicit.barriers import (
    K_READ,
    READERS,
    allocate_barriers,
    arrive,
    wait_for_all,
)
from torch_attn.kernels.explicit.items import work_item
from torch_attn.kernels.explicit.terms import (
    TileTerms,
    allocate_bias_boxes,
    bias_box_bytes,
    bias_boxes,
    drop_scaled,
    head_terms,
    load_bias_box,
    prepare_tile,
)
from torch_attn.kernels.explicit.tma import (
    allocate_tile,
    load_pieces,
    maps_of,
    num_pieces,
    piece,
    store_box,
    tile_bytes,
)
from torch_attn.kernels.explicit.wgmma import product_layout, product_scores
from torch_attn.kernels.explicit.wgmma_scores import exponents, visible_scores
from torch_attn.kernels.flash_bwd_bias import bias_gradient
from torch_attn.kernels.library.mask import Mask
from torch_attn.kernels.library.terms import (
    Bias,
    Terms,
    shares_values,
    terms_argument,
    with_strides,
)
from torch_attn.kernels.library.tiles import ROW_PADDING, visible_tiles
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared, flash_arguments, launch
from torch_attn.layouts import layouts_of
from torch_attn.targets import num_sms
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec, Window
from twin_attention.targets.family import Backend
from twin_attention.targets.sm90 import has_large_heads


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "num_items"])
def flash_bwd_bias_kernel(
    q, k, v, dout, lse2, delta, terms, mask, shared_heads, shared, seq_q, seq_kv, diagonal, heads_q,
    rule, window_left, window_right, num_items, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """One program computes tiles of 128 queries by 128 keys of the gradient, one after the other.

    A producer warp loads queries and keys, then dout and values, of each head and batch element
    that share the tile; two consumers have 64 queries each. Operands as in `flash_bwd_dq_kernel`;
    terms.dbias is the gradient. An item adds up `shared` tiles, shared_heads heads of each batch
    element. Loop invariant: acc is Σ ds over the heads so far. Accumulation: float32.
    """
    dtype: gl.constexpr = q[0].dtype
    left_tile = allocate_tile(dtype, 2 * STAGES, 64, HEAD_DIM)
    right_tile = allocate_tile(dtype, STAGES, 128, HEAD_DIM)
    bias_tile = allocate_bias_boxes(terms.bias.boxes, 2, 64, 128)
    full = allocate_barriers(STAGES)
    bias_full = allocate_barriers(1)
    bias_read = allocate_barriers(2)
    fence_async_shared()

    tiles = (left_tile, right_tile, bias_tile)
    barriers = (full, bias_full, bias_read)
    numbers = (seq_q, seq_kv, diagonal, heads_q, shared_heads, shared, num_items)
    # Variables would turn constants into tensors. The last partition loads.
    gl.warp_specialize(
        [
            (_add_pairs, (
                tiles, barriers, (lse2, delta), numbers, rule, terms, window_left, window_right,
                part, HEAD_DIM, EDGES,
            ))
            if part < 2
            else (_load_pairs, (
                tiles, barriers, (q, dout), (k, v), terms.bias, numbers, window_left, window_right,
                GROUP_SIZE, HEAD_DIM,
            ))
            for part in (0, 1, 2)
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _locate_tile(item, numbers, window_left, window_right):
    """Return element, head, first query and key, heads to add (0 if hidden), whether to mask."""
    seq_q, seq_kv, diagonal, heads_q, shared_heads, shared, _num_items = numbers
    tiles_kv = gl.cdiv(seq_kv, 128)
    tiles = gl.cdiv(seq_q, 128) * tiles_kv
    tile, heads = item % tiles, heads_q // shared_heads
    start_q, start_kv = tile // tiles_kv * 128, tile % tiles_kv * 128
    element, head = item // tiles // heads, item // tiles % heads
    begin, before, full, after = visible_tiles(
        start_q, seq_q, seq_kv, diagonal, window_left, window_right, 128, 128
    )
    index = (start_kv - begin) // 128
    is_visible = (start_kv >= begin) & (index < before + full + after)
    count = gl.where(is_visible, shared, 0)
    is_edge = (index < before) | (index >= before + full)
    return element, head, start_q, start_kv, count, is_edge


@gluon.jit
def _load_pairs(
    tiles, barriers, of_queries, of_keys, bias, numbers, window_left, window_right,
    GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    left_tile, right_tile, bias_tile = tiles
    full, bias_full, bias_read = barriers
    _seq_q, _seq_kv, _diagonal, _heads_q, shared_heads, _shared, num_items = numbers
    STAGES: gl.constexpr = full.shape[0]
    step = 0  # counted over all items, two for each head
    turn = 0
    item = work_item(turn)
    while item < num_items:
        element, head, start_q, start_kv, count, _is_edge = _locate_tile(
            item, numbers, window_left, window_right
        )
        for i in range(count):
            own_element, own_head = element + i // shared_heads, head + i % shared_heads
            for values in gl.static_range(2):
                slot = step % STAGES
                if step >= STAGES:
                    wait_for_all(K_READ + slot, READERS)
                ready = full.index(slot)
                mbarrier.expect(ready, 2 * tile_bytes(128, HEAD_DIM))
                for half in gl.static_range(2):
                    load_pieces(
                        of_queries[values], left_tile, 2 * slot + half, own_element, own_head,
                        start_q + 64 * half, ready, HEAD_DIM,
                    )  # fmt: skip
                load_pieces(
                    of_keys[values], right_tile, slot, own_element, own_head // GROUP_SIZE,
                    start_kv, ready, HEAD_DIM,
                )  # fmt: skip
                step += 1
            if i == 0:
                _load_bias(
                    bias, bias_tile, element, head, start_q, start_kv, bias_full, bias_read, turn
                )
        if count == 0:
            _load_bias(
                bias, bias_tile, element, head, start_q, start_kv, bias_full, bias_read, turn
            )
        turn += 1
        item = work_item(turn)


@gluon.jit
def _load_bias(bias, bias_tile, element, head, start_q, start_kv, full, read, turn):
    """Load the tile of the bias once the previous gradient, stored from there, is out."""
    ready = full.index(0)
    for half in gl.static_range(2):
        mbarrier.wait(read.index(half), (turn & 1) ^ 1)
    mbarrier.expect(ready, bias_box_bytes(bias.boxes, 128, 128))
    for half in gl.static_range(2):
        load_bias_box(bias, bias_tile, half, element, head, start_q + 64 * half, start_kv, ready)


@gluon.jit
def _add_pairs(
    tiles, barriers, of_rows, numbers, rule, terms, window_left, window_right,
    CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    left_tile, right_tile, bias_tile = tiles
    full, bias_full, bias_read = barriers
    lse2_ptr, delta_ptr = of_rows
    seq_q, seq_kv, diagonal, heads_q, shared_heads, _shared, num_items = numbers
    STAGES: gl.constexpr = full.shape[0]
    PIECES: gl.constexpr = num_pieces(HEAD_DIM)
    layout: gl.constexpr = product_layout(128)
    padded_rows = gl.cdiv(seq_q, ROW_PADDING) * ROW_PADDING
    step = 0  # counted over all items, two for each head
    turn = 0
    item = work_item(turn)
    while item < num_items:
        element, head, start_q, start_kv, count, is_edge = _locate_tile(
            item, numbers, window_left, window_right
        )
        first = start_q + CONSUMER * 64
        rows = first + gl.arange(0, 64, gl.SliceLayout(1, layout))
        key = start_kv + gl.arange(0, 128, gl.SliceLayout(0, layout))
        acc = gl.zeros([64, 128], gl.float32, layout)
        for masked in gl.static_range(1 if EDGES else 0, -1, -1):
            end = count
            if EDGES:
                end = gl.where(is_edge == (masked == 1), count, 0)
            index = 0
            while index < end:
                own_element, own_head = element + index // shared_heads, head + index % shared_heads
                own = head_terms(terms, own_element, own_head)
                row = (own_element * heads_q + own_head).to(gl.int64) * padded_rows
                lse2 = gl.load(lse2_ptr + row + rows)
                delta = gl.load(delta_ptr + row + rows)
                rest2 = gl.load(terms.rest2 + row + rows)
                # s = scale · q kᵀ
                slot, phase = step % STAGES, step // STAGES & 1
                mbarrier.wait(full.index(slot), phase)
                s = product_scores(
                    left_tile, 2 * slot + CONSUMER, right_tile, slot, HEAD_DIM, layout
                )
                of_tile = prepare_tile(
                    terms, own, first, start_kv, start_kv - first - diagonal, seq_q, seq_kv, 64,
                    128, layout,
                )  # fmt: skip
                # dp = dout vᵀ
                following, phase = (step + 1) % STAGES, (step + 1) // STAGES & 1
                mbarrier.wait(full.index(following), phase)
                dp = product_scores(
                    left_tile, 2 * following + CONSUMER, right_tile, following, HEAD_DIM, layout
                )
                s = warpgroup_mma_wait(PIECES, deps=(s,))
                arrive(K_READ + slot, READERS)
                mbarrier.wait(bias_full.index(0), turn & 1)
                bias = piece(bias_tile, CONSUMER).load(layout)
                of_tile = TileTerms(of_tile.offset, bias, of_tile.kept)
                # p = exp(s - lse)
                s, scale, dcap = visible_scores(
                    s, (rows + diagonal)[:, None], key[None, :], seq_kv, rule, window_left,
                    window_right, masked, terms, own, of_tile,
                )  # fmt: skip
                p = gl.exp2(exponents(s, scale, lse2[:, None], rest2[:, None], True)) * dcap
                # Passes at once: its branch keeps ptxas from hoisting the next wait.
                mbarrier.wait(full.index(following), phase)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                arrive(K_READ + following, READERS)
                # ds = p ∘ (dp - delta) ∘ dcap
                dp = drop_scaled(dp, terms, of_tile)
                acc += p * (dp - delta[:, None])
                index += 1
                step += 2

        # Store where the bias was, which no other warpgroup reads.
        mbarrier.wait(bias_full.index(0), turn & 1)
        piece(bias_tile, CONSUMER).store(acc.to(bias_tile.dtype))
        fence_async_shared()
        place = [element, head, first, start_kv]
        store_box(terms.dbias.boxes, place, bias_tile.index(CONSUMER))
        tma.store_wait(0)
        mbarrier.arrive(bias_read.index(CONSUMER), count=1)
        turn += 1
        item = work_item(turn)


def pairs_gradient(
    operands: AttentionOperands[Tensor],
    inputs: tuple[Tensor, ...],
    terms: Terms,
    mask: Mask,
    spec: AttentionSpec,
    backend: Backend,
) -> dict[str, Tensor]:
    """Return the gradient by name; nothing where `bias_gradient` computes it."""
    bias = getattr(operands, "bias", None)
    if bias is None or not shares_values(bias.shape, spec):
        return {}
    is_large = has_large_heads(spec) or spec.head_dim != spec.head_dim_v
    if is_large or spec.hides_by_data or not _has_boxes(bias):
        return bias_gradient(operands, inputs, terms, mask, spec, backend)
    values = bias.new_empty(bias.shape)
    tensors = (*inputs, terms._replace(dbias=Bias(values)), mask)
    # The sums are in order; a deterministic backward has a configuration of this kernel's name.
    ordered = replace(spec, deterministic=True)
    launch("flash_bwd_dq", flash_bwd_bias_kernel, _prepare, tensors, ordered, backend, num_warps=4)
    return {"bias": values}


def _has_boxes(bias: Tensor) -> bool:
    (layout,) = layouts_of((Bias(bias),))
    return bias_boxes(with_strides(layout), 64, 128) is not None


def _prepare(call: KernelCall) -> Prepared:
    spec = call.spec
    q, k, v, dout, *_ = call.layouts
    terms = terms_argument(call)["terms"]
    batch, heads, *_ = terms.dbias.entries.shape
    bias, dbias = (x._replace(boxes=bias_boxes(x, 64, 128)) for x in (terms.bias, terms.dbias))
    tiles = triton.cdiv(spec.seq_q, 128) * triton.cdiv(spec.seq_kv, 128)
    items = tiles * heads * batch
    arguments = {
        "q": maps_of(q, 64),
        "k": maps_of(k, 128),
        "v": maps_of(v, 128),
        "dout": maps_of(dout, 64),
        "terms": terms._replace(bias=bias, dbias=dbias),
        "shared_heads": spec.heads_q // heads,
        "shared": spec.heads_q // heads * (spec.batch // batch),
        "num_items": items,
        # A float32 bias leaves no room in shared memory for more.
        "STAGES": 2 if bias.entries.dtype.itemsize > 2 and spec.head_dim > 64 else 3,
        "EDGES": spec.window != Window(),
    }
    programs = min(items, num_sms(call.device, call.target))
    return (programs,), flash_arguments(spec) | arguments
