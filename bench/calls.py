"""Calls of an attention function, forward, backward or both, ready to be timed."""

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
    """Return a torch call of `attend` on `tensors`: q, k, v, terms and dout.

    heads_first: `attend` takes and returns views [..., H, S, D], and terms as they are.
    """
    import torch

    from twin_attention.interop.parity.torch_calls import leaves, prepare_torch

    *operands, dout = tensors
    terms = len(operands) - 3

    def views(arrays: Sequence[Tensor], kept: int) -> list[Tensor]:
        moved = len(arrays) - kept if heads_first else 0
        return [
            x.detach().transpose(-3, -2) if i < moved else x.detach() for i, x in enumerate(arrays)
        ]

    before = torch.cuda.memory_allocated() if operation == "backward" else None
    run = prepare_torch(attend, operation, views(operands, terms), *views([dout], 0))
    held = None if before is None else torch.cuda.memory_allocated() - before
    gradients = terms if operation in ("backward", "both") else 0
    return Call(run, lambda results: views(leaves(results), gradients), held)


def jax_call(attend: Attend, operation: str, tensors: Sequence[Tensor]) -> Call:
    """Return a jitted call in JAX, on the memory of torch's tensors."""
    import jax

    from twin_attention.interop.exchange import to_jax
    from twin_attention.interop.parity.jax_calls import prepare_jax
    from twin_attention.interop.parity.torch_calls import leaves

    *inputs, dout = map(to_jax, tensors)
    run = prepare_jax(attend, operation, inputs, dout)

    def result(found: Any) -> list[Any]:
        return [x for x in leaves(found) if x.dtype != jax.dtypes.float0]  # that of integers

    return Call(run, result, planned=partial(_planned, run))


PREPARE: dict[str, Callable[..., Call]] = {"torch_attn": torch_call, "pallas_attn": jax_call}


def _planned(run: partial) -> int:
    """Return the bytes of temporaries and results that XLA planned for a call that was made."""
    plan = run.func.lower(*run.args).compile().memory_analysis()  # compiled before: JAX keeps it
    return plan.temp_size_in_bytes + plan.output_size_in_bytes


def as_torch(x: Any) -> Tensor:
    import torch

    from twin_attention.interop.exchange import to_torch

    return x if isinstance(x, torch.Tensor) else to_torch(x)
