"""The torch operators of decoding: `torch_attn::paged_decode`, `::append_kv`, `::merge_states`.

Each has a kernel for every backend and a fake kernel for tracing; `merge_states` alone has a
derivative, `::merge_states_bwd`, and both of these a batching rule for `vmap`.
`torch_attn.flash_ops` says why they are registered as they are. None waits for the device: lengths
and page tables are read there, so a CUDA graph may be replayed with others. The exception is the
reference of append_kv.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_attn.calls import Call, keep, recall
from torch_attn.flash_ops import RUN, TAGS, Differentiable, join, readable, without_gradient
from torch_attn.operands import dtype_name, operand, schema
from twin_attention.contract.operands import AppendOperands, DecodeOperands, describe_operands
from twin_attention.contract.spec import AppendSpec, DecodeSpec, MergeSpec
from twin_attention.contract.validate import (
    DecodeOptions,
    check_append_kv,
    check_merge_states,
    check_paged_decode,
    not_differentiable,
    one_pool,
)

_library = torch.library.Library("torch_attn", "FRAGMENT")
_library.define(
    f"paged_decode({schema(DecodeOperands)}, float? scale, SymInt? window_left, float? softcap, "
    "SymInt? num_splits, str? implementation) -> (Tensor out, Tensor lse)",
    tags=TAGS,
)
_library.define(
    f"append_kv({schema(AppendOperands, ('k_pages', 'v_pages'))}, bool rotary_interleaved, "
    "str? implementation) -> Tensor",
    tags=TAGS,
)
_library.define(
    "merge_states(Tensor outs, Tensor lses, str? implementation) -> (Tensor out, Tensor lse)",
    tags=TAGS,
)
_library.define(
    "merge_states_bwd(Tensor dout, Tensor? dlse, Tensor outs, Tensor lses, "
    "str? implementation=None) -> (Tensor douts, Tensor dlses)",
    tags=TAGS,
)
paged_decode = torch.ops.torch_attn.paged_decode.default
append_kv = torch.ops.torch_attn.append_kv.default
merge_states = torch.ops.torch_attn.merge_states.default
merge_states_bwd = torch.ops.torch_attn.merge_states_bwd.default


def check_merge(outs, lses) -> MergeSpec:
    """Check tensors as `check_merge_states` does."""
    return check_merge_states(operand("outs", outs), operand("lses", lses))


def _decode(function, spec, backend, *operands: Tensor | None):
    """Run a family's paged_decode."""
    return function(DecodeOperands._make(operands), spec, backend)


def _run_decode(*args):
    operands, options, implementation = _unpack_decode(args)
    known = "torch_attn::paged_decode", operands, args[len(operands) :]
    call = recall(*known)
    if call is None:
        q, sinks = operands.q, operands.sinks
        kv_dtype = dtype_name(operands.k_pages.dtype)
        spec = DecodeSpec.of(operands, dtype_name(q.dtype), kv_dtype, *options)
        if spec.is_empty:
            out, lse = _allocate_outputs(operands)
            lse = lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks[:, None])
            return out.zero_(), lse
        call = Call("paged_decode", _decode, spec, implementation, q.device)
        keep(*known, call)
    return call(*operands)


def _fake_decode(*args):
    operands, options, _ = _unpack_decode(args)
    check_paged_decode(describe_operands(operands, operand), options)
    return _allocate_outputs(operands)


def _unpack_decode(args) -> tuple[DecodeOperands[Tensor], DecodeOptions, Any]:
    """Split the operator's arguments, which come in the order of its schema."""
    end = len(DecodeOperands._fields)
    *options, implementation = args[end:]
    return DecodeOperands._make(args[:end]), DecodeOptions._make(options), implementation


def _allocate_outputs(operands: DecodeOperands[Tensor]) -> tuple[Tensor, Tensor]:
    batch, tokens, heads_q, _ = operands.q.shape
    out = operands.q.new_empty((batch, tokens, heads_q, operands.v_pages.shape[3]))
    return out, out.new_empty((batch, heads_q, tokens), dtype=torch.float32)


def check_pools(k_pages: Tensor, v_pages: Tensor) -> None:
    """Refuse pools that begin at one address: values would overwrite keys.

    Views that share a storage and no element begin at different addresses.
    """
    if k_pages is v_pages:
        one_pool()
    if torch.compiler.is_compiling() or type(k_pages) is not Tensor:
        return  # the operator does it when it runs; a fake tensor warns of the question
    try:
        address = k_pages.data_ptr()
        if address and address == v_pages.data_ptr():  # 0 without memory
            one_pool()
    except RuntimeError:  # a tensor of torch.func has no address
        return


def _append(function, spec, backend, *operands: Tensor | None) -> tuple[Tensor | None]:
    """Run a family's append_kv."""
    return (function(AppendOperands._make(operands), spec, backend),)


def _run_append(*args):
    *tensors, interleaved, implementation = args
    operands = AppendOperands._make(tensors)
    check_pools(operands.k_pages, operands.v_pages)
    known = "torch_attn::append_kv", operands, (interleaved, implementation)
    call = recall(*known)
    if call is None:
        dtype, kv_dtype = (dtype_name(x.dtype) for x in (operands.k_new, operands.k_pages))
        spec = AppendSpec.of(operands, dtype, kv_dtype, interleaved)
        call = Call("append_kv", _append, spec, implementation, operands.k_new.device)
        if not spec.is_empty:
            keep(*known, call)
    (q,) = call(*operands)
    if not call.spec.is_empty:
        count_write(operands)
    return _or_nothing(q, operands)


def _or_nothing(q: Tensor | None, operands: AppendOperands[Tensor]) -> Tensor:
    """Return the rotated queries; an empty tensor if there are none, since a tensor is due."""
    return operands.k_new.new_empty(0) if q is None else q


def count_write(operands: AppendOperands[Tensor]) -> None:
    """Tell autograd of an append, which it does not see."""
    torch.autograd.graph.increment_version((operands.k_pages, operands.v_pages))


def _fake_append(*args):
    *tensors, interleaved, _ = args
    operands = AppendOperands._make(tensors)
    check_append_kv(describe_operands(operands, operand), interleaved)
    q = operands.q
    return _or_nothing(None if q is None else q.new_empty(q.shape), operands)


def _merge(function, spec, backend, outs: Tensor, lses: Tensor):
    """Run a family's combine."""
    return function(outs, lses, spec, backend)


def _run_merge(outs, lses, implementation):
    known = "torch_attn::merge_states", (outs, lses), (implementation,)
    call = recall(*known)
    if call is None:
        spec = MergeSpec(*outs.shape, dtype=dtype_name(outs.dtype))
        if spec.is_empty:
            out, lse = _allocate_merged(outs, lses)
            return out.zero_(), lse.fill_(-torch.inf)
        call = Call("combine", _merge, spec, implementation, outs.device)
        keep(*known, call)
    return call(outs, lses)


def _fake_merge(outs, lses, implementation):
    check_merge(outs, lses)
    return _allocate_merged(outs, lses)


def _allocate_merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def _merge_backward(function, spec, backend, *tensors: Tensor | None):
    """Run a family's combine_bwd."""
    return function(*tensors, spec, backend)


def _run_merge_backward(dout, dlse, outs, lses, implementation=None):
    dout, dlse = readable(dout, dlse)
    tensors = dout, dlse, outs, lses
    known = "torch_attn::merge_states_bwd", tensors, (implementation,)
    call = recall(*known)
    if call is None:
        spec = MergeSpec(*outs.shape, dtype=dtype_name(outs.dtype))
        call = Call("combine_bwd", _merge_backward, spec, implementation, outs.device)
        keep(*known, call)
    return call(*tensors)


def _fake_merge_backward(dout, dlse, outs, lses, implementation=None):
    return outs.new_empty(outs.shape), lses.new_empty(lses.shape)


class _Merge(Differentiable):
    op, name, num_tensors = merge_states, "torch_attn::merge_states", 2
    function = "merge_states"

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        *states, ctx.implementation = inputs
        ctx.save_for_backward(*states)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        outs, lses = ctx.saved_tensors
        dout = outs.new_zeros(outs.shape[1:]) if dout is None else dout
        return *merge_states_bwd(dout, dlse, outs, lses, ctx.implementation), None

    @staticmethod
    def jvp(*_: Any) -> NoReturn:
        not_differentiable("forward mode", "Use torch.func.vjp or Tensor.backward.", "merge_states")


class _MergeBackward(_Merge):
    op, name, num_tensors = merge_states_bwd, "torch_attn::merge_states_bwd", 4

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(*_: Any) -> NoReturn:
        not_differentiable(
            "a second derivative", "Compute it with torch operations.", "merge_states"
        )


def _batch_merge(op, axes, info, in_dims, *args):
    """Apply the rule of `vmap`: the mapped dimension joins the batch.

    Args:
        op: the operator.
        axes: of the batch in each tensor among its arguments, and in its results.
    """
    of_tensors, of_results = axes
    size, count = info.batch_size, len(of_tensors)
    tensors = zip(args[:count], in_dims[:count], of_tensors, strict=True)
    joined = (None if x is None else join(x, dim, axis, size) for x, dim, axis in tensors)
    results = op(*joined, *args[count:])
    return tuple(x.unflatten(of_results, (size, -1)) for x in results), (of_results, of_results)


def _register(op: torch._ops.OpOverload, run, fake, autograd) -> None:
    name = op.name()
    torch.library.register_fake(name, fake, lib=_library)
    _library.impl(name, run, "CompositeExplicitAutograd")  # every backend
    RUN[name] = run
    _library.impl(name, autograd, "Autograd")


_register(paged_decode, _run_decode, _fake_decode, partial(without_gradient, paged_decode))
_register(append_kv, _run_append, _fake_append, partial(without_gradient, append_kv))
_register(merge_states, _run_merge, _fake_merge, _Merge.call)
_register(merge_states_bwd, _run_merge_backward, _fake_merge_backward, _MergeBackward.call)
for _op, _axes in ((merge_states, ((1, 1), 0)), (merge_states_bwd, ((0, 0, 1, 1), 1))):
    _rule = partial(_batch_merge, _op, _axes)
    torch.library.register_vmap(_op.name(), _rule, lib=_library)
