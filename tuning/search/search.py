"""Find the fastest configuration, each one timed against the best so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.records import Times
from twin_attention.targets.kernels import KernelConfig

if TYPE_CHECKING:
    from bench.timing import Timing

Run = Callable[[], Any]
Timer = Callable[[Mapping[KernelConfig, Run]], "dict[KernelConfig, Timing]"]
Report = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """A configuration that is faster than the present one; both times are of one timing.

    Attributes:
        config: the faster one.
        times, before: device times of the two.
    """

    config: KernelConfig
    times: Times
    before: Times


def search(
    present: KernelConfig,
    candidates: Iterable[KernelConfig],
    call: Callable[[KernelConfig], Run],
    timer: Timer,
    deadline: float,
    report: Report,
) -> Found | None:
    """Time candidates until they or the time run out.

    Args:
        present: the row's configuration.
        candidates: in the order to try them.
        call: makes a configuration's call; raises if its results are wrong or it cannot run.
        timer: times calls against each other.
        deadline: of `time.monotonic`; no candidate is begun after it.
        report: takes a line on each candidate.

    Returns:
        The best candidate if, timed once more, it is faster than the present configuration by more
        than the spreads of the two; else None.

    Raises:
        What `call` raises for the present configuration.
    """
    first = call(present)
    best, run = present, first
    for config in candidates:
        if time.monotonic() > deadline:
            report("out of time")
            break
        try:
            new = call(config)
            timed = timer({best: run, config: new})
        except Exception as error:
            report(f"{describe(config)}: {type(error).__name__}: {error}".splitlines()[0])
            continue
        times, bar = timed[config].busy, timed[best].busy
        report(f"{describe(config)}: {times.median:.4f} ms, the best so far {bar.median:.4f} ms")
        if faster(times, bar):
            best, run = config, new
    if best == present:
        return None
    timed = timer({present: first, best: run})
    found = Found(best, timed[best].busy, timed[present].busy)
    return found if faster(found.times, found.before) else None


def faster(a: Times, b: Times) -> bool:
    """Return True if `a` is less than `b` by more than the spreads of the two."""
    return b.median - a.median > (a.slowest - a.fastest) + (b.slowest - b.fastest)


def describe(config: KernelConfig) -> str:
    """Return a configuration in few characters, such as "128×64, 8 warps, 3 stages"."""
    return f"{config.tile}, {config.num_warps} warps, {config.num_stages} stages"
