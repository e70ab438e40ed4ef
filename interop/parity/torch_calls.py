"""Calls of a function in PyTorch, with its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

Attend = Callable[..., Any]  # an array, or a tuple of arrays, from arrays


def call_torch(
    function: Attend, operands: dict[str, torch.Tensor], gradients: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, ...]:
    attend = by_position(function, operands)
    operation = "both" if gradients else "forward"
    call = prepare_torch(attend, operation, [*operands.values()], gradients)
    return tuple(x.detach() for x in leaves(call()))


def prepare_torch(
    attend: Attend, operation: str, operands: Sequence[torch.Tensor], dout: Any
) -> Callable[[], Any]:
    """Return a call of `attend` that may run many times, with the backward's graph already made.

    It returns out, the operands' gradients, (out, *gradients), or for "jvp" out and its tangent for
    the operands as their own tangents.
    """
    if operation == "forward":
        return partial(attend, *operands)
    if operation == "jvp":
        return partial(torch.func.jvp, attend, (*operands,), (*operands,))
    operands = [x.detach().requires_grad_(x.is_floating_point()) for x in operands]
    inputs = [x for x in operands if x.requires_grad]
    if operation == "backward":
        out = attend(*operands)
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

    def both() -> tuple[Any, ...]:
        out = attend(*operands)
        of = out[: len(dout)] if isinstance(out, tuple) else out
        return out, *torch.autograd.grad(of, inputs, dout)

    return both


def leaves(results: Any) -> tuple[Any, ...]:
    if isinstance(results, tuple | list):
        return tuple(leaf for result in results for leaf in leaves(result))
    return () if results is None else (results,)


def by_position(function: Attend, names: Iterable[str]) -> Attend:
    def attend(*operands: Any) -> tuple[Any, ...]:
        results = function(**dict(zip(names, operands, strict=True)))
        return results if isinstance(results, tuple) else (results,)

    return attend


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Apply `torch.compile` for fixed shapes, for all problems of a suite.

    Past dynamo's limit of graphs a function would silently run uncompiled, and a compiled backward
    must be told that it will run again.
    """
    import torch._dynamo
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = 1000
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, dynamic=False, **options)
