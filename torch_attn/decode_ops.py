"""The torch operators of decoding: `torch_attn::paged_decode`, `::append_kv`, `::merge_states`.

Each has a kernel for every backend and a fake kernel for tracing; none has a derivative.
`torch_attn.flash_ops` says why they are registered as they are. None waits for the device: lengths
and page tables are read there, so a CUDA graph may be replayed with others. The exception is the
reference of append_kv.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from torch_attn.dispatch import choose
from torch_attn.flash_ops import TAGS, without_gradient
from torch_attn.operands import dtype_name, operand
from twin_attention.contract.spec import DecodeSpec, MergeSpec, PagedCache, scale_or_default
from twin_attention.contract.validate import (
    DecodeOptions,
    Operand,
    check_append_kv,
    check_merge_states,
    check_paged_decode,
)

_library = torch.library.Library("torch_attn", "FRAGMENT")
_library.define(
    "paged_decode(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_tables, Tensor seq_lens, "
    "Tensor? sinks, Tensor? k_scale, Tensor? v_scale, float? scale, SymInt? window_left, "
    "float? softcap, SymInt? num_splits, str? implementation) -> (Tensor out, Tensor lse)",
    tags=TAGS,
)
_library.define(
    "append_kv(Tensor k_new, Tensor v_new, Tensor(a!) k_pages, Tensor(b!) v_pages, "
    "Tensor block_tables, Tensor seq_lens, Tensor? k_scale, Tensor? v_scale, "
    "str? implementation) -> ()",
    tags=TAGS,
)
_library.define(
    "merge_states(Tensor outs, Tensor lses, str? implementation) -> (Tensor out, Tensor lse)",
    tags=TAGS,
)
paged_decode = torch.ops.torch_attn.paged_decode.default
append_kv = torch.ops.torch_attn.append_kv.default
merge_states = torch.ops.torch_attn.merge_states.default


def check_decode(
    q, k_pages, v_pages, block_tables, seq_lens, sinks, k_scale, v_scale, options: DecodeOptions
) -> DecodeSpec:
    """Check tensors as `check_paged_decode` does."""
    return check_paged_decode(
        operand("q", q),
        *_cache_operands(k_pages, v_pages, block_tables, seq_lens),
        _optional("sinks", sinks),
        _optional("k_scale", k_scale),
        _optional("v_scale", v_scale),
        options,
    )


def check_append(
    k_new, v_new, k_pages, v_pages, block_tables, seq_lens, k_scale, v_scale
) -> PagedCache:
    """Check tensors as `check_append_kv` does."""
    return check_append_kv(
        operand("k_new", k_new),
        operand("v_new", v_new),
        *_cache_operands(k_pages, v_pages, block_tables, seq_lens),
        _optional("k_scale", k_scale),
        _optional("v_scale", v_scale),
    )


def check_merge(outs, lses) -> MergeSpec:
    """Check tensors as `check_merge_states` does."""
    return check_merge_states(operand("outs", outs), operand("lses", lses))


def _cache_operands(
    k_pages, v_pages, block_tables, seq_lens
) -> tuple[Operand, Operand, Operand, Operand]:
    return (
        operand("k_pages", k_pages),
        operand("v_pages", v_pages),
        operand("block_tables", block_tables),
        operand("seq_lens", seq_lens),
    )


def _optional(name: str, x: Tensor | None) -> Operand | None:
    return None if x is None else operand(name, x)


def _run_decode(
    q, k_pages, v_pages, block_tables, seq_lens, sinks, k_scale, v_scale,
    scale, window_left, softcap, num_splits, implementation,
):  # fmt: skip
    batch, tokens, heads_q, head_dim = q.shape
    cache = _cache(k_pages, v_pages, block_tables)
    scale = scale_or_default(scale, head_dim)
    dtype = dtype_name(q.dtype)
    spec = DecodeSpec(batch, tokens, heads_q, cache, dtype, scale, window_left, softcap, num_splits)
    if spec.is_empty:
        out, lse = _allocate_outputs(q, v_pages)
        return out.zero_(), lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks[:, None])
    operands = (q, k_pages, v_pages, block_tables, seq_lens, sinks, k_scale, v_scale)
    backend, _ = choose(implementation, q.device, spec)
    return backend.family.function("paged_decode")(*operands, spec, backend)


def _fake_decode(
    q, k_pages, v_pages, block_tables, seq_lens, sinks, k_scale, v_scale,
    scale, window_left, softcap, num_splits, implementation,
):  # fmt: skip
    options = DecodeOptions(scale, window_left, softcap, num_splits)
    check_decode(q, k_pages, v_pages, block_tables, seq_lens, sinks, k_scale, v_scale, options)
    return _allocate_outputs(q, v_pages)


def _allocate_outputs(q: Tensor, v_pages: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, heads_q, _ = q.shape
    out = q.new_empty((batch, tokens, heads_q, v_pages.shape[3]))
    return out, q.new_empty((batch, heads_q, tokens), dtype=torch.float32)


def _run_append(
    k_new, v_new, k_pages, v_pages, block_tables, seq_lens, k_scale, v_scale, implementation
):
    cache = _cache(k_pages, v_pages, block_tables)
    if cache.is_empty or k_new.numel() == 0:
        return
    operands = (k_new, v_new, k_pages, v_pages, block_tables, seq_lens, k_scale, v_scale)
    backend, _ = choose(implementation, k_new.device, cache)
    backend.family.function("append_kv")(*operands, cache, backend)
    if backend.runs_kernels:
        torch.autograd.graph.increment_version((k_pages, v_pages))


def _fake_append(
    k_new, v_new, k_pages, v_pages, block_tables, seq_lens, k_scale, v_scale, implementation
):
    check_append(k_new, v_new, k_pages, v_pages, block_tables, seq_lens, k_scale, v_scale)


def _run_merge(outs, lses, implementation):
    spec = MergeSpec(*outs.shape, dtype=dtype_name(outs.dtype))
    if spec.is_empty:
        out, lse = _allocate_merged(outs, lses)
        return out.zero_(), lse.fill_(-torch.inf)
    backend, _ = choose(implementation, outs.device, spec)
    return backend.family.function("combine")(outs, lses, spec, backend)


def _fake_merge(outs, lses, implementation):
    check_merge(outs, lses)
    return _allocate_merged(outs, lses)


def _allocate_merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def _cache(k_pages: Tensor, v_pages: Tensor, block_tables: Tensor) -> PagedCache:
    num_pages, page_size, heads, head_dim = k_pages.shape
    return PagedCache(
        num_pages,
        page_size,
        block_tables.shape[1],
        heads,
        head_dim,
        v_pages.shape[3],
        dtype_name(k_pages.dtype),
    )


def _register(op: torch._ops.OpOverload, run, fake) -> None:
    name = op.name()
    torch.library.register_fake(name, fake, lib=_library)
    _library.impl(name, run, "CompositeExplicitAutograd")  # every backend
    _library.impl(name, partial(without_gradient, op), "Autograd")


_register(paged_decode, _run_decode, _fake_decode)
_register(append_kv, _run_append, _fake_append)
_register(merge_states, _run_merge, _fake_merge)
