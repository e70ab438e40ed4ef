"""The reference family: the operations in plain torch, on any device, for any supported problem.

Each function takes and returns what the kernel of the same name does. `append_kv` waits for the
device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_attn.operands import without_autocast
from twin_attention.contract import reference
from twin_attention.contract.spec import AttentionSpec, DecodeSpec, MergeSpec, PagedCache
from twin_attention.targets.family import Backend


def flash_fwd(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Compute out and lse in float32, with O(Sq · Skv) memory."""
    with without_autocast(q.device):
        out, lse = reference.attention_forward(q, k, v, spec, torch.float32)
    return out.to(q.dtype).contiguous(), lse


def flash_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv in float32, with O(Sq · Skv) memory."""
    with without_autocast(q.device):
        dq, dk, dv = reference.attention_backward(dout, dlse, q, k, v, spec, torch.float32)
    return dq.to(q.dtype).contiguous(), dk.to(q.dtype).contiguous(), dv.to(q.dtype).contiguous()


def paged_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    spec: DecodeSpec,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Compute out and lse in float32, on keys and values copied out of their pages."""
    operands = (q, k_pages, v_pages, block_tables, seq_lens, sinks, k_scale, v_scale)
    with without_autocast(q.device):
        out, lse = reference.paged_forward(*operands, spec, torch.float32)
    return out.to(q.dtype).contiguous(), lse


def append_kv(
    k_new: Tensor,
    v_new: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    cache: PagedCache,
    backend: Backend,
) -> None:
    """Write new tokens into their pages."""
    _write(k_new, k_pages, block_tables, seq_lens, k_scale, cache)
    _write(v_new, v_pages, block_tables, seq_lens, v_scale, cache)


def _write(
    new: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: Tensor | None,
    cache: PagedCache,
) -> None:
    tokens = new.shape[1]
    position = seq_lens.long()[:, None] + torch.arange(-tokens, 0, device=new.device)
    within = (position >= 0) & (position < cache.capacity)
    page = position.clamp(0, cache.capacity - 1) // cache.page_size
    page = block_tables.long().gather(1, page)
    within &= (page >= 0) & (page < cache.num_pages)
    if scale is not None:
        new = reference.quantize(new, scale, cache, pages.dtype)
    pages[page[within], position[within] % cache.page_size] = new[within]


def combine(outs: Tensor, lses: Tensor, spec: MergeSpec, backend: Backend) -> tuple[Tensor, Tensor]:
    """Merge partial results over disjoint keys."""
    out, lse = reference.merge(outs, lses, torch.float32)
    return out.to(outs.dtype).contiguous(), lse.contiguous()
