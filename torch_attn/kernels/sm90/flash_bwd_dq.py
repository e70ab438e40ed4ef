"""dq of the backward for SM90, in a kernel of its own."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_attn.kernels.explicit.barriers import MAX_STAGES, allocate_barriers
from torch_attn.kernels.explicit.items import Problem, allocate_hand_over, are_counted
from torch_attn.kernels.explicit.tma import allocate_tile, column_pieces, maps_of, stored_maps_of
from torch_attn.kernels.library.terms import terms_argument
from torch_attn.kernels.library.tiles import strides_of
from torch_attn.kernels.sm90.flash_bwd_dq_consumer import Kernel, consume
from torch_attn.kernels.sm90.flash_bwd_dq_producer import produce_keys
from torch_attn.kernels.sm90.halves import first_columns, halves_in
from torch_attn.kernels.sm90.work import persistent_queries
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared
from twin_attention.targets import sm90


@triton.constexpr_function
def q_stages(head_dim, head_dim_v, is_packed):
    """Return how many items' q, dout and out fit in memory; with two, packed ones are slower."""
    columns = sum(column_pieces(head_dim)) + sum(column_pieces(head_dim_v))
    return 2 if columns <= 128 and not is_packed else 1


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "num_items"])
def flash_bwd_dq_kernel(
    q, k, v, dout, out, statistics, dq, counter_ptr, terms, mask, out_strides, seq_q, seq_kv,
    diagonal, num_sequences, heads_q, rule, window_left, window_right, num_items, together,
    GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    BLOCK_KV: gl.constexpr, NUM_STAGES: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """One program computes tiles of 128 rows of dq, or 64 in `halves`, one after the other.

    Warps, descriptors and counter_ptr as in `flash_fwd_kernel`. A consumer issues ds·k of a tile of
    keys with q·kᵀ of the next. During the first q·kᵀ it computes lse2 and delta of its rows, and
    stores them for the kernel of dk and dv; the producer does so for a tile without rows. Operands,
    loop invariant and accumulation: as in the portable `flash_bwd_preprocess_kernel` and
    `flash_bwd_dq_kernel`; lse2 and delta are outputs.

    Without lse, lse2 and delta are inputs, and out is not read. With intervals in the mask lse and
    out are None, dq is float32, passed as a pointer, and the program adds to it; a tile that sees
    no key is passed over.

    out, out_strides: its descriptors and None. Where shared memory has no room for its rows, nor
        for more than NUM_STAGES - 1 tiles of v: its pointer and `Strides`.
    """
    dtype: gl.constexpr = q[0].dtype
    # The next tile of keys is awaited before this one is released.
    gl.static_assert(NUM_STAGES >= 2)
    gl.static_assert(NUM_STAGES <= MAX_STAGES)
    Q_STAGES: gl.constexpr = q_stages(HEAD_DIM, HEAD_DIM_V, num_sequences is not None)
    IN_HALVES: gl.constexpr = first_columns(HEAD_DIM) < HEAD_DIM
    TILES: gl.constexpr = 1 if IN_HALVES else 2
    q_tile = allocate_tile(dtype, TILES * Q_STAGES, 64, HEAD_DIM)
    do_tile = allocate_tile(dtype, TILES * Q_STAGES, 64, HEAD_DIM_V)
    out_tile = ()
    if out is not None and out_strides is None:
        out_tile = allocate_tile(dtype, 2 * Q_STAGES, 64, HEAD_DIM_V)
    V_STAGES: gl.constexpr = NUM_STAGES if out_strides is None else NUM_STAGES - 1
    k_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM)
    v_tile = allocate_tile(dtype, V_STAGES, BLOCK_KV, HEAD_DIM_V)
    halves = None
    if IN_HALVES:
        gl.static_assert(V_STAGES == 1)
        halves = halves_in(v_tile, BLOCK_KV)
    q_full = allocate_barriers(2 * Q_STAGES)
    do_full = allocate_barriers(2 * Q_STAGES)
    out_full = allocate_barriers(2 * Q_STAGES)
    q_read = allocate_barriers(2 * Q_STAGES)
    k_full = allocate_barriers(NUM_STAGES)
    v_full = allocate_barriers(V_STAGES)
    fence_async_shared()

    tiles = (q_tile, do_tile, out_tile, k_tile, v_tile)
    barriers = (q_full, do_full, out_full, q_read, k_full, v_full)
    shared = ()
    if are_counted(num_sequences, mask.tiles) or mask.intervals is not None:
        shared = allocate_hand_over(2, mask.tiles is not None)
    problem = Problem(
        seq_q, seq_kv, diagonal, heads_q, num_items, together, mask.offsets.q, mask.offsets.kv,
        num_sequences, mask.segments, mask.tree, mask.depths, mask.tiles, mask.intervals,
    )  # fmt: skip
    # Variables would turn constants into tensors. The last partition loads.
    gl.warp_specialize(
        [
            (consume, (
                Kernel(
                    tiles, barriers, shared, out, out_strides, statistics, dq, problem, rule,
                    terms, window_left, window_right, None, mask.q_ranges, halves, 64 * TILES,
                    HEAD_DIM, HEAD_DIM_V, EDGES,
                ),
                part,
            ))
            if part < 2
            else (produce_keys, (
                (q_tile, do_tile, out_tile, (k_tile,), (v_tile,)),
                (q_full, do_full, out_full, q_read, (k_full,), (v_full,)), shared, counter_ptr,
                ()
                if statistics.lse is None
                else (statistics.lse2, statistics.delta)
                if statistics.rest2 is None
                else (statistics.lse2, statistics.delta, statistics.rest2),
                (q, dout, out), ((k,), (v,)), problem, window_left, window_right, GROUP_SIZE,
                HEAD_DIM, HEAD_DIM_V,
            ))
            for part in (0, 1, 2)
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def prepare_dq(call: KernelCall) -> Prepared:
    spec, config = call.spec, call.config
    q, k, v, dout, out, _statistics, dq, *_ = call.layouts
    large = sm90.has_large_heads(spec)
    arguments = {
        "q": maps_of(q, 64),
        "k": maps_of(k, config.block_kv),
        "v": maps_of(v, config.block_kv),
        "dout": maps_of(dout, 64),
        "out": out if large or out is None else maps_of(out, 64),
        "out_strides": strides_of(out=out).out if large else None,
        "dq": stored_maps_of(spec, dq, 64),
        **terms_argument(call),
    }
    return persistent_queries(call, arguments)
