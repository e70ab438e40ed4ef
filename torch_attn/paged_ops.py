"""The torch operator `torch_attn::paged_attention`: a kernel for every backend, and a fake kernel.

It is registered like those of `torch_attn.decode_ops`, and never waits for the device. `vmap` is
refused: sequences of another batch are further sequences of a packed one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_attn.calls import Call, keep, recall
from torch_attn.flash_ops import RUN, TAGS, without_gradient
from torch_attn.operands import dtype_name, operand, rows_aligned, schema
from twin_attention.contract.operands import PagedOperands, describe_operands
from twin_attention.contract.spec import PagedSpec
from twin_attention.contract.validate import DecodeOptions, check_paged_attention, not_mapped

_library = torch.library.Library("torch_attn", "FRAGMENT")
_library.define(
    f"paged_attention({schema(PagedOperands)}, float? scale, SymInt? window_left, float? softcap, "
    "SymInt? num_splits, str? implementation) -> (Tensor out, Tensor lse)",
    tags=TAGS,
)
paged_attention = torch.ops.torch_attn.paged_attention.default
_NUM_OPERANDS = len(PagedOperands._fields)


def attend(function, spec, backend, *operands: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run a family's paged_attention."""
    return function(PagedOperands._make(operands), spec, backend)


def _run(*args):
    operands, options, implementation = _unpack(args)
    known = "torch_attn::paged_attention", operands, args[_NUM_OPERANDS:]
    call = recall(*known)
    if call is None:
        q, sinks = operands.q, operands.sinks
        kv_dtype = dtype_name(operands.k_pages.dtype)
        spec = PagedSpec.of(operands, dtype_name(q.dtype), kv_dtype, *options)
        spec = replace(spec, rows_aligned=rows_aligned(*operands[:3]))
        if spec.is_empty:
            out, lse = _allocate_outputs(operands)
            lse = lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks[:, None])
            return out.zero_(), lse
        call = Call("paged_attention", attend, spec, implementation, q.device)
        keep(*known, call)
    return call(*operands)


def _fake(*args):
    operands, options, _ = _unpack(args)
    check_paged_attention(describe_operands(operands, operand), options)
    return _allocate_outputs(operands)


def _unpack(args) -> tuple[PagedOperands[Tensor], DecodeOptions, Any]:
    """Split the operator's arguments, which come in the order of its schema."""
    *options, implementation = args[_NUM_OPERANDS:]
    return PagedOperands._make(args[:_NUM_OPERANDS]), DecodeOptions._make(options), implementation


def _allocate_outputs(operands: PagedOperands[Tensor]) -> tuple[Tensor, Tensor]:
    tokens, heads_q, _ = operands.q.shape
    out = operands.q.new_empty((tokens, heads_q, operands.v_pages.shape[3]))
    return out, out.new_empty((heads_q, tokens), dtype=torch.float32)


def _refuse_vmap(*_: Any) -> NoReturn:
    not_mapped("paged_attention")


_name = paged_attention.name()
torch.library.register_fake(_name, _fake, lib=_library)
_library.impl(_name, _run, "CompositeExplicitAutograd")  # every backend
RUN[_name] = _run
_library.impl(_name, partial(without_gradient, paged_attention), "Autograd")
torch.library.register_vmap(_name, _refuse_vmap, lib=_library)
