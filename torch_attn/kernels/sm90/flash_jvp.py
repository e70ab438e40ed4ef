"""Flash attention, forward mode, for SM90: the formulas of the portable `flash_jvp`.

Given out and lse, a tile of keys has five products. Without them the kernel computes these too,
with six, where a forward and these five are seven.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_attn.kernels.explicit.barriers import MAX_STAGES, allocate_barriers
from torch_attn.kernels.explicit.items import (
    Problem,
    allocate_hand_over,
    are_counted,
    item_counter,
    persistent,
)
from torch_attn.kernels.explicit.tma import allocate_tile, maps_of, stored_maps_of
from torch_attn.kernels.library.arguments import Tangents
from torch_attn.kernels.library.terms import terms_argument, terms_of
from torch_attn.kernels.sm90.flash_bwd_dq_producer import produce_keys
from torch_attn.kernels.sm90.flash_fwd import is_counted
from torch_attn.kernels.sm90.flash_fwd_consumer import Kernel
from torch_attn.kernels.sm90.flash_jvp_consumer import Results, consume
from torch_attn.kernels.tile_lists import listed_argument, listed_mask
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared, launch
from torch_attn.operands import aligned, with_rows
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec, VarlenSpec, Window
from twin_attention.targets.family import Backend
from twin_attention.targets.steps import steps_of_queries


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "num_items"])
def flash_jvp_kernel(
    q,
    k,
    v,
    sinks_ptr,
    tangents,
    results,
    counter_ptr,
    terms,
    mask,
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
    BLOCK_KV: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    EDGES: gl.constexpr,
):
    """One program computes tiles of 128 rows of dout and dlse, one after the other.

    Warps, descriptors and counter_ptr as in `flash_fwd_kernel`, for the tangents of q, k and v too.
    Loop invariant, accumulation and the row that sees no key: as in the portable
    `flash_jvp_kernel`, with p relative to the maximum so far unless lse is given.
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
                (q_tile, dq_tile, (), k_tile, v_tile),
                (q_full, dq_full, (), q_read, k_full, v_full), shared, counter_ptr, (),
                (q, tangents.q, ()), (k, v),
                (tangents.k, dk_tile, dk_full, tangents.v, dv_tile, dv_full), problem, window_left,
                window_right, GROUP_SIZE, HEAD_DIM, HEAD_DIM,
            ))
            for part in (0, 1, 2)
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def flash_jvp(
    tangents: AttentionOperands[Tensor | None],
    operands: AttentionOperands[Tensor],
    out: Tensor | None,
    lse: Tensor | None,
    rest: Tensor | None,
    spec: AttentionSpec,
    backend: Backend,
) -> tuple[Tensor, ...]:
    """Return dout and dlse, as the portable `flash_jvp` does; out and lse too if not given."""
    q = operands.q
    pairs = zip(tangents, operands[:3], strict=False)
    given = (x.new_zeros(x.shape) if dx is None else aligned(with_rows(dx)) for dx, x in pairs)
    is_given = out is not None
    if out is None or lse is None:
        out = q.new_empty((*q.shape[:-1], spec.head_dim_v))
        lse = q.new_empty((*q.shape[:-3], spec.heads_q, spec.seq_q), dtype=torch.float32)
    counter = item_counter(q, spec, is_counted("flash_jvp", spec, backend, q.device))
    results = Results(out.contiguous(), lse, out.new_empty(out.shape), lse.new_empty(lse.shape))
    tensors = (
        *operands[:3], operands.sinks, Tangents(*given, tangents.sinks), results, counter,
        terms_of(operands, spec)._replace(rest2=rest),
        listed_mask("flash_jvp", operands, spec, backend),
    )  # fmt: skip
    # One consumer; Triton adds the other partitions' warps.
    launch("flash_jvp", flash_jvp_kernel, _prepare, tensors, spec, backend, is_given, num_warps=4)
    return results[2:4] if is_given else results[:4]


def _prepare(call: KernelCall) -> Prepared:
    spec, config = call.spec, call.config
    (is_given,) = call.constants
    q, k, v, _sinks, tangents, results, counter, *_ = call.layouts
    out = results.out if is_given else stored_maps_of(spec, results.out, 64)
    dout = stored_maps_of(spec, results.dout, 64)
    blocks = zip("qkv", (64, config.block_kv, config.block_kv), strict=True)
    arguments = {
        "q": maps_of(q, 64),
        "k": maps_of(k, config.block_kv),
        "v": maps_of(v, config.block_kv),
        "tangents": tangents._replace(**{x: maps_of(getattr(tangents, x), n) for x, n in blocks}),
        "results": results._replace(out=out, dout=dout, given=tl.constexpr(is_given)),
        "EDGES": isinstance(spec, VarlenSpec)
        or spec.hides_by_data
        or spec.window != Window()
        or spec.seq_kv % config.block_kv != 0,
        **terms_argument(call),
        **listed_argument(call, of_keys=True),
    }
    steps = steps_of_queries(spec, config.block_q, config.block_kv)
    return persistent(call, steps, spec.heads_q * spec.batch, arguments, counter is not None)
