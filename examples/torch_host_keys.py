"""Attention over keys in host memory, of which one GPU holds a part at a time.

``python -m examples.torch_host_keys`` compares out and gradients with one call over all keys. The
GPU takes the turns of a plan's ranks; the next keys are copied while kernels run. Partial results
stay in float32, so the result is as exact as that of one call.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_attn import flash_attention
from torch_attn.distributed import (
    ContextPlan,
    Peers,
    Rows,
    Transfer,
    context_attention,
    context_plan,
    shard_sequence,
    unshard_sequence,
)

TOLERANCE = 1e-4  # of float32 results of size 1


class Copy:
    """Make the card wait for copies to it."""

    def __init__(self, event: torch.cuda.Event, tensors: Sequence[Tensor]) -> None:
        self._event, self._tensors = event, tensors

    def wait(self) -> None:
        stream = torch.cuda.current_stream()
        stream.wait_event(self._event)
        for x in self._tensors:
            x.record_stream(stream)


class HostKeys(Peers):
    """The rank whose turn it is: keys and their gradients live in host memory."""

    def __init__(
        self,
        rank: int,
        keys: Sequence[tuple[Tensor, ...]],
        gradients: Sequence[tuple[Tensor, ...]],
        device: str,
    ) -> None:
        """`keys` are every rank's k and v in pinned host memory, so that copies do not wait;
        `gradients` are their sums, float32 in host memory.
        """
        self.rank, self.size, self.group = rank, len(keys), type(self)
        self._keys, self._gradients, self._device = keys, gradients, device
        self._copies = torch.cuda.Stream() if device == "cuda" else None

    def exchange(
        self,
        tensors: tuple[Tensor, ...],
        sent: Sequence[Rows],
        received: Sequence[Rows],
        of_gradients: bool = False,
    ) -> Transfer:
        if of_gradients:  # they go back to where keys are held
            for rank, start, end, token, _ in sent:
                for total, x in zip(self._gradients[rank], tensors, strict=True):
                    held = total[:, token : token + end - start]
                    held += x[:, start:end].cpu()  # on a GPU the host waits
            return Transfer(None)
        if not received:
            return Transfer(None)
        if self._copies is None:
            return Transfer(self._copied(received))
        with torch.cuda.stream(self._copies):
            found = self._copied(received)
            event = torch.cuda.Event()
            event.record()
        return Transfer(found, (Copy(event, found),))

    def _copied(self, received: Sequence[Rows]) -> tuple[Tensor, ...]:
        parts = [
            [x[:, start:end].to(self._device, non_blocking=True) for x in self._keys[rank]]
            for rank, start, end, *_ in received
        ]
        return tuple(torch.cat(xs, 1) if len(xs) > 1 else xs[0] for xs in zip(*parts, strict=True))

    def all_to_all(self, x: Tensor) -> Tensor:
        raise NotImplementedError("one rank at a time does not exchange heads")

    def gather_objects(self, x: Any) -> list[Any]:
        return [x] * self.size


class Results(NamedTuple):
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, plan: ContextPlan, device: str, **options: Any
) -> Results:
    """Return out and gradients of tensors [B, S, H, D] in host memory.

    The plan is "contiguous", so that causal queries need few keys. `options` are those of
    `context_attention`.
    """
    pin = device == "cuda"

    def parts(x: Tensor) -> list[Tensor]:
        found = [shard_sequence(x, plan, rank).contiguous() for rank in range(plan.size)]
        return [x.pin_memory() for x in found] if pin else found

    of_q, of_k, of_v, of_dout = map(parts, (q, k, v, dout))
    keys = list(zip(of_k, of_v, strict=True))
    gradients = [tuple(torch.zeros_like(x, dtype=torch.float32) for x in pair) for pair in keys]
    outs, dqs = [], []
    for rank, (q, do) in enumerate(zip(of_q, of_dout, strict=True)):
        mesh = HostKeys(rank, keys, gradients, device)
        own = [x.to(device).requires_grad_() for x in (q, *keys[rank])]
        out: Any = context_attention(*own, plan=plan, mesh=mesh, exchange="ring", **options)
        dq, *of_own = torch.autograd.grad(out, own, do.to(device))
        for total, x in zip(gradients[rank], of_own, strict=True):
            total += x.cpu()
        outs.append(out.detach().cpu())
        dqs.append(dq.cpu())
    lists = outs, dqs, *zip(*gradients, strict=True)
    out, dq, dk, dv = (unshard_sequence(list(xs), plan) for xs in lists)
    return Results(out, dq, dk.to(k.dtype), dv.to(v.dtype))


def largest_error(device: str, seq_len: int, parts: int) -> float:
    """Return the largest difference from one `flash_attention` over all keys."""
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, seq_len, 2, 32)
    plan = context_plan(seq_len, parts, "contiguous")
    found = attend(q, k, v, dout, plan, device, causal=True)
    whole = [x.to(device).requires_grad_() for x in (q, k, v)]
    out = flash_attention(*whole, causal=True)
    expected = out.detach(), *torch.autograd.grad(out, whole, dout.to(device))
    differences = (x - y.cpu() for x, y in zip(found, expected, strict=True))
    return max(x.abs().max().item() for x in differences)


def main() -> int:
    print("attention over keys in host memory, a part at a time:", flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    error = largest_error(device, seq_len=1024, parts=8)
    print(f"largest difference from one call over all keys: {error:.2g}")
    return 0 if error < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
