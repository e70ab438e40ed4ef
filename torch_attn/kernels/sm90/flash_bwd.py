"""Flash attention, backward, for SM90.

The same formulas as `torch_attn.kernels.portable.flash_bwd`. What the compiler decides there is
written here: a warp that does nothing but load, warpgroups that do nothing but compute, and which
products run under which arithmetic. There are two ways to dq: a kernel of its own, which makes the
same bits every time, with seven products in all; or float32 additions from the kernel of dk and dv,
in any order, with five. Shah et al. 2024, FlashAttention-3, appendix B.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_attn.calls import empty
from torch_attn.kernels.portable.flash_bwd import preprocess, sinks_gradient
from torch_attn.kernels.portable.tiles import ROW_PADDING, visible_tiles
from torch_attn.kernels.sm80.flash_bwd import scale_all
from torch_attn.kernels.sm80.pipeline import copy_layout, group_step, step_start
from torch_attn.kernels.sm80.scores import visible_scores
from torch_attn.kernels.sm90.pipeline import (
    K_READ,
    V_READ,
    _piece,
    add_product,
    allocate_barriers,
    allocate_row,
    allocate_tile,
    arrive,
    column_pieces,
    load_box,
    load_pieces,
    load_tile,
    map_arguments,
    num_pieces,
    pack,
    product_layout,
    product_scores,
    read_row,
    row_map,
    store_tile,
    tile_bytes,
    unpack,
    wait_for_all,
    wait_product,
    write_rows,
    zeros,
)
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared, flash_arguments, launch
from torch_attn.targets import num_sms
from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.spec import AttentionSpec, Window
from twin_attention.targets.family import Backend

# Named barriers of the kernel of dk and dv: one for each stage of q, and of dout; one for ds.
Q_READ = gl.constexpr(6)
DO_READ = gl.constexpr(8)
DS_WRITTEN = gl.constexpr(10)
# Threads that meet at a barrier: both consumers' and the producer's.
READERS = gl.constexpr(2 * 128 + 32)


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "num_items", "alternate"])
def flash_bwd_dq_kernel(
    q,
    k,
    v,
    dout,
    lse2_ptr,
    delta_ptr,
    dq,
    q_1,
    q_2,
    k_1,
    k_2,
    v_1,
    v_2,
    dout_1,
    dout_2,
    dq_1,
    dq_2,
    seq_q,
    seq_kv,
    diagonal,
    heads_q,
    rule,
    window_left,
    window_right,
    num_items,
    alternate,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    EDGES: gl.constexpr,
):
    """One program computes tiles of BLOCK_Q = 128 rows of dq, one after the other.

    Roles of the warps and descriptors: as in `flash_fwd_kernel`. A consumer issues ds·k of a tile
    of keys with q·kᵀ of the next. Operands, loop invariant and accumulation: as in the portable
    `flash_bwd_dq_kernel`.
    """
    dtype: gl.constexpr = q.dtype
    gl.static_assert(BLOCK_Q == 128)
    q_tile = allocate_tile(dtype, 2, 64, HEAD_DIM)
    do_tile = allocate_tile(dtype, 2, 64, HEAD_DIM_V)
    k_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM)
    v_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM_V)
    q_full = allocate_barriers(2)
    do_full = allocate_barriers(2)
    q_read = allocate_barriers(2)
    k_full = allocate_barriers(NUM_STAGES)
    v_full = allocate_barriers(NUM_STAGES)
    fence_async_shared()

    tiles = (q_tile, do_tile, k_tile, v_tile)
    barriers = (q_full, do_full, q_read, k_full, v_full)
    loads = ((q, q_1, q_2), (dout, dout_1, dout_2), (k, k_1, k_2), (v, v_1, v_2))
    stores = (dq, dq_1, dq_2)
    rows = (lse2_ptr, delta_ptr)
    problem = (seq_q, seq_kv, diagonal, heads_q, num_items, alternate)
    # Constants, and what may be None, stand in the calls: variables would make tensors of them.
    gl.warp_specialize(
        [
            (_consume_keys, (
                tiles, barriers, rows, stores, problem, rule, window_left, window_right,
                0, HEAD_DIM, HEAD_DIM_V, EDGES,
            )),
            (_consume_keys, (
                tiles, barriers, rows, stores, problem, rule, window_left, window_right,
                1, HEAD_DIM, HEAD_DIM_V, EDGES,
            )),
            (_produce_keys, (
                tiles, barriers, loads, problem, (window_left, window_right),
                GROUP_SIZE, HEAD_DIM, HEAD_DIM_V,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _place(item, turn, alternate, num_tiles):
    """Return the head of a work item, and which of the head's tiles it is, the longest being 0.

    Programs take items at a constant distance. A program that got tiles of one length only would
    finish late or early, so every other head (`alternate` 0), or every other turn of the programs
    (1), goes through a head's tiles in reverse. The first is right where the distance is no
    multiple of a head's tiles.
    """
    index = item // num_tiles
    tile = item % num_tiles
    reverse = gl.where(alternate == 0, index, turn) & 1
    return index, gl.where(reverse == 1, num_tiles - 1 - tile, tile)


@gluon.jit
def _locate_queries(item, turn, problem, window_left, window_right, BLOCK_KV: gl.constexpr):
    """Return batch, head, first row and tiles of keys of a work item.

    The tiles of keys are what `visible_tiles` returns; where nothing is visible, one masked tile,
    so that no consumer has to do without.
    """
    seq_q, seq_kv, diagonal, heads_q, _num_items, alternate = problem
    num_tiles = gl.cdiv(seq_q, 128)
    index, tile = _place(item, turn, alternate, num_tiles)
    start_q = (num_tiles - 1 - tile) * 128
    begin, before, full, after = visible_tiles(
        start_q, seq_q, seq_kv, diagonal, window_left, window_right, 128, BLOCK_KV
    )
    before = gl.maximum(before, 1 - full - after)
    return index // heads_q, index % heads_q, start_q, (begin, before, full, after)


@gluon.jit
def _produce_keys(
    tiles,
    barriers,
    loads,
    problem,
    window,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    """Load all that the consumers of dq multiply."""
    q_tile, do_tile, k_tile, v_tile = tiles
    q_full, do_full, q_read, k_full, v_full = barriers
    q, dout, k, v = loads
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    step = 0  # over all items
    turn = 0
    item = gl.program_id(0)
    while item < problem[4]:
        batch, head, start_q, visible = _locate_queries(
            item, turn, problem, window[0], window[1], BLOCK_KV
        )
        begin, before, full, after = visible
        head_kv = head // GROUP_SIZE
        for i in range(before + full + after):
            slot = step % NUM_STAGES
            row = step_start(i, begin, before, full, after, BLOCK_KV)
            if step >= NUM_STAGES:
                wait_for_all(K_READ + slot, READERS)
            load_tile(k, k_tile, slot, batch, head_kv, row, k_full.index(slot), HEAD_DIM)
            if i == 0:
                for consumer in gl.static_range(2):
                    first = start_q + consumer * 64
                    mbarrier.wait(q_read.index(consumer), (turn & 1) ^ 1)
                    load_tile(
                        q, q_tile, consumer, batch, head, first, q_full.index(consumer), HEAD_DIM
                    )
                    load_tile(
                        dout, do_tile, consumer, batch, head, first, do_full.index(consumer),
                        HEAD_DIM_V,
                    )  # fmt: skip
            if step >= NUM_STAGES:
                wait_for_all(V_READ + slot, READERS)
            load_tile(v, v_tile, slot, batch, head_kv, row, v_full.index(slot), HEAD_DIM_V)
            step += 1
        turn += 1
        item += gl.num_programs(0)


@gluon.jit
def _consume_keys(
    tiles,
    barriers,
    rows_of,
    stores,
    problem,
    rule,
    window_left,
    window_right,
    CONSUMER: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    EDGES: gl.constexpr,
):
    """Compute 64 rows of dq of each of a program's work items."""
    q_tile, do_tile, k_tile, v_tile = tiles
    q_full, do_full, q_read, k_full, v_full = barriers
    seq_q, seq_kv, diagonal, heads_q, num_items, _alternate = problem
    lse2_ptr, delta_ptr = rows_of
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_KV)
    step = 0  # over all items
    turn = 0
    item = gl.program_id(0)
    while item < num_items:
        batch, head, start_q, visible = _locate_queries(
            item, turn, problem, window_left, window_right, BLOCK_KV
        )
        begin, before, full, after = visible
        rows = start_q + CONSUMER * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        position = rows + diagonal
        padded_rows = gl.cdiv(seq_q, ROW_PADDING) * ROW_PADDING
        offset = (batch * heads_q + head).to(gl.int64) * padded_rows
        lse2 = gl.load(lse2_ptr + offset + rows)
        delta = gl.load(delta_ptr + offset + rows)

        # The first tile of keys has no ds·k to run under its exponentials.
        slot = step % NUM_STAGES
        mbarrier.wait(q_full.index(CONSUMER), turn & 1)
        mbarrier.wait(k_full.index(slot), step // NUM_STAGES & 1)
        s = product_scores(q_tile, CONSUMER, k_tile, slot, HEAD_DIM, layout)
        mbarrier.wait(do_full.index(CONSUMER), turn & 1)
        mbarrier.wait(v_full.index(slot), step // NUM_STAGES & 1)
        dp = product_scores(do_tile, CONSUMER, v_tile, slot, HEAD_DIM_V, layout)
        s = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s,))
        key = step_start(0, begin, before, full, after, BLOCK_KV)
        p = _probabilities(
            s, position[:, None], key, lse2[:, None], seq_kv, rule, window_left, window_right,
            EDGES, BLOCK_KV,
        )  # fmt: skip
        dp = warpgroup_mma_wait(0, deps=(dp,))
        arrive(V_READ + slot, READERS)
        ds = pack(p * (dp - delta[:, None]), dtype)
        dq = zeros(64, HEAD_DIM)

        # Visit the other tiles of keys that these queries see; only tiles at the edges are masked.
        index = 1
        step += 1
        for masked in gl.static_range(1 if EDGES else 0, -1, -1):
            end = before + full + after
            if masked:
                end = before + after
            while index < end:
                slot = step % NUM_STAGES
                previous = (step - 1) % NUM_STAGES
                # dq += ds k for the tile before, and s = scale · q kᵀ
                left = unpack(ds, dtype, layout, "loop")
                dq = add_product(dq, left, k_tile, previous)
                mbarrier.wait(k_full.index(slot), step // NUM_STAGES & 1)
                s = product_scores(q_tile, CONSUMER, k_tile, slot, HEAD_DIM, layout)
                dq, left = _wait_product(dq, left, num_pieces(HEAD_DIM))
                arrive(K_READ + previous, READERS)
                # dp = dout vᵀ
                mbarrier.wait(v_full.index(slot), step // NUM_STAGES & 1)
                dp = product_scores(do_tile, CONSUMER, v_tile, slot, HEAD_DIM_V, layout)
                # p = exp(s - lse)
                s = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s,))
                key = step_start(index, begin, before, full, after, BLOCK_KV)
                p = _probabilities(
                    s, position[:, None], key, lse2[:, None], seq_kv, rule, window_left,
                    window_right, masked, BLOCK_KV,
                )  # fmt: skip
                # This wait passes at once. Its branch keeps ptxas from moving the next one up.
                mbarrier.wait(v_full.index(slot), step // NUM_STAGES & 1)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                arrive(V_READ + slot, READERS)
                # ds = p ∘ (dp - delta) ∘ dcap
                ds = pack(p * (dp - delta[:, None]), dtype)
                index += 1
                step += 1

        # The last ds·k
        previous = (step - 1) % NUM_STAGES
        left = unpack(ds, dtype, layout, "end")
        dq = add_product(dq, left, k_tile, previous)
        dq, left = wait_product(dq, left)
        arrive(K_READ + previous, READERS)

        # Scale and store.
        write_rows(q_tile, CONSUMER, scale_all(dq, rule.scale))
        fence_async_shared()
        store_tile(stores, q_tile, CONSUMER, batch, head, start_q + CONSUMER * 64, HEAD_DIM)
        tma.store_wait(0)
        mbarrier.arrive(q_read.index(CONSUMER), count=1)
        turn += 1
        item += gl.num_programs(0)


@gluon.jit
def _probabilities(
    s,
    position,
    start_kv,
    lse2,
    end,
    rule,
    window_left,
    window_right,
    MASKED: gl.constexpr,
    BLOCK_KV: gl.constexpr,
):
    """Return p ∘ dcap, the factor of dp - delta in ds. Queries are rows."""
    key = start_kv + gl.arange(0, BLOCK_KV, gl.SliceLayout(0, s.type.layout))
    s, dcap = visible_scores(
        s, position, key[None, :], end, rule, window_left, window_right, MASKED
    )
    return gl.exp2(s * rule.exp2_scale - lse2) * dcap


@gluon.jit
def _wait_product(acc, a, PENDING: gl.constexpr):
    """Wait for a product whose left operand a is in registers, while PENDING later ones run."""
    done = warpgroup_mma_wait(PENDING, deps=acc + (a,))
    sums = ()
    for i in gl.static_range(len(acc)):
        sums = sums + (done[i],)
    return sums, done[len(acc)]


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "num_items", "alternate"])
def flash_bwd_dkdv_kernel(
    q,
    k,
    v,
    dout,
    lse2,
    delta,
    dk,
    dv,
    dq_sum_ptr,
    q_1,
    q_2,
    k_1,
    k_2,
    v_1,
    v_2,
    dout_1,
    dout_2,
    dk_1,
    dk_2,
    dv_1,
    dv_2,
    seq_q,
    seq_kv,
    diagonal,
    heads_q,
    rule,
    window_left,
    window_right,
    num_items,
    alternate,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    EDGES: gl.constexpr,
):
    """One program computes tiles of BLOCK_KV = 128 rows of dk and dv, one after the other.

    A producer warp loads with TMA; two consumer warpgroups have 64 keys each. A consumer issues
    dsᵀ·q of a tile of queries with k·qᵀ of the next; pᵀ and dsᵀ are left operands in the registers
    where they were computed. Operands, loop invariant and accumulation: as in the portable
    `flash_bwd_dkdv_kernel`.

    dq_sum_ptr: None, or dq's float32 sums in the order of `_add_dq`, zero at first, to which the
    program adds ds·k. Both consumers write dsᵀ to shared memory then, and each multiplies some
    columns of ds·k over all of the tile's keys: BLOCK_Q is 64.
    """
    dtype: gl.constexpr = q.dtype
    gl.static_assert(BLOCK_KV == 128)
    gl.static_assert(NUM_STAGES <= 2)
    k_tile = allocate_tile(dtype, 2, 64, HEAD_DIM)
    v_tile = allocate_tile(dtype, 2, 64, HEAD_DIM_V)
    q_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_Q, HEAD_DIM)
    do_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_Q, HEAD_DIM_V)
    lse2_row = allocate_row(NUM_STAGES, BLOCK_Q)
    delta_row = allocate_row(NUM_STAGES, BLOCK_Q)
    ds_buffer = lse2_row
    if dq_sum_ptr is not None:
        gl.static_assert(BLOCK_Q == 64)
        ds_buffer = gl.allocate_shared_memory(dtype, [4, 64, BLOCK_Q], _ds_layout())
    k_full = allocate_barriers(1)
    v_full = allocate_barriers(1)
    kv_read = allocate_barriers(2)
    q_full = allocate_barriers(NUM_STAGES)
    do_full = allocate_barriers(NUM_STAGES)
    fence_async_shared()

    tiles = (k_tile, v_tile, q_tile, do_tile, lse2_row, delta_row, ds_buffer)
    barriers = (k_full, v_full, kv_read, q_full, do_full)
    loads = ((k, k_1, k_2), (v, v_1, v_2), (q, q_1, q_2), (dout, dout_1, dout_2), lse2, delta)
    stores = ((dk, dk_1, dk_2), (dv, dv_1, dv_2))
    problem = (seq_q, seq_kv, diagonal, heads_q, num_items, alternate)
    # Constants, and what may be None, stand in the calls: variables would make tensors of them.
    gl.warp_specialize(
        [
            (_consume_queries, (
                tiles, barriers, stores, problem, rule, window_left, window_right, dq_sum_ptr,
                0, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V, EDGES,
            )),
            (_consume_queries, (
                tiles, barriers, stores, problem, rule, window_left, window_right, dq_sum_ptr,
                1, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V, EDGES,
            )),
            (_produce_queries, (
                tiles, barriers, loads, problem, (window_left, window_right, dq_sum_ptr),
                GROUP_SIZE, HEAD_DIM, HEAD_DIM_V,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@triton.constexpr_function
def _ds_layout():
    return gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def _locate_keys(
    item,
    turn,
    problem,
    window_left,
    window_right,
    FUSED: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    BLOCK_Q: gl.constexpr,
):
    """Return batch, kv head, first row and tiles of queries of a work item.

    Queries up to ROW_PADDING exist for this purpose: their p is 0 without a mask.
    """
    seq_q, seq_kv, diagonal, heads_q, _num_items, alternate = problem
    num_tiles = gl.cdiv(seq_kv, 128)
    heads_kv = heads_q // GROUP_SIZE
    index, tile = _place(item, turn, alternate, num_tiles)
    start_kv = tile * 128
    padded_rows = gl.cdiv(seq_q, BLOCK_Q) * BLOCK_Q
    begin, before, full, after = visible_tiles(
        start_kv, seq_kv, padded_rows, -diagonal, window_right, window_left, 128, BLOCK_Q
    )
    total = before + full + after
    # Where nothing is visible, one masked tile, so that no consumer has to do without.
    begin = gl.where(total == 0, 0, begin)
    before = gl.where(total == 0, 1, before)
    if FUSED:
        # Keys that do not exist are hidden in every tile: their ds, times 0, must be finite.
        ragged = start_kv + 128 > seq_kv
        before = gl.where(ragged, gl.maximum(total, 1), before)
        full = gl.where(ragged, 0, full)
        after = gl.where(ragged, 0, after)
    return index // heads_kv, index % heads_kv, start_kv, (begin, before, full, after)


@gluon.jit
def _produce_queries(
    tiles,
    barriers,
    loads,
    problem,
    options,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    """Load all that the consumers of dk and dv multiply, and what belongs to the queries' rows."""
    k_tile, v_tile, q_tile, do_tile, lse2_row, delta_row, _ds_buffer = tiles
    k_full, v_full, kv_read, q_full, do_full = barriers
    k, v, q, dout, lse2, delta = loads
    window_left, window_right, dq_sum_ptr = options
    NUM_STAGES: gl.constexpr = q_tile[0].shape[0]
    BLOCK_Q: gl.constexpr = q_tile[0].shape[3]
    rows_per_head = gl.cdiv(problem[0], ROW_PADDING) * (ROW_PADDING // BLOCK_Q)
    step = 0  # over all items
    turn = 0
    item = gl.program_id(0)
    while item < problem[4]:
        batch, head_kv, start_kv, visible = _locate_keys(
            item, turn, problem, window_left, window_right, dq_sum_ptr is not None, GROUP_SIZE,
            BLOCK_Q,
        )  # fmt: skip
        begin, before, full, after = visible
        for i in range((before + full + after) * GROUP_SIZE):
            member, start = group_step(i, begin, before, full, after, BLOCK_Q, GROUP_SIZE)
            head = head_kv * GROUP_SIZE + member
            row = (batch * problem[3] + head) * rows_per_head + start // BLOCK_Q
            slot = step % NUM_STAGES
            if step >= NUM_STAGES:
                wait_for_all(Q_READ + slot, READERS)
            ready = q_full.index(slot)
            mbarrier.expect(ready, tile_bytes(BLOCK_Q, HEAD_DIM) + 4 * BLOCK_Q)
            load_pieces(q, q_tile, slot, batch, head, start, ready, HEAD_DIM)
            load_box(lse2, [row, 0], ready, lse2_row.index(slot))
            if i == 0:
                # After q, which does not wait for the end of the item before.
                mbarrier.wait(kv_read.index(0), (turn & 1) ^ 1)
                mbarrier.wait(kv_read.index(1), (turn & 1) ^ 1)
                ready = k_full.index(0)
                mbarrier.expect(ready, tile_bytes(128, HEAD_DIM))
                load_pieces(k, k_tile, 0, batch, head_kv, start_kv, ready, HEAD_DIM)
                load_pieces(k, k_tile, 1, batch, head_kv, start_kv + 64, ready, HEAD_DIM)
                ready = v_full.index(0)
                mbarrier.expect(ready, tile_bytes(128, HEAD_DIM_V))
                load_pieces(v, v_tile, 0, batch, head_kv, start_kv, ready, HEAD_DIM_V)
                load_pieces(v, v_tile, 1, batch, head_kv, start_kv + 64, ready, HEAD_DIM_V)
            if step >= NUM_STAGES:
                wait_for_all(DO_READ + slot, READERS)
            ready = do_full.index(slot)
            mbarrier.expect(ready, tile_bytes(BLOCK_Q, HEAD_DIM_V) + 4 * BLOCK_Q)
            load_pieces(dout, do_tile, slot, batch, head, start, ready, HEAD_DIM_V)
            load_box(delta, [row, 0], ready, delta_row.index(slot))
            step += 1
        turn += 1
        item += gl.num_programs(0)


@gluon.jit
def _consume_queries(
    tiles,
    barriers,
    stores,
    problem,
    rule,
    window_left,
    window_right,
    dq_sum_ptr,
    CONSUMER: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    EDGES: gl.constexpr,
):
    """Compute 64 rows of dk and dv of each of a program's work items."""
    k_tile, v_tile, q_tile, do_tile, _lse2_row, _delta_row, ds_buffer = tiles
    k_full, v_full, kv_read, q_full, do_full = barriers
    seq_q, seq_kv, diagonal, heads_q, num_items, _alternate = problem
    FUSED: gl.constexpr = dq_sum_ptr is not None
    NUM_STAGES: gl.constexpr = q_tile[0].shape[0]
    BLOCK_Q: gl.constexpr = q_tile[0].shape[3]
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_Q)
    padded_rows = gl.cdiv(seq_q, ROW_PADDING) * ROW_PADDING
    step = 0  # over all items
    turn = 0
    item = gl.program_id(0)
    while item < num_items:
        batch, head_kv, start_kv, visible = _locate_keys(
            item, turn, problem, window_left, window_right, FUSED, GROUP_SIZE, BLOCK_Q
        )
        begin, before, full, after = visible
        # Keys are counted as queries are.
        key = start_kv + CONSUMER * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout)) - diagonal
        dk = zeros(64, HEAD_DIM)
        dv = zeros(64, HEAD_DIM_V)

        # The first tile of queries has no ds of a tile before.
        slot = step % NUM_STAGES
        mbarrier.wait(k_full.index(0), turn & 1)
        mbarrier.wait(q_full.index(slot), step // NUM_STAGES & 1)
        s = product_scores(k_tile, CONSUMER, q_tile, slot, HEAD_DIM, layout)
        mbarrier.wait(v_full.index(0), turn & 1)
        mbarrier.wait(do_full.index(slot), step // NUM_STAGES & 1)
        dp = product_scores(v_tile, CONSUMER, do_tile, slot, HEAD_DIM_V, layout)
        s = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s,))
        member, start = group_step(0, begin, before, full, after, BLOCK_Q, GROUP_SIZE)
        dv, ds = _from_scores(
            s, dp, dv, tiles, barriers, start, key, seq_kv - diagonal, step, rule, window_left,
            window_right, CONSUMER, FUSED, EDGES, HEAD_DIM_V,
        )  # fmt: skip
        row = (batch * heads_q + head_kv * GROUP_SIZE + member).to(gl.int64) * padded_rows + start

        # Visit the other tiles that see these keys; only tiles at the edges are masked.
        index = 1
        step += 1
        for masked in gl.static_range(1 if EDGES else 0, -1, -1):
            end = (before + full + after) * GROUP_SIZE
            if masked:
                end = (before + after) * GROUP_SIZE
            while index < end:
                slot = step % NUM_STAGES
                previous = (step - 1) % NUM_STAGES
                # dq += ds k and dk += dsᵀ q for the tile before, and sᵀ = scale · k qᵀ
                if FUSED:
                    dq = _start_dq(ds_buffer, step - 1, k_tile, CONSUMER, HEAD_DIM)
                    left = ds_buffer.index((step - 1) % 2 * 2 + CONSUMER)
                    dk = _add_shared(dk, left, q_tile, previous)
                else:
                    left = unpack(ds, dtype, layout, "loop")
                    dk = add_product(dk, left, q_tile, previous)
                mbarrier.wait(q_full.index(slot), step // NUM_STAGES & 1)
                s = product_scores(k_tile, CONSUMER, q_tile, slot, HEAD_DIM, layout)
                if FUSED:
                    dq = _wait_tuple(dq, 2 * num_pieces(HEAD_DIM))
                    _add_dq(dq_sum_ptr, dq, row, CONSUMER, HEAD_DIM)
                if BLOCK_Q == 128:
                    # This frees the registers of ds for dp.
                    dk, left = _wait_product(dk, left, num_pieces(HEAD_DIM))
                # dpᵀ = v doutᵀ
                mbarrier.wait(do_full.index(slot), step // NUM_STAGES & 1)
                dp = product_scores(v_tile, CONSUMER, do_tile, slot, HEAD_DIM_V, layout)
                if BLOCK_Q == 128:
                    s = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s,))
                elif FUSED:
                    dk, s = _wait_product(dk, s, num_pieces(HEAD_DIM_V))
                else:
                    dk, s, left = _wait_products(dk, s, left, num_pieces(HEAD_DIM_V))
                arrive(Q_READ + previous, READERS)
                member, start = group_step(index, begin, before, full, after, BLOCK_Q, GROUP_SIZE)
                dv, ds = _from_scores(
                    s, dp, dv, tiles, barriers, start, key, seq_kv - diagonal, step, rule,
                    window_left, window_right, CONSUMER, FUSED, masked, HEAD_DIM_V,
                )  # fmt: skip
                head = batch * heads_q + head_kv * GROUP_SIZE + member
                row = head.to(gl.int64) * padded_rows + start
                index += 1
                step += 1

        # The last dq and dk
        previous = (step - 1) % NUM_STAGES
        if FUSED:
            dq = _start_dq(ds_buffer, step - 1, k_tile, CONSUMER, HEAD_DIM)
            dk = _add_shared(dk, ds_buffer.index((step - 1) % 2 * 2 + CONSUMER), q_tile, previous)
        else:
            left = unpack(ds, dtype, layout, "end")
            dk = add_product(dk, left, q_tile, previous)
        # Store dv where v was, whose rows nobody else reads.
        first = start_kv + CONSUMER * 64
        write_rows(v_tile, CONSUMER, dv)
        fence_async_shared()
        store_tile(stores[1], v_tile, CONSUMER, batch, head_kv, first, HEAD_DIM_V)
        if FUSED:
            dq = _wait_tuple(dq, num_pieces(HEAD_DIM))
            _add_dq(dq_sum_ptr, dq, row, CONSUMER, HEAD_DIM)
        if FUSED:
            dk = _wait_tuple(dk, 0)
        else:
            dk, left = wait_product(dk, left)
        arrive(Q_READ + previous, READERS)
        # Scale dk and store it where k was, when both have read it.
        if FUSED:
            wait_for_all(DS_WRITTEN, 256)
        write_rows(k_tile, CONSUMER, scale_all(dk, rule.scale))
        fence_async_shared()
        store_tile(stores[0], k_tile, CONSUMER, batch, head_kv, first, HEAD_DIM)
        tma.store_wait(0)
        mbarrier.arrive(kv_read.index(CONSUMER), count=1)
        turn += 1
        item += gl.num_programs(0)


@gluon.jit
def _from_scores(
    s,
    dp,
    dv,
    tiles,
    barriers,
    start,
    key,
    end,
    step,
    rule,
    window_left,
    window_right,
    CONSUMER: gl.constexpr,
    FUSED: gl.constexpr,
    MASKED: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    """From s, and dp which is not awaited yet, add to dv; returns dv and packed ds. Keys are rows.

    FUSED: ds is written to shared memory, and that of both consumers is there on return.
    """
    _k_tile, _v_tile, q_tile, do_tile, lse2_row, delta_row, ds_buffer = tiles
    do_full = barriers[4]
    NUM_STAGES: gl.constexpr = q_tile[0].shape[0]
    BLOCK_Q: gl.constexpr = q_tile[0].shape[3]
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = s.type.layout
    slot = step % NUM_STAGES
    # pᵀ = exp(sᵀ - lse)
    lse2 = read_row(lse2_row, slot, layout)
    rows = start + gl.arange(0, BLOCK_Q, gl.SliceLayout(0, layout))
    if not FUSED:
        end = None
    s, dcap = visible_scores(
        s, rows[None, :], key[:, None], end, rule, window_left, window_right, MASKED
    )
    p = gl.exp2(s * rule.exp2_scale - lse2[None, :])
    # dv += pᵀ dout
    left = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    dv = add_product(dv, left, do_tile, slot)
    # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
    p = p * dcap
    dp = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(dp,))
    delta = read_row(delta_row, slot, layout)
    ds = pack(p * (dp - delta[None, :]), dtype)
    # What follows keeps ptxas from moving the last wait up: a barrier, or a branch.
    if FUSED:
        place = ds_buffer.index(step % 2 * 2 + CONSUMER)
        values = unpack(ds, dtype, layout, "store")
        place.store(gl.convert_layout(values, layout, assert_trivial=True))
        fence_async_shared()
        wait_for_all(DS_WRITTEN, 256)
    else:
        mbarrier.wait(do_full.index(slot), step // NUM_STAGES & 1)
    dv, left = wait_product(dv, left)
    arrive(DO_READ + slot, READERS)
    return dv, ds


@triton.constexpr_function
def dq_blocks(size):
    """Return first column and width of the parts of dq's columns that one consumer multiplies."""
    blocks, first = [], 0
    for width in column_pieces(size):
        for start in range(first, first + width, 64):
            blocks.append((start, min(width, 64)))
        first += width
    return tuple(blocks)


@triton.constexpr_function
def consumer_blocks(size, consumer):
    """Return which of `dq_blocks` a consumer multiplies: the first one the first."""
    every = tuple(range(len(dq_blocks(size))))
    return every[:1] if consumer == 0 else every[1:]


@triton.constexpr_function
def block_piece(size, index):
    """Return the column piece that a block is in."""
    start, first = dq_blocks(size)[index][0], 0
    for piece, width in enumerate(column_pieces(size)):
        if start < first + width:
            return piece
        first += width
    return None


@triton.constexpr_function
def block_start(size, index):
    """Return the first column of a block."""
    return dq_blocks(size)[index][0]


@triton.constexpr_function
def block_offset(size, index):
    """Return the first column of a block in its piece."""
    return dq_blocks(size)[index][0] - sum(column_pieces(size)[: block_piece(size, index)])


@triton.constexpr_function
def block_width(size, index):
    """Return the columns of a block."""
    return dq_blocks(size)[index][1]


@triton.constexpr_function
def _nth(values, index):
    return values[index]


@gluon.jit
def _start_dq(ds_buffer, step, k_tile, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Start to compute this consumer's part of ds·k, two products a block."""
    BLOCKS: gl.constexpr = consumer_blocks(HEAD_DIM, CONSUMER)
    dq = ()
    for i in gl.static_range(len(BLOCKS)):
        dq = dq + (_start_block(ds_buffer, step, k_tile, _nth(BLOCKS, i), HEAD_DIM),)
    return dq


@gluon.jit
def _start_block(ds_buffer, step, k_tile, BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr):
    WIDTH: gl.constexpr = block_width(HEAD_DIM, BLOCK)
    dq = gl.zeros([64, WIDTH], gl.float32, product_layout(WIDTH))
    for half in gl.static_range(2):
        left = ds_buffer.index(step % 2 * 2 + half).permute((1, 0))
        right = _piece(k_tile[block_piece(HEAD_DIM, BLOCK)], half)
        if right.shape[1] != WIDTH:
            right = right.slice(block_offset(HEAD_DIM, BLOCK), WIDTH, 1)
        dq = warpgroup_mma(left, right, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def _add_dq(dq_sum_ptr, dq, row, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Add this consumer's part of a tile's dq, from `row` on, to the float32 sums.

    The sums of 64 rows are consecutive, block by block, each in the order in which registers hold
    it: four values of a thread, then the threads.
    """
    BLOCKS: gl.constexpr = consumer_blocks(HEAD_DIM, CONSUMER)
    base = dq_sum_ptr + row * sum_columns(HEAD_DIM)
    for i in gl.static_range(len(BLOCKS)):
        flat = _order_as_registers(dq[i])
        place = base + 64 * block_start(HEAD_DIM, _nth(BLOCKS, i))
        gl.atomic_add(place + gl.arange(0, flat.shape[0], flat.type.layout), flat, sem="relaxed")


@triton.constexpr_function
def sum_columns(size):
    """Return the columns of dq's sums."""
    return sum(column_pieces(size))


@gluon.jit
def _order_as_registers(x):
    """Return 64 rows of a product in one axis: column blocks, threads, then a thread's values."""
    parts = gl.reshape(x, [4, 2, 8, x.shape[1] // 8, 4, 2])
    return gl.reshape(gl.permute(parts, [3, 0, 2, 4, 1, 5]), [64 * x.shape[1]])


@gluon.jit
def _wait_tuple(acc, PENDING: gl.constexpr):
    """Wait for products while PENDING later ones run."""
    sums = ()
    if len(acc) == 1:
        sums = (warpgroup_mma_wait(PENDING, deps=acc),)
    elif len(acc) > 1:
        sums = warpgroup_mma_wait(PENDING, deps=acc)
    return sums


@gluon.jit
def _wait_products(acc, a, b, PENDING: gl.constexpr):
    """Wait for products while PENDING later ones run; returns acc, a and b."""
    done = warpgroup_mma_wait(PENDING, deps=acc + (a, b))
    sums = ()
    for i in gl.static_range(len(acc)):
        sums = sums + (done[i],)
    return sums, done[len(acc)], done[len(acc) + 1]


@gluon.jit
def _add_shared(acc, a, b, slot):
    """Start to compute acc + a · b. a is in shared memory, b is a buffer of tiles."""
    result = ()
    for i in gl.static_range(len(acc)):
        result = result + (warpgroup_mma(a, _piece(b[i], slot), acc[i], is_async=True),)
    return result


@gluon.jit(do_not_specialize=["seq_q"])
def flash_bwd_postprocess_kernel(
    dq_sum_ptr,
    dq_ptr,
    seq_q,
    heads_q,
    scale,
    HEAD_DIM: gl.constexpr,
    BLOCK_Q: gl.constexpr,
):
    """Scale and store 64 rows of dq of one head from the sums of `_add_dq`.

    dq [B, Sq, Hq, D] contiguous. Grid: (query tiles, heads, batch) in one axis.
    """
    gl.static_assert(BLOCK_Q == 64)
    num_tiles = gl.cdiv(seq_q, 64)
    start_q = gl.program_id(0) % num_tiles * 64
    head = gl.program_id(0) // num_tiles % heads_q
    batch = (gl.program_id(0) // num_tiles // heads_q).to(gl.int64)
    padded_rows = gl.cdiv(seq_q, ROW_PADDING) * ROW_PADDING
    row = (batch * heads_q + head) * padded_rows + start_q
    base = dq_sum_ptr + row * sum_columns(HEAD_DIM)
    dq_row = heads_q * HEAD_DIM
    dq_base = dq_ptr + batch * seq_q * dq_row + head * HEAD_DIM
    for i in gl.static_range(len(dq_blocks(HEAD_DIM))):
        _store_block(base, dq_base, start_q, seq_q, dq_row, scale, i, HEAD_DIM)


@gluon.jit
def _store_block(
    base, dq_base, start, num_rows, stride, scale, BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr
):
    FIRST: gl.constexpr = block_start(HEAD_DIM, BLOCK)
    WIDTH: gl.constexpr = block_width(HEAD_DIM, BLOCK)
    layout: gl.constexpr = copy_layout(WIDTH, gl.num_warps())
    x = _load_block(base + 64 * FIRST, WIDTH) * scale
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    columns = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    pointers = dq_base + (start + rows).to(gl.int64) * stride + columns
    x = gl.convert_layout(x.to(dq_base.dtype.element_ty), layout)
    gl.store(pointers, x, (rows < num_rows - start) & (columns < HEAD_DIM))


@gluon.jit
def _load_block(base, WIDTH: gl.constexpr):
    """Load a block that `_add_dq` stores."""
    like = _order_as_registers(gl.zeros([64, WIDTH], gl.float32, product_layout(WIDTH)))
    flat = gl.load(base + gl.arange(0, 64 * WIDTH, like.type.layout))
    parts = gl.permute(gl.reshape(flat, [WIDTH // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    return gl.reshape(parts, [64, WIDTH])


def flash_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    operands: FlashOperands[Tensor],
    out: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    backend: Backend,
) -> FlashOperands[Tensor]:
    """Launch the kernels of the backward: those that the problem has configurations for.

    Args:
        dout: [B, Sq, Hq, Dv], strides that TMA takes, as the operands'.
        dlse: [B, Hq, Sq] float32, contiguous, or None for zero.
        operands, out, lse: inputs and outputs of the forward.

    Returns:
        The gradient of each operand, in its dtype, contiguous.
    """
    q, k, v = operands.q, operands.k, operands.v
    lse2, delta = preprocess(dout, dlse, out, lse, spec, backend)
    dq, dk, dv = (empty(tuple(x.shape), x.dtype, x.device) for x in (q, k, v))
    inputs = (q, k, v, dout, lse2, delta)
    # Four warps are one consumer; Triton adds those of the other parts.
    if "flash_bwd_fused" in backend.configs(spec):
        shape = (*lse2.shape, sum_columns(spec.head_dim))
        dq_sum = empty(shape, torch.float32, q.device).zero_()
        tensors = (*inputs, dk, dv, dq_sum)
        launch(
            "flash_bwd_fused", flash_bwd_dkdv_kernel, _prepare_dkdv, tensors, spec, backend,
            num_warps=4,
        )  # fmt: skip
        launch(
            "flash_bwd_postprocess", flash_bwd_postprocess_kernel, _prepare_postprocess,
            (dq_sum, dq), spec, backend,
        )  # fmt: skip
    else:
        tensors = (*inputs, dk, dv, None)
        launch(
            "flash_bwd_dkdv", flash_bwd_dkdv_kernel, _prepare_dkdv, tensors, spec, backend,
            num_warps=4,
        )  # fmt: skip
        tensors = (*inputs, dq)
        launch(
            "flash_bwd_dq", flash_bwd_dq_kernel, _prepare_dq, tensors, spec, backend, num_warps=4
        )
    return FlashOperands(dq, dk, dv, sinks_gradient(operands.sinks, lse2, delta))


def _prepare_dq(call: KernelCall) -> Prepared:
    """Return grid and arguments of `flash_bwd_dq_kernel`."""
    spec, config = call.spec, call.config
    q, k, v, dout, _lse2, _delta, dq = call.layouts
    maps = (
        map_arguments("q", 0, q, 64)
        | map_arguments("k", 1, k, config.block_kv)
        | map_arguments("v", 2, v, config.block_kv)
        | map_arguments("dout", 3, dout, 64)
        | map_arguments("dq", 6, dq, 64)
    )
    edges = spec.window != Window() or spec.seq_kv % config.block_kv != 0
    tiles = triton.cdiv(spec.seq_q, config.block_q)
    return _persistent(call, tiles, tiles * spec.heads_q * spec.batch, maps | {"EDGES": edges})


def _prepare_dkdv(call: KernelCall) -> Prepared:
    """Return grid and arguments of `flash_bwd_dkdv_kernel`."""
    spec, config = call.spec, call.config
    q, k, v, dout, lse2, delta, dk, dv, dq_sum = call.layouts
    maps = (
        map_arguments("q", 0, q, config.block_q)
        | map_arguments("k", 1, k, 64)
        | map_arguments("v", 2, v, 64)
        | map_arguments("dout", 3, dout, config.block_q)
        | map_arguments("dk", 6, dk, 64)
        | map_arguments("dv", 7, dv, 64)
        | {"lse2": row_map(4, lse2, config.block_q), "delta": row_map(5, delta, config.block_q)}
    )
    ragged = dq_sum is not None and spec.seq_kv % config.block_kv != 0
    tiles = triton.cdiv(spec.seq_kv, config.block_kv)
    edges = spec.window != Window() or ragged
    return _persistent(call, tiles, tiles * spec.heads_kv * spec.batch, maps | {"EDGES": edges})


def _persistent(call: KernelCall, tiles: int, items: int, arguments: dict[str, Any]) -> Prepared:
    """Return the grid of a kernel whose programs take work items in turn, and its arguments."""
    programs = min(items, num_sms(call.device, call.target))
    schedule = {"num_items": items, "alternate": int(programs % tiles == 0)}
    return (programs,), flash_arguments(call.spec) | schedule | arguments


def _prepare_postprocess(call: KernelCall) -> Prepared:
    """Return grid and arguments of `flash_bwd_postprocess_kernel`."""
    spec = call.spec
    tiles = triton.cdiv(spec.seq_q, call.config.block_q)
    arguments = {
        "seq_q": spec.seq_q,
        "heads_q": spec.heads_q,
        "scale": spec.scale,
        "HEAD_DIM": spec.head_dim,
    }
    return (tiles * spec.heads_q * spec.batch,), arguments
