from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from bench.training.case import PHASES, TrainingCase
from bench.training.job import Show, Steps

WARMUPS = (0, 1, 5)  # steps that a mean leaves out; what is timed leaves out the most
REPEATS = 10  # steps of a mean
_FEWEST = 3  # of long steps
_SECONDS = 6.0  # for all steps but the first
OPERATIONS = (*PHASES, "step")


class Mean(NamedTuple):
    """In milliseconds."""

    mean: float
    deviation: float


def mean_after(steps: Sequence[float], warmup: int) -> Mean | None:
    """Return the mean of at most `REPEATS` steps after a warm-up; None for fewer than two.

    >>> mean_after([900.0, 3.0, 5.0], 1)
    Mean(mean=4.0, deviation=1.4142135623730951)
    """
    counted = steps[warmup : warmup + REPEATS]
    return Mean(fmean(counted), stdev(counted)) if len(counted) > 1 else None


def observe(training: Steps, case: TrainingCase, show: Show) -> dict[str, dict[str, Any]]:
    steps: dict[str, list[float]] = {}
    start = time.monotonic()
    for i in range(WARMUPS[-1] + REPEATS):
        show(f"step {i + 1}")
        for operation, milliseconds in training.time_step().items():
            steps.setdefault(operation, []).append(milliseconds)
        if i == 0:
            start = time.monotonic()
        elif i + 1 >= WARMUPS[-1] + _FEWEST and time.monotonic() - start > _SECONDS:
            break
    show("measuring memory")
    saved, peaks = training.memory()
    return {
        operation: fields(times, WARMUPS[-1], case.flops(operation))
        | {"memory": peaks.get(operation), "held": saved if operation == "forward" else None}
        for operation, times in steps.items()
    }


def fields(steps: Sequence[float], warmup: int, flops: int) -> dict[str, Any]:
    """Return a record's times, steps and rate; its rounds are thirds of the counted steps."""
    from bench.timing import summarize

    thirds = np.array_split(steps[warmup:], 3)
    times = summarize([third.tolist() for third in thirds if third.size])
    tflops = flops / times.median / 1e9 if flops else None
    return {"times": times, "steps": tuple(steps), "tflops": tflops}
