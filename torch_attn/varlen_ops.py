"""The torch operators `torch_attn::flash_varlen_fwd` and `torch_attn::flash_varlen_bwd`.

They are registered as those of `torch_attn.flash_ops`, which says why, and run the same kernels.
`vmap` is refused: sequences of another batch are further sequences of a packed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_attn.calls import Call, is_recorded, keep, recall
from torch_attn.flash_ops import (
    OPTIONS,
    TAGS,
    Backward,
    Differentiable,
    pack,
    readable,
    with_left_out,
)
from torch_attn.operands import dtype_name, operand, rows_aligned, schema
from twin_attention.contract.operands import VarlenOperands, describe_operands
from twin_attention.contract.spec import VarlenSpec, Window
from twin_attention.contract.validate import (
    FlashOptions,
    check_flash_attention_varlen,
    not_mapped,
)

_library = torch.library.Library("torch_attn", "FRAGMENT")
_OPERANDS, _NUM_OPERANDS = schema(VarlenOperands), len(VarlenOperands._fields)
# As in `flash_ops`; the offsets' gradients, which there are none of, have no element either.
_GRADIENTS = ", ".join(f"Tensor d{name}" for name in VarlenOperands._fields)
_library.define(
    f"flash_varlen_fwd({_OPERANDS}, {OPTIONS}) -> (Tensor out, Tensor lse)",
    tags=TAGS,
)
_library.define(
    f"flash_varlen_bwd(Tensor dout, Tensor? dlse, {_OPERANDS}, Tensor out, Tensor lse, {OPTIONS}) "
    f"-> ({_GRADIENTS})",
    tags=TAGS,
)
flash_varlen_fwd = torch.ops.torch_attn.flash_varlen_fwd.default
flash_varlen_bwd = torch.ops.torch_attn.flash_varlen_bwd.default


def unpack(args: Sequence[Any]) -> tuple[VarlenOperands[Tensor], list[Any], FlashOptions, Any]:
    """Split an operator's arguments as `flash_ops.unpack` does."""
    *results, scale, left, right, softcap, deterministic, implementation = args[_NUM_OPERANDS:]
    options = FlashOptions(scale, Window(left, right), softcap, deterministic)
    return VarlenOperands._make(args[:_NUM_OPERANDS]), results, options, implementation


def spec_of(operands: VarlenOperands[Tensor], options: FlashOptions, *others: Tensor) -> VarlenSpec:
    """Describe the problem of checked arguments; `others` are read as well."""
    spec = VarlenSpec.of(operands, dtype_name(operands.q.dtype), *options)
    return replace(spec, rows_aligned=rows_aligned(*operands[:3], *others))


def forward(function, spec, backend, *operands: Tensor | None):
    """Run a family's flash_fwd."""
    return function(VarlenOperands._make(operands), spec, backend)


def _backward(function, spec, backend, dout, dlse, *tensors: Tensor | None):
    """Run a family's flash_bwd."""
    *operands, out, lse = tensors
    return function(dout, dlse, VarlenOperands._make(operands), out, lse, spec, backend)


def _run_forward(*args):
    known = _Forward.name, args[:_NUM_OPERANDS], args[_NUM_OPERANDS:]
    call = recall(*known)
    if call is None:
        operands, _, options, implementation = unpack(args)
        spec = spec_of(operands, options)
        call = Call("flash_fwd", forward, spec, implementation, operands.q.device)
        keep(*known, call)
    return call(*args[:_NUM_OPERANDS])


def _run_backward(dout, dlse, *args):
    dout, dlse = readable(dout, dlse)
    end = _NUM_OPERANDS + 2
    tensors = dout, dlse, *args[:end]
    known = _Backward.name, tensors, args[end:]
    call = recall(*known)
    if call is None:
        operands, _, options, implementation = unpack(args)
        spec = spec_of(operands, options, dout)
        call = Call("flash_bwd", _backward, spec, implementation, dout.device)
        keep(*known, call)
    return with_left_out(call(*tensors), dout)


def _fake_forward(*args):
    operands, _, options, _ = unpack(args)
    check_flash_attention_varlen(describe_operands(operands, operand), options)
    q = operands.q
    tokens_q, heads_q, _ = q.shape
    out = q.new_empty((tokens_q, heads_q, operands.v.shape[2]))
    return out, q.new_empty((heads_q, tokens_q), dtype=torch.float32)


def _fake_backward(dout, dlse, *args):
    operands, *_ = unpack(args)
    gradients = (
        x.new_empty(x.shape) if x is not None and x.is_floating_point() else None for x in operands
    )
    return with_left_out(gradients, dout)


def _present(
    gradients: Sequence[Tensor], operands: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return an operator's gradients with None for an operand that has none."""
    return tuple(
        dx if x is not None and x.is_floating_point() else None
        for dx, x in zip(gradients, operands, strict=True)
    )


class _Forward(Differentiable):
    op, name, num_tensors = flash_varlen_fwd, "torch_attn::flash_varlen_fwd", _NUM_OPERANDS

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.options = inputs[_NUM_OPERANDS:]
        ctx.save_for_backward(*inputs[:_NUM_OPERANDS], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        *operands, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        gradients = flash_varlen_bwd(dout, dlse, *operands, out, lse, *ctx.options)
        return *_present(gradients, operands), *(None for _ in ctx.options)


class _Backward(Backward):
    op, name, num_tensors = flash_varlen_bwd, "torch_attn::flash_varlen_bwd", _NUM_OPERANDS + 4


def attend(
    call: Call, operands: VarlenOperands[Tensor], return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Run a forward that is kept, past the dispatcher. lse may be None if it is not returned."""
    if not is_recorded(operands):
        return call(*operands)
    results = _record(call, return_lse, *operands)
    return results if return_lse else (results, None)


class _Kept(torch.autograd.Function):
    """A forward that is kept, and its derivative: their kernels, past the dispatcher.

    As in `torch_attn.flash_ops`, an lse that the caller has not asked for is no output.
    """

    @staticmethod
    def forward(ctx, call, return_lse, *operands):
        out, lse = call(*operands)
        ctx.call = call
        ctx.save_for_backward(*operands, out, lse)
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        *operands, out, lse = ctx.saved_tensors
        dout, dlse = readable(torch.zeros_like(out) if dout is None else dout, dlse)
        forward, spec = ctx.call, ctx.call.spec
        # All else that the call depends on follows from its forward's.
        known = forward, (dout, dlse), ()
        call = None
        if not torch.is_grad_enabled():
            call = recall(*known)
            if call is None:
                found = replace(spec, rows_aligned=spec.rows_aligned and rows_aligned(dout))
                found = Call("flash_bwd", _backward, found, forward.implementation, dout.device)
                call = found if keep(*known, found) else None
        if call is None:  # as in `flash_ops`
            options = FlashOptions(spec.scale, spec.window, spec.softcap, spec.deterministic)
            options = pack(options, forward.implementation)
            gradients = flash_varlen_bwd(dout, dlse, *operands, out, lse, *options)
            return None, None, *_present(gradients, operands)
        return None, None, *call(dout, dlse, *operands, out, lse)

    jvp = Differentiable.jvp


# As in `flash_ops.Differentiable.call`.
_record = super(torch.autograd.Function, _Kept).apply  # pyright: ignore[reportAttributeAccessIssue]


def _refuse_vmap(*_: Any) -> NoReturn:
    not_mapped("flash_attention_varlen")


def _register(function: type[Differentiable], run, fake) -> None:
    name = function.name
    torch.library.register_fake(name, fake, lib=_library)
    _library.impl(name, run, "CompositeExplicitAutograd")  # every backend
    _library.impl(name, function.call, "Autograd")
    torch.library.register_vmap(name, _refuse_vmap, lib=_library)


_register(_Forward, _run_forward, _fake_forward)
_register(_Backward, _run_backward, _fake_backward)
