"""Flash attention, forward mode, for SM90: `torch_attn.kernels.portable.flash_jvp`'s formulas.

Given out and lse, a tile of keys has five products. Without them the kernel computes these too, in
six, where the forward and the five are seven.
"""

from typing import Any, NamedTuple

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
from torch_attn.kernels.explicit.tma import allocate_tile, column_pieces, maps_of, stored_maps_of
from torch_attn.kernels.library.terms import terms_argument, terms_of
from torch_attn.kernels.sm90.flash_jvp_consumer import Kernel, consume
from torch_attn.kernels.sm90.flash_jvp_producer import produce_keys
from torch_attn.kernels.tile_lists import listed_argument, listed_mask
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared, launch
from torch_attn.operands import with_rows
from twin_attention.contract.operands import FlashOperands, VarlenOperands
from twin_attention.contract.spec import AttentionSpec, VarlenSpec, Window
from twin_attention.targets.family import Backend
from twin_attention.targets.steps import steps_of_queries


class Tangents(NamedTuple):
    """The tangents of operands, shaped as these, or None; q or k has one."""

    q: Any
    k: Any
    v: Any
    sinks: Any


class Results(NamedTuple):
    """A forward's results, whose `out` and `lse` are given, or written; and their tangents."""

    out: Any
    lse: Any
    dout: Any
    dlse: Any
    given: Any = None


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
    HEAD_DIM_V: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    EDGES: gl.constexpr,
):
    """One program computes tiles of BLOCK_Q rows of dout and dlse, one after the other.

    Warps, descriptors and counter_ptr as in `flash_fwd_kernel`; the tangents of q, k and v have
    descriptors as these do. A given out is a pointer to [B, Sq, Hq, Dv], contiguous. Loop
    invariant, accumulation and the row that sees no key: as in the portable `flash_jvp_kernel`,
    with p relative to the maximum so far unless lse is given.
    """
    dtype: gl.constexpr = q[0].dtype
    NUM_CONSUMERS: gl.constexpr = BLOCK_Q // 64
    gl.static_assert(NUM_STAGES <= MAX_STAGES)
    q_tile = allocate_tile(dtype, NUM_CONSUMERS, 64, HEAD_DIM)
    k_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM)
    v_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM_V)
    dq_tile, dk_tile, dv_tile = (), (), ()
    if tangents.q is not None:
        dq_tile = allocate_tile(dtype, NUM_CONSUMERS, 64, HEAD_DIM)
    if tangents.k is not None:
        dk_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM)
    if tangents.v is not None:
        dv_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM_V)
    # Results are stored from where the queries and their tangents were, if they fit.
    dout_tile, out_tile = q_tile, dq_tile
    if column_pieces(HEAD_DIM) != column_pieces(HEAD_DIM_V):
        dout_tile = allocate_tile(dtype, NUM_CONSUMERS, 64, HEAD_DIM_V)
    if not results.given and (
        tangents.q is None or column_pieces(HEAD_DIM) != column_pieces(HEAD_DIM_V)
    ):
        out_tile = allocate_tile(dtype, NUM_CONSUMERS, 64, HEAD_DIM_V)
    q_full = allocate_barriers(NUM_CONSUMERS)
    q_read = allocate_barriers(NUM_CONSUMERS)
    k_full = allocate_barriers(NUM_STAGES)
    v_full = allocate_barriers(NUM_STAGES)
    fence_async_shared()

    tiles = (q_tile, dq_tile, k_tile, dk_tile, v_tile, dv_tile, out_tile, dout_tile)
    barriers = (q_full, q_read, k_full, v_full)
    shared = ()
    if are_counted(num_sequences, mask.tiles) or counter_ptr is not None:
        shared = allocate_hand_over(NUM_CONSUMERS, mask.tiles is not None)
    problem = Problem(
        seq_q, seq_kv, diagonal, heads_q, num_items, together, mask.offsets.q, mask.offsets.kv,
        num_sequences, mask.segments, mask.tree, mask.depths, mask.tiles, None,
    )  # fmt: skip
    # Variables would turn constants into tensors. The last partition loads.
    gl.warp_specialize(
        [
            (consume, (
                Kernel(
                    tiles, barriers, shared, results, terms, problem, rule, window_left,
                    window_right, sinks_ptr, tangents.sinks, None, mask.q_ranges, BLOCK_Q, HEAD_DIM,
                    HEAD_DIM_V, EDGES,
                ),
                part,
            ))
            if part < NUM_CONSUMERS
            else (produce_keys, (
                tiles, barriers, shared, counter_ptr, (q, k, v), tangents, problem, window_left,
                window_right, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V,
            ))
            for part in ((0, 1, 2) if NUM_CONSUMERS < 3 else (0, 1, 2, 3))
        ],
        [4, 1] if NUM_CONSUMERS < 3 else [4, 4, 1],
        [240, 24] if NUM_CONSUMERS < 3 else [160, 160, 24],
    )  # fmt: skip


def flash_jvp(
    tangents: FlashOperands[Tensor | None] | VarlenOperands[Tensor | None],
    operands: FlashOperands[Tensor] | VarlenOperands[Tensor],
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    spec: AttentionSpec,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Return dout and dlse, as the portable `flash_jvp` does."""
    dout, dlse = out.new_empty(out.shape), lse.new_empty(lse.shape)
    results = Results(out.contiguous(), lse, dout, dlse, True)
    _launch(tangents, operands, results, rest, spec, backend)
    return dout, dlse


def flash_fwd_jvp(
    tangents: FlashOperands[Tensor | None] | VarlenOperands[Tensor | None],
    operands: FlashOperands[Tensor] | VarlenOperands[Tensor],
    spec: AttentionSpec,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a forward's out and lse, and their tangents; no terms are added to scores."""
    q = operands.q
    out = q.new_empty((*q.shape[:-1], spec.head_dim_v))
    lse = q.new_empty((*q.shape[:-3], spec.heads_q, spec.seq_q), dtype=torch.float32)
    results = Results(out, lse, out.new_empty(out.shape), lse.new_empty(lse.shape), False)
    _launch(tangents, operands, results, None, spec, backend)
    return results[:4]


def _launch(
    tangents: Any,
    operands: Any,
    results: Results,
    rest: Tensor | None,
    spec: AttentionSpec,
    backend: Backend,
) -> None:
    q, k, v = operands[:3]
    dq, dk, dv = (None if x is None else with_rows(x) for x in tangents[:3])
    if dq is None and dk is None:
        dq = q.new_zeros(q.shape)
    tensors = (
        q, k, v, operands.sinks, Tangents(dq, dk, dv, tangents.sinks),
        results._replace(given=None), item_counter(q, spec),
        terms_of(operands, spec)._replace(rest2=rest),
        listed_mask("flash_jvp", operands, spec, backend),
    )  # fmt: skip
    # One consumer; Triton adds the other partitions' warps.
    launch(
        "flash_jvp", flash_jvp_kernel, _prepare, tensors, spec, backend, results.given, num_warps=4
    )


def _prepare(call: KernelCall) -> Prepared:
    spec, config = call.spec, call.config
    (is_given,) = call.constants
    q, k, v, _sinks, tangents, results, counter, *_ = call.layouts
    maps = {
        name: None if x is None else maps_of(x, 64 if name == "q" else config.block_kv)
        for name, x in zip("qkv", tangents, strict=False)
    }
    out = results.out if is_given else stored_maps_of(spec, results.out, 64)
    dout = stored_maps_of(spec, results.dout, 64)
    arguments = {
        "q": maps_of(q, 64),
        "k": maps_of(k, config.block_kv),
        "v": maps_of(v, config.block_kv),
        "tangents": tangents._replace(**maps),
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
