"""Measure calls of either framework: device times with one collector, and host times.

The method is in docs/benchmarks.md. Fills separate the calls in the trace. Calls of torch queue
behind them, which hides launch latency. JAX's own stream would overtake them, so its calls wait,
and their span includes the host's gaps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bench.records import Times

Name = TypeVar("Name", bound=Hashable)
Run = Callable[[], Any]
Wait = Callable[[Any], object]

_FLUSH_BYTES = 256 * 2**20  # several times the L2 of any GPU of today
_FILLS = 4  # of a short call of torch: 0.3 ms on an H200, while the host launches all of the call
_LONG = 0.3  # milliseconds; one fill hides the launches of a call that goes on for longer
_FLUSH_KERNEL = "FillFunctor<signed char>"
_REST = 0.1  # seconds before a turn of longer calls: a card at its power cap regains its clock
_FEWEST, _MOST = 3, 20  # calls of a round
_EVENTS = 0.5, 20.0  # milliseconds; below, events measure their own overhead, above it takes long
_HOST_WARMUP = 20  # calls before the host's share is timed
_ESTIMATING, _WARMUP_MS = 6, 5  # calls of do_bench for an estimate, and how long it then warms up


@dataclass(frozen=True)
class Timing:
    """The measurements of one call.

    busy: while at least one of its kernels runs; of `time_host` the same as `host`.
    span: from the start of its first kernel to the end of its last one.
    host: until it returns on the host, without the profiler.
    events: milliseconds by CUDA events; None for JAX, and for very short or long calls.
    memory: bytes that it adds at its peak; None for JAX.
    """

    busy: Times
    span: Times | None
    host: Times
    kernels: tuple[str, ...]
    events: float | None = None
    memory: int | None = None


class Plan(NamedTuple):
    """The counts of a turn of one call; `queued` calls do not wait for the fills."""

    warmup: int
    repeats: int
    fills: int
    queued: bool
    rest: float


class Kernel(NamedTuple):
    """A kernel, copy or fill in a trace; microseconds."""

    name: str
    start: float
    end: float


def wait_for(result: Any) -> None:
    """Block until both frameworks are done, so that an error shows up at its call."""
    import jax  # which the ranks of a group do not need

    jax.block_until_ready(result)
    torch.cuda.synchronize()


def time_calls(
    calls: Mapping[Name, Run], wait: Wait = wait_for, rounds: int = 3, round_ms: float = 20.0
) -> dict[Name, Timing]:
    """Time several calls, in alternating order (ABBA).

    `round_ms` is the rough duration of a turn's counted calls. Raise RuntimeError if the trace does
    not show the calls, or no kernel of one.
    """
    plans = {name: _plan(call, wait, round_ms) for name, call in calls.items()}
    host: dict[Name, list[list[float]]] = {name: [] for name in calls}
    events: dict[Name, float] = {}
    traces: dict[Name, list[list[list[Kernel]]]] = {name: [] for name in calls}
    for turn in range(rounds):
        names = _order(calls, turn)
        trace = _trace([(calls[name], plans[name]) for name in names], wait)
        turns = split(trace, [plans[name].warmup + plans[name].repeats for name in names])
        for name, traced in zip(names, turns, strict=True):
            counted = traced[plans[name].warmup :]
            traces[name].append(counted)
            host[name].append(_host_latencies(calls[name], wait, _FEWEST))
            busy, _ = device_times([counted])
            if turn == 0 and plans[name].queued and _EVENTS[0] < busy.median < _EVENTS[1]:
                events[name] = _by_events(calls[name], round_ms)
    found = {}
    for name, call in calls.items():
        busy, span = device_times(traces[name])
        kernels = tuple(kernel.name for kernel in traces[name][0][0])
        memory = _peak_memory(call) if plans[name].queued else None
        found[name] = Timing(busy, span, summarize(host[name]), kernels, events.get(name), memory)
    return found


def time_host(
    calls: Mapping[Name, Run], wait: Wait = wait_for, rounds: int = 7, repeats: int = 300
) -> dict[Name, Timing]:
    """Time several calls on the host, in alternating order (ABBA), with `repeats` calls in a turn.

    A turn begins with an idle device, which must be faster than the host: a full queue of launches
    would make the host wait.
    """
    for call in calls.values():
        _host_turn(call, wait, _HOST_WARMUP)
    turns: dict[Name, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in _order(calls, turn):
            turns[name].append(_host_turn(calls[name], wait, repeats))
    found = {}
    for name, milliseconds in turns.items():
        host = Times(median(milliseconds), min(milliseconds), max(milliseconds))
        found[name] = Timing(busy=host, span=None, host=host, kernels=())
    return found


def summarize(rounds: Sequence[Sequence[float]]) -> Times:
    """Reduce the milliseconds of every call of every round.

    >>> summarize([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])
    Times(median=2.5, fastest=2.0, slowest=3.0, p20=2.0, p80=3.0)

    Raises:
        ValueError: there is no round, or a round without a call.
    """
    if not rounds or not all(rounds):
        raise ValueError(f"rounds: expected a call or more in each, got {rounds!r}")
    medians = [float(np.median(calls)) for calls in rounds]
    p20, p80 = map(float, np.percentile(np.concatenate(rounds), [20, 80]))
    return Times(float(np.median(medians)), min(medians), max(medians), p20, p80)


def split(trace: Iterable[Kernel], repeats: Sequence[int]) -> list[list[list[Kernel]]]:
    """Return the kernels of each call of each turn, separated by the fills.

    Raise RuntimeError if the number of calls with a kernel is not `repeats`.
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


def covered(kernels: Iterable[Kernel]) -> float:
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total


def device_times(rounds: Sequence[Sequence[Sequence[Kernel]]]) -> tuple[Times, Times]:
    busy = [[covered(call) / 1e3 for call in calls] for calls in rounds]
    span = [
        [(max(k.end for k in call) - min(k.start for k in call)) / 1e3 for call in calls]
        for calls in rounds
    ]
    return summarize(busy), summarize(span)


def _order(calls: Mapping[Name, Run], turn: int) -> list[Name]:
    return list(calls) if turn % 2 == 0 else list(calls)[::-1]


def _host_turn(call: Run, wait: Wait, repeats: int) -> float:
    result = None
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    end = time.perf_counter()
    wait(result)
    return (end - start) * 1e3 / repeats


def _plan(call: Run, wait: Wait, round_ms: float) -> Plan:
    import jax

    result = call()
    queued = not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result))
    wait(result)
    start = time.perf_counter()
    result = call()
    returned = time.perf_counter()
    wait(result)
    end = time.perf_counter()
    milliseconds = (end - start) * 1e3
    warmup = 1
    if milliseconds < _EVENTS[1]:
        warmup = min(_ESTIMATING + max(1, round(_WARMUP_MS / milliseconds)), _MOST)
    repeats = min(max(round(round_ms / milliseconds), _FEWEST), _MOST)
    short = queued and (end - returned) * 1e3 < _LONG
    rest = _REST if milliseconds > _LONG else 0.0
    return Plan(warmup, repeats, _FILLS if short else 1, queued, rest)


def _trace(turns: Iterable[tuple[Run, Plan]], wait: Wait) -> list[Kernel]:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    # Avoids a warning about more than one cycle.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for call, plan in turns:
            time.sleep(plan.rest)
            for _ in range(plan.warmup + plan.repeats):
                for _ in range(plan.fills):
                    flush.fill_(1)
                if plan.queued:
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
    latencies = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        latencies.append((time.perf_counter() - start) * 1e3)
        wait(result)
    return latencies


def _peak_memory(call: Run) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _by_events(call: Run, round_ms: float) -> float:
    from triton.testing import do_bench

    time.sleep(_REST)
    times: Any = do_bench(call, warmup=_WARMUP_MS, rep=round(round_ms), return_mode="median")
    return times
