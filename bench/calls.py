"""Calls of one attention function: forward, backward or both, in torch and in JAX.

Whatever is no part of the operation happens when the call is made: the graph that a backward
walks, a layout's transposition, compiling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.job import Call

if TYPE_CHECKING:
    from torch import Tensor

Attend = Callable[..., Any]  # out from q, k and v


def torch_call(
    attend: Attend, operation: str, tensors: Sequence[Tensor], *, heads_first: bool = False
) -> Call:
    """A call of `attend` in torch.

    Args:
        attend: takes q, k, v [B, S, H, D] and gives out.
        operation: "forward", "backward" or "both".
        tensors: q, k, v and dout [B, S, H, D].
        heads_first: `attend` takes and gives [B, H, S, D], views of the same memory.
    """
    import torch

    def views(arrays: Sequence[Tensor]) -> list[Tensor]:
        return [x.detach().transpose(1, 2) if heads_first else x.detach() for x in arrays]

    *inputs, dout = views(tensors)
    if operation == "forward":
        return Call(lambda: attend(*inputs), lambda out: views([out]))
    for x in inputs:
        x.requires_grad_()
    if operation == "backward":
        before = torch.cuda.memory_allocated()
        out = attend(*inputs)
        held = torch.cuda.memory_allocated() - before
        return Call(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True), views, held)

    def both() -> tuple[Tensor, ...]:
        out = attend(*inputs)
        return out, *torch.autograd.grad(out, inputs, dout)

    return Call(both, views)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` for fixed shapes, of as many problems as a suite has.

    Past dynamo's limit of graphs a function would silently run uncompiled. A backward that was
    compiled to run once takes over the buffers that its forward saved, and refuses to run again.
    """
    import torch
    import torch._dynamo
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = 1000
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, dynamic=False, **options)


def jax_call(attend: Attend, operation: str, tensors: Sequence[Tensor]) -> Call:
    """A jitted call of `attend` in JAX, on torch's memory.

    Args:
        attend: takes q, k, v [B, S, H, D] and gives out, likewise.
        operation: "forward", "backward" or "both".
        tensors: torch's q, k, v and dout [B, S, H, D].
    """
    import jax

    from interop.exchange import to_jax

    *inputs, dout = map(to_jax, tensors)
    if operation == "forward":
        return Call(partial(jax.jit(attend), *inputs), lambda out: (out,))
    if operation == "backward":
        _, pull = jax.jit(partial(jax.vjp, attend))(*inputs)
        return Call(partial(jax.jit(lambda pull, dout: pull(dout)), pull, dout), tuple)

    @jax.jit
    def both(dout, *inputs):
        out, pull = jax.vjp(attend, *inputs)
        return out, *pull(dout)

    return Call(partial(both, dout, *inputs), tuple)
