"""Flash attention, forward mode, for SM90: the formulas of the portable `flash_jvp`."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_attn.kernels.explicit.barriers import MAX_STAGES, allocate_barriers
from torch_attn.kernels.explicit.items import Problem, allocate_hand_over, are_counted, item_counter
from torch_attn.kernels.explicit.tma import allocate_tile, maps_of, stored_maps_of
from torch_attn.kernels.library.arguments import Tangents
from torch_attn.kernels.library.terms import terms_argument, terms_of
from torch_attn.kernels.sm90.flash_bwd_dq_producer import produce_keys
from torch_attn.kernels.sm90.flash_fwd import is_counted
from torch_attn.kernels.sm90.flash_fwd_consumer import Kernel
from torch_attn.kernels.sm90.flash_jvp_consumer import consume
from torch_attn.kernels.sm90.work import persistent_queries
from torch_attn.kernels.tile_lists import listed_mask
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared, launch
from torch_attn.operands import aligned, with_rows
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "num_items"])
def flash_jvp_kernel(
    q, k, v, sinks_ptr, tangents, results, counter_ptr, terms, mask, seq_q, seq_kv, diagonal,
    num_sequences, heads_q, rule, window_left, window_right, num_items, together,
    GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_KV: gl.constexpr,
    NUM_STAGES: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """One program computes tiles of 128 rows of dout and dlse, one after the other.

    Warps, descriptors and counter_ptr as in `flash_fwd_kernel`, for the tangents of q, k and v too.
    Loop invariant, accumulation and the row that sees no key: as in the portable
    `flash_jvp_kernel`.
    """
    dtype: gl.constexpr = q[0].dtype
    gl.static_assert(NUM_STAGES <= MAX_STAGES)
    q_tile = allocate_tile(dtype, 2, 64, HEAD_DIM)
    dq_tile = allocate_tile(dtype, 2, 64, HEAD_DIM)
    k_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM)
    dk_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM)
    v_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM)
    dv_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM)
    q_full, dq_full, q_read = allocate_barriers(2), allocate_barriers(2), allocate_barriers(2)
    k_full, v_full = allocate_barriers(NUM_STAGES), allocate_barriers(NUM_STAGES)
    dk_full, dv_full = allocate_barriers(NUM_STAGES), allocate_barriers(NUM_STAGES)
    fence_async_shared()

    shared = ()
    if are_counted(num_sequences, mask.tiles) or counter_ptr is not None:
        shared = allocate_hand_over(2, mask.tiles is not None)
    problem = Problem(
        seq_q, seq_kv, diagonal, heads_q, num_items, together, mask.offsets.q, mask.offsets.kv,
        num_sequences, mask.segments, mask.tree, mask.depths, mask.tiles, None,
    )  # fmt: skip
    # Variables would turn constants into tensors. The last partition loads.
    gl.warp_specialize(
        [
            (consume, (
                Kernel(
                    (q_tile, dq_tile, k_tile, dk_tile, v_tile, dv_tile),
                    (q_full, dq_full, q_read, k_full, dk_full, v_full, dv_full), shared, results,
                    terms, problem, rule, window_left, window_right, (sinks_ptr, tangents.sinks),
                    None, mask.q_ranges, None, 128, HEAD_DIM, HEAD_DIM, 0, EDGES, False,
                ),
                part,
            ))
            if part < 2
            else (produce_keys, (
                (q_tile, dq_tile, (), (k_tile, dk_tile), (v_tile, dv_tile)),
                (q_full, dq_full, (), q_read, (k_full, dk_full), (v_full, dv_full)), shared,
                counter_ptr, (), (q, tangents.q, ()), ((k, tangents.k), (v, tangents.v)), problem,
                window_left, window_right, GROUP_SIZE, HEAD_DIM, HEAD_DIM,
            ))
            for part in (0, 1, 2)
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def flash_jvp(
    tangents: AttentionOperands[Tensor | None],
    operands: AttentionOperands[Tensor],
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    spec: AttentionSpec,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Return dout and dlse, as the portable `flash_jvp` does; a missing tangent is 0."""
    q = operands.q
    pairs = zip(tangents, operands[:3], strict=False)
    given = (x.new_zeros(x.shape) if dx is None else aligned(with_rows(dx)) for dx, x in pairs)
    counter = item_counter(q, spec, is_counted("flash_jvp", spec, backend, q.device))
    dout, dlse = out.new_empty(out.shape), lse.new_empty(lse.shape)
    tensors = (
        *operands[:3], operands.sinks, Tangents(*given, tangents.sinks),
        (out.contiguous(), lse, dout, dlse), counter,
        terms_of(operands, spec)._replace(rest2=rest),
        listed_mask("flash_jvp", operands, spec, backend),
    )  # fmt: skip
    # One consumer; Triton adds the other partitions' warps.
    launch("flash_jvp", flash_jvp_kernel, _prepare, tensors, spec, backend, num_warps=4)
    return dout, dlse


def _prepare(call: KernelCall) -> Prepared:
    q, k, v, _sinks, tangents, (out, lse, dout, dlse), counter, *_ = call.layouts
    rows = 64, call.config.block_kv, call.config.block_kv
    arguments = {
        **dict(zip("qkv", map(maps_of, (q, k, v), rows), strict=True)),
        "tangents": Tangents(*map(maps_of, tangents[:3], rows), tangents.sinks),
        "results": (out, lse, stored_maps_of(call.spec, dout, 64), dlse),
        **terms_argument(call),
    }
    return persistent_queries(call, arguments, counter is not None)
