"""The reference family: plain torch, on any device, for any supported problem.

A function takes and returns what the kernel of its name does. `append_kv` waits for the device.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torch_attn.kernels.parts import result_memory
from torch_attn.operands import without_autocast
from twin_attention.contract.operands import (
    AppendOperands,
    AttentionOperands,
    DecodeOperands,
    GradientCarry,
    PagedOperands,
    PartialOperands,
)
from twin_attention.contract.paged_spec import AppendSpec, DecodeSpec, PagedCache, PagedSpec
from twin_attention.contract.reference.cache import positions_of_new, quantize
from twin_attention.contract.reference.kinds import backward_of, forward_of, jvp_of
from twin_attention.contract.reference.merge import merge
from twin_attention.contract.reference.paged import paged_forward, ragged_forward
from twin_attention.contract.reference.partial import partial_backward, partial_forward
from twin_attention.contract.reference.rotary import rotate_new
from twin_attention.contract.spec import AttentionSpec, MergeSpec, PartialSpec
from twin_attention.targets.family import Backend


def flash_fwd(
    operands: AttentionOperands[Tensor], spec: AttentionSpec, backend: Backend
) -> tuple[Tensor, ...]:
    """Compute out, lse and any other requested result in float32."""
    forward = forward_of(spec)
    with without_autocast(operands.q.device):
        out, lse, *of_rows = forward(operands, spec, torch.float32)
        rest = [lse.new_zeros(lse.shape)] if spec.terms else []  # its backward needs none
    return out.to(operands.q.dtype).contiguous(), lse, *rest, *of_rows


def flash_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    operands: AttentionOperands[Tensor],
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    spec: AttentionSpec,
    backend: Backend,
) -> AttentionOperands[Tensor]:
    backward = backward_of(spec)
    with without_autocast(out.device):
        gradients = backward(dout, dlse, operands, spec, torch.float32)
    return operands._make(
        None if dx is None or x is None else dx.to(x.dtype).contiguous()
        for dx, x in zip(gradients, operands, strict=True)
    )


def flash_jvp(
    tangents: AttentionOperands[Tensor],
    operands: AttentionOperands[Tensor],
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    spec: AttentionSpec,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Compute the tangents of out and lse in float32; None is a tangent of 0."""
    with without_autocast(out.device):
        dout, dlse = jvp_of(spec)(tangents, operands, spec, torch.float32)
    return dout.to(out.dtype).contiguous(), dlse


def partial_fwd(
    operands: PartialOperands[Tensor],
    carry: Tensor | None,
    lse: Tensor | None,
    spec: PartialSpec,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Add the operands' keys to a result, in float32 until the last part."""
    q = operands.q
    if carry is None or lse is None:
        carry, lse = result_memory(q, None, None, replace(spec, last=False))
        carry.zero_()
        lse.fill_(-torch.inf)
    with without_autocast(q.device):
        out, lse = partial_forward(operands, carry, lse, spec, torch.float32)
    return (out.to(q.dtype) if spec.last else out), lse


def partial_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    operands: PartialOperands[Tensor],
    out: Tensor,
    lse: Tensor,
    carry: GradientCarry[Tensor] | None,
    spec: PartialSpec,
    backend: Backend,
) -> tuple[GradientCarry[Tensor], Tensor, Tensor]:
    """Compute gradients through the operands' keys; the carry's lse2 holds lse."""
    with without_autocast(out.device):
        if carry is None:
            delta = (dout.float() * out.float()).sum(-1).mT
            if dlse is not None:
                delta = delta - dlse.masked_fill(lse == -torch.inf, 0)
            carry = GradientCarry(torch.zeros_like(operands.q, dtype=torch.float32), lse, delta)
        dq, dk, dv = partial_backward(dout, carry.lse2, carry.delta, operands, spec, torch.float32)
    return carry._replace(dq=carry.dq + dq), dk, dv


def partial_dq(
    like: Tensor, carry: GradientCarry[Tensor], spec: PartialSpec, backend: Backend
) -> Tensor:
    return carry.dq.to(like.dtype)


def paged_decode(
    operands: DecodeOperands[Tensor], spec: DecodeSpec, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Compute out and lse in float32, from copies of the pages."""
    with without_autocast(operands.q.device):
        out, lse = paged_forward(operands, spec, torch.float32)
    return out.to(operands.q.dtype).contiguous(), lse


def paged_attention(
    operands: PagedOperands[Tensor], spec: PagedSpec, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Compute out and lse in float32, in O(Tq · B · capacity) memory."""
    with without_autocast(operands.q.device):
        out, lse = ragged_forward(operands, spec, torch.float32)
    return out.to(operands.q.dtype).contiguous(), lse


def append_kv(
    operands: AppendOperands[Tensor], spec: AppendSpec, backend: Backend
) -> Tensor | None:
    k_new, q = rotate_new(operands, spec, torch.float32)
    if not spec.is_empty:
        slots = _slots(operands, spec)
        _write(operands.k_pages, k_new, slots, operands.k_scale, spec.cache)
        if operands.v_pages is not None:
            _write(operands.v_pages, operands.v_new, slots, operands.v_scale, spec.cache)
    return None if q is None else q.to(operands.k_new.dtype).contiguous()


def _slots(operands: AppendOperands[Tensor], spec: AppendSpec) -> tuple[Tensor, Tensor, Tensor]:
    cache = spec.cache
    position, sequence, within = positions_of_new(operands, spec)
    within = within & (position >= 0) & (position < cache.capacity)
    column = position.clamp(0, cache.capacity - 1) // cache.page_size
    page = operands.block_tables[sequence, column]
    within &= (page >= 0) & (page < cache.num_pages)
    return page, position % cache.page_size, within


def _write(
    pages: Tensor,
    new: Tensor,
    slots: tuple[Tensor, Tensor, Tensor],
    scale: Tensor | None,
    cache: PagedCache,
) -> None:
    page, slot, within = slots
    if scale is not None:
        new = quantize(new, scale, cache, pages.dtype)
    pages[page[within], slot[within]] = new[within].to(pages.dtype)


def combine(outs: Tensor, lses: Tensor, spec: MergeSpec, backend: Backend) -> tuple[Tensor, Tensor]:
    out, lse = merge(outs, lses, torch.float32)
    return out.to(outs.dtype).contiguous(), lse.contiguous()


def combine_bwd(
    dout: Tensor, dlse: Tensor | None, outs: Tensor, lses: Tensor, spec: MergeSpec, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `combine` in float32, one part at a time, which saves memory.

    The formulas are in `portable.combine_bwd`. dout is [B, S, H, Dv], dlse [B, H, S] float32 or
    None, outs [N, B, S, H, Dv] and lses [N, B, H, S]; so are their gradients, contiguous.
    """
    # A row that saw no key in any part would have NaN; a part that saw none has weight 0.
    weight = lses.softmax(0).masked_fill_(lses == -torch.inf, 0)
    douts = outs.new_empty(outs.shape)
    dp = lses.new_empty(lses.shape)
    for n, out in enumerate(outs.unbind()):
        torch.mul(dout, weight[n].mT[..., None], out=douts[n])
        dp[n] = out.to(torch.float32, copy=True).mul_(dout).sum(-1).mT
    dp.masked_fill_(weight == 0, 0)  # such a part may hold anything
    delta = (weight * dp).sum(0)
    if dlse is not None:
        delta -= dlse
    return douts, dp.sub_(delta).mul_(weight)
