"""Device times of a call, whichever framework launches it, from one collector.

`torch.profiler` (CUPTI) records every kernel of the process, JAX's as well. Before each call the
L2 cache is flushed by filling a buffer; that fill also separates the calls in the trace.

Calls of torch are queued behind the fill, which hides what the host takes to launch them: their
span is the device's own. JAX launches on a stream of its own, which would overtake the fill, so
that its calls wait for it and their span counts gaps that the host leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bench.statistics import Times, summarize

Name = TypeVar("Name", bound=Hashable)
Run = Callable[[], Any]
Wait = Callable[[Any], object]

_FLUSH_BYTES = 256 * 2**20  # several times the L2 of any GPU of today
_FILLS = 4  # of a queued call: 0.3 ms on an H200, so that the host has launched all of the call
_FLUSH_KERNEL = "FillFunctor<signed char>"
_FEWEST, _MOST = 3, 20  # calls of a round
_EVENTS_ABOVE = 0.5  # milliseconds; below, events measure their own overhead as well


@dataclass(frozen=True)
class Timing:
    """What was measured of one call.

    Attributes:
        busy: sum of its kernels, copies and casts that a framework adds included.
        span: from the start of its first kernel to the end of its last one.
        host: until it returns on the host, without the profiler.
        kernels: names of its kernels, in order.
        events: milliseconds by CUDA events, as `triton.testing.do_bench` takes them; None for a
            call of JAX or a short one.
        memory: bytes that it adds at its peak; None for a call of JAX.
    """

    busy: Times
    span: Times
    host: Times
    kernels: tuple[str, ...]
    events: float | None = None
    memory: int | None = None


class Kernel(NamedTuple):
    """A kernel, copy or fill in a trace; microseconds."""

    name: str
    start: float
    end: float


def wait_for(result: Any) -> None:
    """Block until both frameworks are done, so that an error shows up at its call."""
    jax.block_until_ready(result)
    torch.cuda.synchronize()


def time_calls(
    calls: Mapping[Name, Run],
    wait: Wait = wait_for,
    rounds: int = 3,
    round_ms: float = 20.0,
) -> dict[Name, Timing]:
    """Time several calls, in an order that turns around every round (A B B A).

    Args:
        calls: by name; each is called a few times to warm up.
        wait: blocks until a call's result is there.
        rounds: how often each call has its turn.
        round_ms: how long a turn lasts, about; it is 3 to 20 calls.

    Raises:
        RuntimeError: the trace does not show the calls, or no kernel of one.
    """
    queued = {name: _is_torch(_warm(call, wait)) for name, call in calls.items()}
    repeats = {name: _repeats(call, wait, round_ms) for name, call in calls.items()}
    host: dict[Name, list[list[float]]] = {name: [] for name in calls}
    traces: dict[Name, list[list[list[Kernel]]]] = {name: [] for name in calls}
    for turn in range(rounds):
        names = list(calls) if turn % 2 == 0 else list(calls)[::-1]
        trace = _trace([(calls[name], repeats[name], queued[name]) for name in names], wait)
        turns = split(trace, [repeats[name] for name in names])
        for name, traced in zip(names, turns, strict=True):
            traces[name].append(traced)
            host[name].append(_host_latencies(calls[name], wait, _FEWEST))
    found = {}
    for name, call in calls.items():
        busy, span = device_times(traces[name])
        kernels = tuple(kernel.name for kernel in traces[name][0][0])
        events = memory = None
        if queued[name]:
            memory = _peak_memory(call)
            if busy.median > _EVENTS_ABOVE:
                events = _by_events(call)
        found[name] = Timing(busy, span, summarize(host[name]), kernels, events, memory)
    return found


def split(trace: Iterable[Kernel], repeats: Sequence[int]) -> list[list[list[Kernel]]]:
    """Of each turn the kernels of each call, told apart by the fills before the calls.

    Args:
        trace: kernels in any order.
        repeats: calls of each turn.

    Raises:
        RuntimeError: there are other numbers of calls with a kernel.
    """
    calls: list[list[Kernel]] = []
    for kernel in sorted(trace, key=lambda kernel: kernel.start):
        if _FLUSH_KERNEL not in kernel.name:
            if calls:
                calls[-1].append(kernel)
        elif not calls or calls[-1]:
            calls.append([])
    found = sum(map(bool, calls))
    if found != sum(repeats):
        raise RuntimeError(f"trace: expected kernels of {sum(repeats)} calls, got {found}")
    ends = np.cumsum(repeats).tolist()
    return [calls[end - count : end] for end, count in zip(ends, repeats, strict=True)]


def device_times(rounds: Sequence[Sequence[Sequence[Kernel]]]) -> tuple[Times, Times]:
    """How long the device is busy with a call, and the call's span; from rounds of traced calls."""
    busy = [[sum(k.end - k.start for k in call) / 1e3 for call in calls] for calls in rounds]
    span = [
        [(max(k.end for k in call) - min(k.start for k in call)) / 1e3 for call in calls]
        for calls in rounds
    ]
    return summarize(busy), summarize(span)


def _warm(call: Run, wait: Wait) -> Any:
    result = call()
    wait(result)
    return result


def _is_torch(result: Any) -> bool:
    return not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result))


def _repeats(call: Run, wait: Wait, round_ms: float) -> int:
    """Calls that take `round_ms`, by the host's clock."""
    start = time.perf_counter()
    wait(call())
    milliseconds = (time.perf_counter() - start) * 1e3
    return min(max(round(round_ms / milliseconds), _FEWEST), _MOST)


def _trace(turns: Iterable[tuple[Run, int, bool]], wait: Wait) -> list[Kernel]:
    """What the device does in these turns: a call, how often, and whether it may be queued."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for call, repeats, queued in turns:
            for _ in range(repeats):
                for _ in range(_FILLS if queued else 1):
                    flush.fill_(1)
                if queued:
                    call()
                else:
                    torch.cuda.synchronize()
                    wait(call())
            torch.cuda.synchronize()
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]


def _host_latencies(call: Run, wait: Wait, repeats: int) -> list[float]:
    """Milliseconds until a call returns, of each of `repeats` calls."""
    latencies = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        latencies.append((time.perf_counter() - start) * 1e3)
        wait(result)
    return latencies


def _peak_memory(call: Run) -> int:
    """Bytes that torch allocates during a call, at their peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _by_events(call: Run) -> float:
    from triton.testing import do_bench

    times: Any = do_bench(call, warmup=5, rep=30, return_mode="all")
    return float(np.median(times))
