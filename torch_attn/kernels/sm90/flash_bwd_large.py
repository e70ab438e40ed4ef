"""dk or dv of the backward for SM90, for head sizes above 128: a kernel for each."""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from torch_attn.kernels.explicit.barriers import (
    DO_READ,
    MAX_LARGE_DO_STAGES,
    MAX_Q_STAGES,
    P_READ,
    P_WRITTEN,
    Q_READ,
    READERS,
    allocate_barriers,
    arrive,
    wait_for_all,
)
from torch_attn.kernels.explicit.items import Problem, allocate_hand_over, are_counted, own_item
from torch_attn.kernels.explicit.registers import scale_all
from torch_attn.kernels.explicit.tma import (
    allocate_row,
    allocate_tile,
    column_pieces,
    maps_of,
    row_map,
    rows_map,
    store_result,
    stored_maps_of,
)
from torch_attn.kernels.explicit.wgmma import zeros
from torch_attn.kernels.library.terms import terms_argument
from torch_attn.kernels.sm90 import flash_bwd_dk, flash_bwd_dv
from torch_attn.kernels.sm90.halves import add_handed, allocate_halves, first_columns, halves_in
from torch_attn.kernels.sm90.queries import (
    Barriers,
    Kernel,
    SharedTiles,
    clear_queries,
    own_keys,
    persistent_keys,
    produce_queries,
)
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "num_items"])
def flash_bwd_large_kernel(
    q, k, v, dout, lse2, delta, dk, dv, counter_ptr, terms, mask, seq_q, seq_kv, diagonal,
    num_sequences, heads_q, rule, window_left, window_right, num_items, together,
    GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    BLOCK_Q: gl.constexpr, NUM_STAGES: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """One program computes tiles of 128 rows of dk or of dv, one after the other.

    A producer warp loads with TMA; two consumer warpgroups have 64 keys each and visit the tiles of
    BLOCK_Q queries. Above 256 columns both have the same 64 keys (`halves`). Operands, loop
    invariant and accumulation: as in the portable `flash_bwd_dkdv_kernel`. The gradient that is not
    computed is None; for dv, so are v and delta.
    """
    dtype: gl.constexpr = q[0].dtype
    SIZE: gl.constexpr = HEAD_DIM if dv is None else HEAD_DIM_V
    IN_HALVES: gl.constexpr = first_columns(SIZE) < SIZE
    KEY_TILES: gl.constexpr = 1 if IN_HALVES else 2
    # dk is always stored where k was. dv is too, or has a tile that replaces a stage of dout.
    IN_K: gl.constexpr = dv is None or column_pieces(HEAD_DIM) == column_pieces(HEAD_DIM_V)
    DO_STAGES: gl.constexpr = NUM_STAGES if dv is None or not IN_K else NUM_STAGES + 1
    gl.static_assert(NUM_STAGES + 1 <= MAX_Q_STAGES)
    gl.static_assert(DO_STAGES <= MAX_LARGE_DO_STAGES)
    k_tile = allocate_tile(dtype, KEY_TILES, 64, HEAD_DIM)
    v_tile = ()
    if dv is None:
        v_tile = allocate_tile(dtype, KEY_TILES, 64, HEAD_DIM_V)
    q_tile = allocate_tile(dtype, NUM_STAGES + 1, BLOCK_Q, HEAD_DIM)
    do_tile = allocate_tile(dtype, DO_STAGES, BLOCK_Q, HEAD_DIM_V)
    result_tile = k_tile
    if not IN_K:
        result_tile = allocate_tile(dtype, 2, 64, HEAD_DIM_V)
    halves = ()
    if IN_HALVES and dv is None:
        halves = halves_in(do_tile, BLOCK_Q)
    elif IN_HALVES:
        halves = allocate_halves(dtype, BLOCK_Q)
    lse2_row = allocate_row(NUM_STAGES + 1, BLOCK_Q)
    delta_row = lse2_row
    if dv is None:
        delta_row = allocate_row(NUM_STAGES, BLOCK_Q)
    k_full = allocate_barriers(1)
    v_full = k_full
    if dv is None:
        v_full = allocate_barriers(1)
    kv_read = allocate_barriers(2)
    q_full = allocate_barriers(NUM_STAGES + 1)
    do_full = allocate_barriers(DO_STAGES)
    fence_async_shared()

    rest2_row = ()
    if terms.rest2 is not None:
        rest2_row = (allocate_row(NUM_STAGES + 1, BLOCK_Q),)
    tiles = SharedTiles(k_tile, v_tile, q_tile, do_tile, lse2_row, delta_row, (), rest2_row)
    barriers = Barriers(k_full, v_full, kv_read, q_full, do_full)
    shared = ()
    if are_counted(num_sequences, mask.tiles):
        shared = allocate_hand_over(2, mask.tiles is not None)
    problem = Problem(
        seq_kv, seq_q, diagonal, heads_q, num_items, together, mask.offsets.kv, mask.offsets.q,
        num_sequences, mask.segments, mask.tree, mask.depths, mask.tiles, mask.intervals,
    )  # fmt: skip
    # Variables would turn constants into tensors. The last partition loads.
    gl.warp_specialize(
        [
            (consume, (
                Kernel(
                    tiles, barriers, shared, (dk if dv is None else dv, result_tile, halves),
                    problem, rule, terms, window_left, window_right, mask.q_ranges, GROUP_SIZE,
                    GROUP_SIZE, False, HEAD_DIM, HEAD_DIM_V, EDGES,
                ),
                part,
            ))
            if part < 2
            else (produce_queries, (
                tiles, barriers, shared, counter_ptr, (),
                SharedTiles(k, v, q, dout, lse2, delta, terms.bias, terms.rest2), problem,
                window_left, window_right,
                False, GROUP_SIZE, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V,
            ))
            for part in (0, 1, 2)
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def consume(kernel, CONSUMER: gl.constexpr):
    if len(kernel.results[2]) > 0 and CONSUMER == 1:
        _consume_handed(kernel)
    else:
        _consume_queries(kernel, CONSUMER)


@gluon.jit
def _consume_queries(kernel, CONSUMER: gl.constexpr):
    """Compute 64 rows of dk or dv of each item; results: maps, a tile and `Halves`."""
    IS_DK: gl.constexpr = len(kernel.tiles.v) > 0
    SIZE: gl.constexpr = kernel.head_dim if IS_DK else kernel.head_dim_v
    step = 0  # counted over all items
    turn = 0
    item, place = own_item(turn, kernel.problem, kernel.shared, CONSUMER)
    while item < kernel.problem.num_items:
        keys = own_keys(kernel, item, place, CONSUMER)
        if IS_DK:
            packed = flash_bwd_dk.visit_first(kernel, keys, step, turn, CONSUMER)
        else:
            packed = flash_bwd_dv.visit_first(kernel, keys, step, turn, CONSUMER)
        sums = zeros(64, first_columns(SIZE))

        # Visit the other tiles that see these keys; only tiles at the edges are masked.
        _begin, before, full, after = keys.visits
        index = 1
        step += 1
        for masked in gl.static_range(1 if kernel.edges else 0, -1, -1):
            end = before + after if masked else before + full + after
            end *= kernel.members
            while index < end:
                if IS_DK:
                    packed, sums = flash_bwd_dk.visit(
                        kernel, keys, index, step, packed, sums, masked, CONSUMER
                    )
                else:
                    packed, sums = flash_bwd_dv.visit(
                        kernel, keys, index, step, packed, sums, masked, CONSUMER
                    )
                index += 1
                step += 1
            if masked and not IS_DK and len(kernel.results[2]) == 0:
                clear_queries(
                    kernel, keys, kernel.tiles.dout, kernel.barriers.do_full, step - index,
                    index - 1,
                )  # fmt: skip

        if IS_DK:
            sums = flash_bwd_dk.add_last(kernel, packed, sums, step)
        else:
            sums = flash_bwd_dv.add_last(kernel, packed, sums, step)
        _store_rows(kernel, keys, sums, CONSUMER, 0)
        turn += 1
        item, place = own_item(turn, kernel.problem, kernel.shared, CONSUMER)


@gluon.jit
def _consume_handed(kernel):
    """Compute the other columns of each item, from pᵀ or dsᵀ of the first consumer."""
    IS_DK: gl.constexpr = len(kernel.tiles.v) > 0
    SIZE: gl.constexpr = kernel.head_dim if IS_DK else kernel.head_dim_v
    q_tile, do_tile, halves = kernel.tiles.q, kernel.tiles.dout, kernel.results[2]
    step = 0  # counted over all items
    turn = 0
    arrive(P_READ, 256)
    item, place = own_item(turn, kernel.problem, kernel.shared, 1)
    while item < kernel.problem.num_items:
        keys = own_keys(kernel, item, place, 0)
        _begin, before, full, after = keys.visits
        sums = zeros(64, SIZE - first_columns(SIZE))
        for _ in range((before + full + after) * kernel.members):
            slot_q, slot = step % q_tile[0].shape[0], step % do_tile[0].shape[0]
            wait_for_all(P_WRITTEN, 256)
            if IS_DK:
                sums = add_handed(halves, sums, q_tile, kernel.barriers.q_full, step)
            else:
                sums = add_handed(halves, sums, do_tile, kernel.barriers.do_full, step)
            arrive(Q_READ + slot_q, READERS)
            arrive(DO_READ + slot, READERS)
            step += 1
        _store_rows(kernel, keys, sums, 1, 1)
        turn += 1
        item, place = own_item(turn, kernel.problem, kernel.shared, 1)


@gluon.jit
def _store_rows(kernel, keys, sums, CONSUMER: gl.constexpr, FIRST: gl.constexpr):
    """Store column pieces from the FIRST on, where rows of k were that nobody reads any more."""
    IS_DK: gl.constexpr = len(kernel.tiles.v) > 0
    if IS_DK:
        sums = scale_all(sums, kernel.rule.scale)
    elif kernel.terms.seed is not None:
        sums = scale_all(sums, kernel.terms.dropout.scale)
    store_result(
        kernel.results[0], kernel.results[1], CONSUMER - FIRST, sums, keys.batch,
        keys.head // kernel.group_size, keys.first, keys.rows.end,
        kernel.problem.heads_q // kernel.group_size, kernel.problem.num_sequences is not None,
        kernel.head_dim if IS_DK else kernel.head_dim_v, FIRST,
    )  # fmt: skip
    tma.store_wait(0)
    mbarrier.arrive(kernel.barriers.kv_read.index(CONSUMER), count=1)


def prepare_dk(call: KernelCall) -> Prepared:
    _q, _k, v, _dout, _lse2, delta, dk, *_ = call.layouts
    return _prepare(call, {
        "v": maps_of(v, 64),
        "delta": row_map(delta, call.config.block_q),
        "dk": stored_maps_of(call.spec, dk, 64),
        "dv": None,
    })  # fmt: skip


def prepare_dv(call: KernelCall) -> Prepared:
    *_, dv, _counter, _terms, _mask = call.layouts
    without = dict.fromkeys(("v", "delta", "dk"))
    return _prepare(call, without | {"dv": stored_maps_of(call.spec, dv, 64)})


def _prepare(call: KernelCall, arguments: dict[str, Any]) -> Prepared:
    q, k, _v, dout, lse2, *_ = call.layouts
    terms = terms_argument(call)["terms"]
    block_q = call.config.block_q
    return persistent_keys(call, call.spec.group_size, arguments | {
        "q": maps_of(q, block_q),
        "k": maps_of(k, 64),
        "dout": maps_of(dout, block_q),
        "lse2": row_map(lse2, block_q),
        "terms": terms._replace(rest2=rows_map(terms.rest2, block_q)),
    })  # fmt: skip
