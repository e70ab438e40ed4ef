"""Calls of a function in JAX on the memory of torch's tensors, jitted, with its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import torch

from twin_attention.interop.exchange import to_jax, to_torch
from twin_attention.interop.parity.torch_calls import Attend, by_position, leaves


def share(tensors: dict[str, torch.Tensor]) -> dict[str, jax.Array]:
    """Return JAX arrays that share the tensors' memory, or copies of strided views."""
    return {name: to_jax(x, copy=not x.is_contiguous()) for name, x in tensors.items()}


def call_jax(
    function: Attend, operands: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    attend = by_position(function, operands)
    call = with_gradients(attend) if gradients else lambda _, *x: attend(*x)
    return run_jax(jax.jit(call), share(operands), share(gradients))


def run_jax(
    compiled: Attend, arrays: dict[str, jax.Array], dout: dict[str, jax.Array]
) -> tuple[torch.Tensor, ...]:
    found = jax.block_until_ready(compiled(tuple(dout.values()), *arrays.values()))
    return tuple(map(to_torch, leaves(found)))


def prepare_jax(attend: Attend, operation: str, operands: Sequence[Any], dout: Any) -> partial[Any]:
    if operation == "forward":
        return partial(jax.jit(attend), *operands)
    if operation == "jvp":
        return partial(jax.jit(lambda *x: jax.jvp(attend, x, x)), *operands)
    if operation == "backward":
        _, pull = jax.jit(partial(jax.vjp, attend))(*operands)
        return partial(jax.jit(lambda pull, dout: pull(dout)), pull, dout)
    return partial(jax.jit(with_gradients(attend)), dout, *operands)


def with_gradients(attend: Attend, count: int | None = None) -> Attend:
    """Return a function of dout and the operands; the first `count` have gradients."""

    def both(dout: Any, *operands: Any) -> tuple[Any, ...]:
        first, rest = operands[:count], operands[len(operands[:count]) :]

        def split(*x: Any) -> tuple[Any, Any]:
            out = attend(*x, *rest)  # what has no gradient comes last
            return (out[: len(dout)], out[len(dout) :]) if isinstance(out, tuple) else (out, ())

        out, pull, more = jax.vjp(split, *first, has_aux=True)
        return (*out, *more) if more else out, *(
            dx for dx in pull(dout) if dx.dtype != jax.dtypes.float0
        )

    return both
