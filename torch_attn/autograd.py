"""Operators with a derivative, once.

A forward's derivative calls its backward or, in forward mode, the operator of its tangents.
Derivatives of these two are refused. They are autograd Functions on the operators' Autograd key,
because with `torch.library.register_autograd` forward mode silently gives zero tangents and
`torch.func.grad` fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual

from torch_attn import private
from torch_attn.calls import CALLS, Call, is_recorded
from torch_attn.operators import Operator, readable
from twin_attention.contract.operands import CONSTANTS, DIFFERENTIABLE, frozen_operands
from twin_attention.contract.validate.errors import not_constant, not_differentiable


class _Differentiable(Operator):
    @private.uncompiled
    def autograd(self, *args: Any) -> Any:
        if private.transforms_active():
            if private.in_jvp():
                pairs = [
                    unpack_dual(x, level=0) if isinstance(x, Tensor) else (x, None) for x in args
                ]
                if any(dx is not None for _, dx in pairs):
                    return self.dual(*zip(*pairs, strict=True))
            # torch.func calls this below its own dispatch key; a Function has to start above.
            with private.above_torch_func():
                return _Dispatched.apply(self, *args)
        tensors = args[: self.num_tensors]
        call = CALLS.find(self.name, tensors, args[self.num_tensors :])
        if call is not None:  # past the rest of the dispatcher
            return self.finish(call, tensors, call(*tensors))
        return _record(self, *args) if is_recorded(args) else self.below_autograd(*args)

    def save(self, ctx: Any, tensors: Any, options: Any, results: Any) -> tuple[Any, ...]:
        """Save what `gradients` needs, and return these tensors."""
        return ()

    def gradients(self, ctx: Any, needed: Any, *gradients: Any) -> Iterable[Tensor | None]:
        """Return a gradient for each tensor, None where `needed` is false."""
        raise NotImplementedError

    def dual(self, args: tuple[Any, ...], tangents: tuple[Tensor | None, ...]) -> Any:
        """Return dual results at a level of `torch.func.jvp`, which is below a Function's."""
        results = self.below_autograd(*args)
        found = self.tangents(tangents, args, results)
        return tuple(
            x if dx is None else make_dual(x, dx, level=0) for x, dx in zip_longest(results, found)
        )

    def tangents(self, tangents: Any, args: Any, results: Any) -> tuple[Tensor | None, ...]:
        """Return the results' tangents, from those of the tensors."""
        refuse_forward_mode(self.function)


class Derivative(_Differentiable):
    """An operator that computes a derivative, and has none: a backward's, or that of tangents."""

    def gradients(self, *_: Any) -> NoReturn:
        refuse_second_derivative(self.function)

    def tangents(self, *_: Any) -> NoReturn:
        refuse_second_derivative(self.function)


class Backward(Derivative):
    """A backward's operator. Its tensors begin with dout and dlse."""

    def prepare(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        return *readable(*tensors[:2]), *tensors[2:]

    def finish(self, call: Call, tensors: tuple[Any, ...], results: Any) -> tuple[Tensor, ...]:
        return with_left_out(results, tensors[0])


class Forward(_Differentiable):
    """A forward's operator: it returns out and lse, and other results without a derivative.

    `backward` takes dout, dlse, the tensors, `num_saved` saved results, the names of frozen
    operands if it has `names`, and the options. `jvp` takes the tangents of `DIFFERENTIABLE`
    operands, the tensors, three saved results and the options; None: there is no forward mode.
    """

    def __init__(
        self,
        *args: Any,
        backward: Backward,
        num_saved: int = 2,
        names: tuple[str, ...] = (),
        jvp: Derivative | None = None,
    ) -> None:
        self.backward, self.num_saved, self.names = backward, num_saved, names
        self.jvp = jvp
        super().__init__(*args)

    def returned(self, results: Any) -> Any:
        return *results[:2], *results[max(self.num_saved, 2) :]

    def save(self, ctx: Any, tensors: Any, options: Any, results: Any) -> tuple[Any, ...]:
        ctx.options, ctx.shape = options, results[0].shape
        saved = results[: self.num_saved]
        saved = *tensors, *saved, *[None] * (3 - len(saved) if saved else 0)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        if len(results) > 2:
            ctx.mark_non_differentiable(*results[2:])
        return saved

    def gradients(
        self, ctx: Any, needed: Any, dout: Tensor | None, dlse: Tensor | None = None, *_: Any
    ) -> Any:
        saved = ctx.saved_tensors  # read once: a checkpoint recomputes them here
        options = ctx.options
        if self.names:
            given = saved[: self.num_tensors], needed[: self.num_tensors]
            options = (" ".join(frozen_operands(self.names, *given)), *options)
        dout = saved[0].new_zeros(ctx.shape) if dout is None else dout
        # The operator refuses second derivatives; tensors of a transformation need it too.
        if not torch.is_grad_enabled() and type(dout) is Tensor:
            tensors = self.backward.prepare((dout, dlse, *saved))
            call = CALLS.find(self.backward.name, tensors, options)
            if call is not None:
                return call(*tensors)
        gradients = self.backward.op(dout, dlse, *saved, *options)
        both = zip(gradients, saved, strict=False)
        return (dx if has_gradient(x) and dx.shape == x.shape else None for dx, x in both)

    def tangents(self, tangents: Any, args: Any, results: Any) -> tuple[Tensor | None, ...]:
        if self.jvp is None:
            refuse_forward_mode(self.function)
        of_names = dict(zip(self.names, tangents, strict=False))
        for name in CONSTANTS:
            if of_names.get(name) is not None:
                not_constant(name)
        own = (of_names[name] for name in DIFFERENTIABLE if name in of_names)
        tensors, options = args[: self.num_tensors], args[self.num_tensors :]
        rest = results[2] if self.num_saved > 2 else None
        return self.jvp.op(*own, *tensors, *results[:2], rest, *options)


class _Dispatched(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(operator, *args):
        return operator.below_autograd(*args)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.operator, *args = inputs
        ctx.num_options = len(args) - ctx.operator.num_tensors
        tensors = args[: ctx.operator.num_tensors]
        saved = ctx.operator.save(ctx, tensors, args[ctx.operator.num_tensors :], output)
        if private.may_be_dual() or private.transforms_active():
            ctx.save_for_forward(*saved)
            ctx.options, ctx.num_results = args[ctx.operator.num_tensors :], len(output)

    @staticmethod
    def backward(ctx, *gradients):
        found = ctx.operator.gradients(ctx, ctx.needs_input_grad[1:], *gradients)
        return None, *found, *[None] * ctx.num_options

    @staticmethod
    def jvp(ctx, *tangents):
        # Views without tangents, for torch has turned forward mode off here.
        saved = [None if x is None else x.view_as(x) for x in ctx.saved_tensors]
        count = ctx.operator.num_tensors
        args = *saved[:count], *ctx.options
        found = ctx.operator.tangents(tangents[1:], args, saved[count:])
        return *found, *[None] * (ctx.num_results - len(found))


class _Replayed(torch.autograd.Function):
    """A cached call of a forward, which skips the dispatcher; an unused lse is no output.

    No call with tangents is cached (`torch_attn.calls`), so it has no jvp.
    """

    @staticmethod
    def forward(ctx, operator, call, return_lse, *tensors):
        results = call(*tensors)
        ctx.operator, ctx.returns_lse = operator, return_lse
        operator.save(ctx, tensors, call.others, results)
        out, lse, *more = operator.returned(results)
        returned = (out, lse, *more) if return_lse else (out, *more)
        return returned if len(returned) > 1 else out

    @staticmethod
    def backward(ctx, dout, *gradients):
        gradients = (dout, *gradients) if ctx.returns_lse else (dout,)
        found = ctx.operator.gradients(ctx, ctx.needs_input_grad[3:], *gradients)
        return None, None, None, *found


# Function.apply binds the signature on every call, which is slower than a launch.
_record = super(torch.autograd.Function, _Dispatched).apply  # pyright: ignore[reportAttributeAccessIssue]
_record_kept = super(torch.autograd.Function, _Replayed).apply  # pyright: ignore[reportAttributeAccessIssue]


def run_kept(
    operator: Forward, call: Call, tensors: tuple[Tensor | None, ...], return_lse: bool
) -> tuple[Any, ...]:
    """Run a forward's cached call; lse may be None if it is not returned."""
    if not call.is_recorded:
        return operator.returned(call(*tensors))
    results = _record_kept(operator, call, return_lse, *tensors)
    if return_lse:
        return results
    return (results, None) if isinstance(results, Tensor) else (results[0], None, *results[1:])


def with_left_out(gradients: Iterable[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    empty = (like.new_empty(0, dtype=torch.float32) if x is None else x for x in gradients)
    return tuple(empty)


def has_gradient(x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point()


def refuse_forward_mode(function: str) -> NoReturn:
    not_differentiable("forward mode", "Use torch.func.vjp or Tensor.backward.", function)


def refuse_second_derivative(function: str) -> NoReturn:
    not_differentiable("a second derivative", "Compute it with torch operations.", function)
