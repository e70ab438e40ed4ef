"""dv of the backward for SM90, of heads above 128, in a kernel of its own."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from torch_attn.kernels.explicit.barriers import READERS, allocate_barriers, arrive
from torch_attn.kernels.explicit.items import allocate_hand_over, own_item
from torch_attn.kernels.explicit.registers import pack, unpack
from torch_attn.kernels.explicit.steps import group_step
from torch_attn.kernels.explicit.tma import (
    allocate_row,
    allocate_tile,
    column_pieces,
    map_arguments,
    num_pieces,
    read_row,
    row_map,
    store_result,
    stored_arguments,
)
from torch_attn.kernels.explicit.wgmma import (
    add_product,
    product_layout,
    product_scores,
    wait_product,
    zeros,
)
from torch_attn.kernels.sm90.queries import (
    DO_READ,
    Q_READ,
    clear_keys,
    clear_queries,
    exponents,
    locate_keys,
    persistent_keys,
    produce_queries,
)
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "num_items"])
def flash_bwd_dv_kernel(
    q,
    k,
    v_ptr,
    dout,
    lse2,
    delta_ptr,
    dk_ptr,
    dv,
    counter_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_kv_ptr,
    q_1,
    q_2,
    k_1,
    k_2,
    dout_1,
    dout_2,
    dv_1,
    dv_2,
    seq_q,
    seq_kv,
    diagonal,
    num_sequences,
    heads_q,
    rule,
    window_left,
    window_right,
    num_items,
    together,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    EDGES: gl.constexpr,
):
    """One program computes tiles of BLOCK_KV = 128 rows of dv, one after the other.

    As `flash_bwd_dk_kernel`, with pᵀ·dout in place of dsᵀ·q, and so without v and delta.
    """
    dtype: gl.constexpr = q.dtype
    gl.static_assert(BLOCK_Q == 64)
    gl.static_assert(BLOCK_KV == 128)
    gl.static_assert(NUM_STAGES <= 2)
    # dv is stored where k was, or has a tile in place of a stage of dout.
    IN_K: gl.constexpr = column_pieces(HEAD_DIM) == column_pieces(HEAD_DIM_V)
    DO_STAGES: gl.constexpr = NUM_STAGES + 1 if IN_K else NUM_STAGES
    k_tile = allocate_tile(dtype, 2, 64, HEAD_DIM)
    q_tile = allocate_tile(dtype, NUM_STAGES + 1, BLOCK_Q, HEAD_DIM)
    do_tile = allocate_tile(dtype, DO_STAGES, BLOCK_Q, HEAD_DIM_V)
    dv_tile = k_tile
    if not IN_K:
        dv_tile = allocate_tile(dtype, 2, 64, HEAD_DIM_V)
    lse2_row = allocate_row(NUM_STAGES + 1, BLOCK_Q)
    k_full = allocate_barriers(1)
    kv_read = allocate_barriers(2)
    q_full = allocate_barriers(NUM_STAGES + 1)
    do_full = allocate_barriers(DO_STAGES)
    fence_async_shared()

    tiles = (k_tile, dv_tile, q_tile, do_tile, lse2_row)
    loaded = (k_tile, (), q_tile, do_tile, lse2_row, lse2_row)
    barriers = (k_full, k_full, kv_read, q_full, do_full)
    shared = ()
    if num_sequences is not None:
        shared = allocate_hand_over(2)
    loads = ((k, k_1, k_2), (), (q, q_1, q_2), (dout, dout_1, dout_2), lse2, lse2)
    problem = (seq_kv, seq_q, diagonal, heads_q, num_items, together)
    # Constants, and what may be None, stand in the calls: variables would make tensors of them.
    gl.warp_specialize(
        [
            (_consume_queries, (
                tiles, barriers, shared, (dv, dv_1, dv_2), problem,
                (cu_seqlens_kv_ptr, cu_seqlens_q_ptr, num_sequences),
                rule, window_left, window_right, 0, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V, EDGES,
            )),
            (_consume_queries, (
                tiles, barriers, shared, (dv, dv_1, dv_2), problem,
                (cu_seqlens_kv_ptr, cu_seqlens_q_ptr, num_sequences),
                rule, window_left, window_right, 1, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V, EDGES,
            )),
            (produce_queries, (
                loaded, barriers, shared, counter_ptr, loads, problem,
                (cu_seqlens_kv_ptr, cu_seqlens_q_ptr, num_sequences), (window_left, window_right),
                False, GROUP_SIZE, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _consume_queries(
    tiles,
    barriers,
    shared,
    dv_maps,
    problem,
    offsets,
    rule,
    window_left,
    window_right,
    CONSUMER: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    EDGES: gl.constexpr,
):
    """Compute 64 rows of dv of each of a program's work items. Keys are rows."""
    k_tile, dv_tile, q_tile, do_tile, lse2_row = tiles
    k_full, _v_full, kv_read, q_full, do_full = barriers
    _total_kv, _total_q, _diagonal, heads_q, num_items, _together = problem
    IS_PACKED: gl.constexpr = offsets[2] is not None
    Q_STAGES: gl.constexpr = q_tile[0].shape[0]
    DO_STAGES: gl.constexpr = do_tile[0].shape[0]
    BLOCK_Q: gl.constexpr = q_tile[0].shape[3]
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_Q)
    step = 0  # over all items
    turn = 0
    item, place = own_item(turn, offsets, shared, CONSUMER)
    while item < num_items:
        batch, first_head, keys, queries, visible = locate_keys(
            item, place, problem, offsets, window_left, window_right, False, GROUP_SIZE, BLOCK_Q
        )
        start_kv, seq_kv, diagonal = keys
        begin, before, full, after = visible
        # Keys are counted as queries are.
        key = start_kv + CONSUMER * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout)) - diagonal

        # The first tile of queries has no pᵀ·dout to run under its exponentials.
        slot = step % Q_STAGES
        mbarrier.wait(k_full.index(0), turn & 1)
        mbarrier.wait(q_full.index(slot), step // Q_STAGES & 1)
        if IS_PACKED:
            clear_queries(q_tile, q_full, step, 0, queries, visible, GROUP_SIZE)
            clear_keys(k_tile, CONSUMER, k_full.index(0), turn & 1, keys, queries)
        s = product_scores(k_tile, CONSUMER, q_tile, slot, HEAD_DIM, layout)
        s = warpgroup_mma_wait(0, deps=(s,))
        start = group_step(0, begin, before, full, after, BLOCK_Q, GROUP_SIZE)[1]
        lse2 = read_row(lse2_row, slot, layout)
        arrive(Q_READ + slot, READERS)
        power, _dcap = exponents(s, lse2, start, key, None, rule, window_left, window_right, EDGES)
        p = gl.exp2(power)
        packed = pack(p, dtype)
        dv = zeros(64, HEAD_DIM_V)

        # Visit the other tiles that see these keys; only tiles at the edges are masked.
        index = 1
        step += 1
        for masked in gl.static_range(1 if EDGES else 0, -1, -1):
            end = (before + full + after) * GROUP_SIZE
            if masked:
                end = (before + after) * GROUP_SIZE
            while index < end:
                if IS_PACKED and masked:
                    # dout's next tile may need the place of this one: it is not there before.
                    begun = step - index
                    clear_queries(q_tile, q_full, begun, index, queries, visible, GROUP_SIZE)
                    clear_queries(do_tile, do_full, begun, index - 1, queries, visible, GROUP_SIZE)
                slot = step % Q_STAGES
                previous = (step - 1) % DO_STAGES
                # sᵀ = scale · k qᵀ, and dv += pᵀ dout for the tile before
                mbarrier.wait(q_full.index(slot), step // Q_STAGES & 1)
                s = product_scores(k_tile, CONSUMER, q_tile, slot, HEAD_DIM, layout)
                mbarrier.wait(do_full.index(previous), (step - 1) // DO_STAGES & 1)
                left = unpack(packed, dtype, layout, "edge" if masked else "full")
                dv = add_product(dv, left, do_tile, previous)
                s = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s,))
                # pᵀ = exp(sᵀ - lse)
                start = group_step(index, begin, before, full, after, BLOCK_Q, GROUP_SIZE)[1]
                lse2 = read_row(lse2_row, slot, layout)
                arrive(Q_READ + slot, READERS)
                power, _dcap = exponents(
                    s, lse2, start, key, None, rule, window_left, window_right, masked
                )
                p = gl.exp2(power)
                # This wait passes at once. Its branch keeps ptxas from moving the next one up.
                mbarrier.wait(do_full.index(previous), (step - 1) // DO_STAGES & 1)
                dv, left = wait_product(dv, left)
                arrive(DO_READ + previous, READERS)
                packed = pack(p, dtype)
                index += 1
                step += 1
            if IS_PACKED and masked:
                begun = step - index
                clear_queries(do_tile, do_full, begun, index - 1, queries, visible, GROUP_SIZE)

        # The last pᵀ·dout
        previous = (step - 1) % DO_STAGES
        mbarrier.wait(do_full.index(previous), (step - 1) // DO_STAGES & 1)
        left = unpack(packed, dtype, layout, "end")
        dv = add_product(dv, left, do_tile, previous)
        dv, left = wait_product(dv, left)
        arrive(DO_READ + previous, READERS)

        # Store. Nobody else reads these rows of k.
        head_kv = first_head // GROUP_SIZE
        store_result(
            dv_maps, dv_tile, CONSUMER, dv, batch, head_kv, start_kv, seq_kv,
            heads_q // GROUP_SIZE, IS_PACKED, HEAD_DIM_V,
        )  # fmt: skip
        tma.store_wait(0)
        mbarrier.arrive(kv_read.index(CONSUMER), count=1)
        turn += 1
        item, place = own_item(turn, offsets, shared, CONSUMER)


def prepare_dv(call: KernelCall) -> Prepared:
    """Return grid and arguments of `flash_bwd_dv_kernel`."""
    q, k, _v, dout, lse2, _delta, _dk, dv, *_ = call.layouts
    block_q = call.config.block_q
    maps = (
        map_arguments("q", 0, q, block_q)
        | map_arguments("k", 1, k, 64)
        | map_arguments("dout", 3, dout, block_q)
        | stored_arguments(call.spec, "dv", 7, dv, 64)
        | {"lse2": row_map(4, lse2, block_q)}
    )
    return persistent_keys(call, call.spec.group_size, maps)
