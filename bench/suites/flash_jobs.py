"""Jobs of flash attention, for the suites that time it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from bench.job import Call, Check, Job, Operation, Subject
from interop.parity.cases import FlashCase
from twin_attention.contract.cost import (
    backward_bytes,
    backward_flops,
    forward_bytes,
    forward_flops,
)

if TYPE_CHECKING:
    from torch import Tensor

# Returns a call of an implementation from the case, the operation and q, k, v and dout.
FlashFactory = Callable[[FlashCase, str, "list[Tensor]"], Call]
FlashFactories = Mapping[Subject, FlashFactory]


def flash_jobs(
    cases: Iterable[FlashCase],
    operations: Sequence[Operation],
    factories: Callable[[FlashCase], FlashFactories],
) -> list[Job]:
    """Return a job for each operation, "forward", "backward" or "both", of each case."""
    return [_job(case, name, factories(case)) for case in cases for name in operations]


def _job(case: FlashCase, operation: Operation, factories: FlashFactories) -> Job:
    spec = case.spec
    forward = forward_flops(spec), forward_bytes(spec)
    backward = backward_flops(spec), backward_bytes(spec)
    both = forward[0] + backward[0], forward[1] + backward[1]
    flops, traffic = {"forward": forward, "backward": backward, "both": both}[operation]
    return Job(
        case=asdict(case),
        operation=operation,
        flops=flops,
        bytes=traffic,
        inputs=partial(flash_tensors, case),
        factories={s: partial(factory, case, operation) for s, factory in factories.items()},
        check=partial(_check, case, operation),
    )


def flash_tensors(case: FlashCase, device: str = "cuda") -> list[Tensor]:
    """Return q, k, v and dout [B, S, H, D], random normal."""
    from interop.parity.inputs import make_inputs

    inputs = make_inputs(case, device)
    return [inputs[name] for name in ("q", "k", "v", "dout")]


def _check(case: FlashCase, operation: str, tensors: list[Tensor]) -> Check:
    from interop.parity.check import sample_check

    q, k, v, dout = tensors
    inputs = {"q": q, "k": k, "v": v}
    if operation == "forward":
        return sample_check(inputs, case.spec, ("out",))
    gradients = ("dq", "dk", "dv")
    names = ("out", *gradients) if operation == "both" else gradients
    return sample_check(inputs | {"dout": dout}, case.spec, names)
