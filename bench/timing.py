"""Device times of a call, whichever framework launches it, from one collector.

`torch.profiler` (CUPTI) records every kernel of the process, JAX's as well. Before each call the
L2 cache is flushed by filling a buffer; that fill also separates the calls in the trace. A call's
time is the sum of its kernels', so that copies and casts that a framework adds are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from bench.statistics import Times, summarize

_FLUSH_BYTES = 256 * 2**20  # several times the L2 of any GPU of today
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Timing:
    """One implementation on one case.

    Attributes:
        times: device time of a call.
        kernels: names of the kernels of one call, in order.
    """

    times: Times
    kernels: tuple[str, ...]


def time_calls(
    calls: dict[Name, Callable[[], object]],
    wait: Callable[[object], object],
    rounds: int = 3,
    repeats: int = 10,
) -> dict[Name, Timing]:
    """Time several calls, in an order that turns around every round.

    Args:
        calls: by name; each is called once to warm up.
        wait: blocks until a call's result is there.
    """
    for call in calls.values():
        wait(call())
    samples: dict[Name, list[list[float]]] = {name: [] for name in calls}
    kernels: dict[Name, tuple[str, ...]] = {}
    for turn in range(rounds):
        names = list(calls) if turn % 2 == 0 else list(reversed(calls))
        for name in names:
            traced = _trace(calls[name], wait, repeats)
            samples[name].append([sum(ms for _, ms in call) for call in traced])
            kernels[name] = tuple(kernel for kernel, _ in traced[0])
    return {name: Timing(summarize(samples[name]), kernels[name]) for name in calls}


def _trace(
    call: Callable[[], object], wait: Callable[[object], object], repeats: int
) -> list[list[tuple[str, float]]]:
    """The kernels of each of `repeats` calls, with their milliseconds."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            flush.fill_(1)
            torch.cuda.synchronize()
            wait(call())
            torch.cuda.synchronize()
    traced: list[list[tuple[str, float]]] = []
    events = (event for event in profiler.events() or () if event.device_type.name == "CUDA")
    for event in sorted(events, key=lambda event: event.time_range.start):
        if "FillFunctor<signed char>" in event.name:
            traced.append([])
        elif traced:
            traced[-1].append((event.name, event.time_range.elapsed_us() / 1000))
    assert len(traced) == repeats, f"{len(traced)} flushes in the trace of {repeats} calls"
    return traced
