"""The torch operators `torch_attn::flash_fwd` and `torch_attn::flash_bwd`: what PyTorch sees.

Each has a kernel for every backend, which runs a kernel family (`torch_attn.dispatch`), a fake
kernel for tracing, a batching rule for `vmap`, and a derivative: that of flash_fwd calls
flash_bwd, that of flash_bwd refuses (a second derivative). They are registered with
`torch.library.Library`, which costs a quarter of the host time of `torch.library.custom_op` on
every call. Derivatives are autograd Functions on the operators' Autograd key rather than
`torch.library.register_autograd`, which gives zero tangents in forward mode without an error and
fails under `torch.func.grad`.

This is the one place that uses private torch API: the dispatch guards of ``torch._C`` in
`without_gradient` and `_Differentiable` (checked with torch 2.11 and 2.13;
``tests/torch_attn/test_ops.py`` and ``test_decode_ops.py`` guard it).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_attn.dispatch import choose
from torch_attn.operands import dtype_name, operand
from twin_attention.contract.operands import FlashOperands, describe_operands
from twin_attention.contract.spec import AttentionSpec, Window
from twin_attention.contract.validate import (
    FlashOptions,
    check_flash_attention,
    no_gradient,
    not_differentiable,
)

_library = torch.library.Library("torch_attn", "DEF")
_OPTIONS = (
    "float? scale, SymInt? window_left, SymInt? window_right, float? softcap, str? implementation"
)
# The kernels read strides: the compiler must hand over tensors as the program laid them out.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library.define(
    f"flash_fwd(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    tags=TAGS,
)
_library.define(
    "flash_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=TAGS,
)
flash_fwd = torch.ops.torch_attn.flash_fwd.default
flash_bwd = torch.ops.torch_attn.flash_bwd.default

_TORCH_FUNC = torch._C.DispatchKeySet(
    torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
) | torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)


def check(q: Tensor, k: Tensor, v: Tensor, options: FlashOptions) -> AttentionSpec:
    """Check tensors as `check_flash_attention` does."""
    return check_flash_attention(describe_operands(FlashOperands(q, k, v), operand), options)


def without_gradient(op: torch._ops.OpOverload, *args: Any) -> Any:
    """Run an operator that has no derivative: its kernel for the Autograd key.

    Raises:
        NotImplementedError: autograd would record the call, or it has tangents.
    """
    if _is_recorded(args):
        no_gradient(op.name().removeprefix("torch_attn::"))
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _is_recorded(args: tuple[Any, ...]) -> bool:
    """True when autograd would record an operator with these arguments, or one has a tangent."""
    enabled = torch.is_grad_enabled()
    return any(
        (enabled and x.requires_grad) or forward_ad.unpack_dual(x).tangent is not None
        for x in args
        if isinstance(x, Tensor)
    )


def _run_forward(q, k, v, scale, window_left, window_right, softcap, implementation):
    operands = FlashOperands(q, k, v)
    spec = spec_of(operands, scale, window_left, window_right, softcap)
    if spec.is_empty:
        out, lse = _allocate_outputs(q, v)
        return out.zero_(), lse.fill_(float("-inf"))
    backend, _ = choose(implementation, q.device, spec)
    return backend.family.function("flash_fwd")(operands, spec, backend)


def _run_backward(
    dout, dlse, q, k, v, out, lse, scale, window_left, window_right, softcap, implementation
):
    operands = FlashOperands(q, k, v)
    spec = spec_of(operands, scale, window_left, window_right, softcap)
    if spec.is_empty:
        return tuple(dx.zero_() for dx in _allocate_gradients(q, k, v))
    # The only copies: a gradient may come expanded, which the kernels do not take.
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    backend, _ = choose(implementation, q.device, spec)
    return backend.family.function("flash_bwd")(dout, dlse, operands, out, lse, spec, backend)


def spec_of(
    operands: FlashOperands[Tensor],
    scale: float | None,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
) -> AttentionSpec:
    """Describe the problem of an operator's checked arguments."""
    dtype = dtype_name(operands.q.dtype)
    return AttentionSpec.of(operands, dtype, scale, Window(window_left, window_right), softcap)


def _fake_forward(q, k, v, scale, window_left, window_right, softcap, implementation):
    check(q, k, v, FlashOptions(scale, Window(window_left, window_right), softcap))
    return _allocate_outputs(q, v)


def _fake_backward(dout, dlse, q, k, v, *rest):
    return _allocate_gradients(q, k, v)


def _allocate_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, seq_q, heads_q, _ = q.shape
    out = q.new_empty((batch, seq_q, heads_q, v.shape[3]))
    return out, q.new_empty((batch, heads_q, seq_q), dtype=torch.float32)


def _allocate_gradients(*qkv: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in qkv)


def _batch(op, num_tensors, info, in_dims, *args):
    """The rule of `vmap`: the mapped dimension joins the batch."""

    def fold(x, dim):
        if x is None:
            return None
        x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    tensors = map(fold, args[:num_tensors], in_dims[:num_tensors])
    outputs = op(*tensors, *args[num_tensors:])
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in outputs), (0,) * len(outputs)


class _Differentiable(torch.autograd.Function):
    """An operator with a derivative in reverse mode; subclasses name it and define `backward`."""

    generate_vmap_rule = True
    op: torch._ops.OpOverload

    @classmethod
    def call(cls, *args):
        """Run the operator so that a backward will find its way."""
        if not torch._C._are_functorch_transforms_active():
            if not _is_recorded(args):
                return cls.forward(*args)
            # Function.apply binds the signature on every call, which takes longer than a launch.
            bound = super(torch.autograd.Function, cls)
            return bound.apply(*args)  # pyright: ignore[reportAttributeAccessIssue]
        # torch.func calls this below its own dispatch key, but a Function has to start above it.
        included = torch._C._dispatch_tls_local_include_set() | _TORCH_FUNC
        excluded = torch._C._dispatch_tls_local_exclude_set() - _TORCH_FUNC
        with torch._C._ForceDispatchKeyGuard(included, excluded):
            return cls.apply(*args)

    @classmethod
    def forward(cls, *args):
        with torch._C._AutoDispatchBelowAutograd():
            return cls.op(*args)

    @staticmethod
    def jvp(*_: Any) -> NoReturn:
        not_differentiable("forward mode", "Use torch.func.vjp or Tensor.backward.")


class _Forward(_Differentiable):
    op = flash_fwd

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        q, k, v, *ctx.options = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        gradients = flash_bwd(dout, dlse, q, k, v, out, lse, *ctx.options)
        return *gradients, *(None for _ in ctx.options)


class _Backward(_Differentiable):
    op = flash_bwd

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(*_: Any) -> NoReturn:
        not_differentiable(
            "a second derivative", "Compute it with a plain attention in torch operations."
        )


def _register(function: type[_Differentiable], run, fake, num_tensors: int) -> None:
    op = function.op
    name = op.name()
    torch.library.register_fake(name, fake, lib=_library)
    _library.impl(name, run, "CompositeExplicitAutograd")  # every backend
    _library.impl(name, function.call, "Autograd")
    torch.library.register_vmap(name, partial(_batch, op, num_tensors), lib=_library)


_register(_Forward, _run_forward, _fake_forward, num_tensors=3)
_register(_Backward, _run_backward, _fake_backward, num_tensors=7)
