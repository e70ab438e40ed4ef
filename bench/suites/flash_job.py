"""A job of flash attention: what the suites that time it have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

# A call of an implementation, from the case, the operation and q, k, v and dout.
FlashMaker = Callable[[FlashCase, str, "list[Tensor]"], Call]


def flash_job(case: FlashCase, operation: Operation, makers: Mapping[Subject, FlashMaker]) -> Job:
    """The job of one operation, "forward", "backward" or "both", of a case."""
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
        makers={s: partial(maker, case, operation) for s, maker in makers.items()},
        check=partial(_check, case, operation),
    )


def flash_tensors(case: FlashCase, device: str = "cuda") -> list[Tensor]:
    """q, k, v and dout [B, S, H, D], random normal."""
    from interop.parity.inputs import make_inputs

    inputs = make_inputs(case, device)
    return [inputs[name] for name in ("q", "k", "v", "dout")]


def _check(case: FlashCase, operation: str, tensors: list[Tensor]) -> Check:
    from bench import gate

    checks = {
        "forward": gate.check_forward,
        "backward": gate.check_backward,
        "both": gate.check_both,
    }
    return checks[operation](case, tensors)
