"""Clock and power over a run: from the log that a suite wrote, or a point for each job."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import Record
from bench.report.plots.style import quiet
from bench.sampling import THROTTLE_REASONS, Sample
from interop.parity.plot import COLOURS, MUTED_COLOUR

_CLOCK, _POWER = COLOURS[0], COLOURS[5]


def over_time(log: Sequence[Sample]) -> Figure:
    """Samples over minutes; shaded where the card held its clock back."""
    minutes = [(sample.time - log[0].time) / 60 for sample in log]
    figure, clock, power = _panels("minutes")
    clock.plot(minutes, [sample.sm_mhz for sample in log], color=_CLOCK, linewidth=0.8)
    power.plot(minutes, [sample.watts for sample in log], color=_POWER, linewidth=0.8)
    held = [any(sample.throttle & bit for bit in THROTTLE_REASONS) for sample in log]
    if any(held):
        _shade(clock, minutes, held)
    return figure


def over_jobs(records: Sequence[Record]) -> Figure:
    """Each job's median and lowest clock, and its median and highest power, in their order."""
    jobs = {(r.case["name"], r.operation): r.gpu for r in records if r.gpu}
    found = list(jobs.values())
    order = range(len(found))
    figure, clock, power = _panels("job, in the order in which they ran")
    _range(clock, order, [gpu["sm_mhz"] for gpu in found],
           [gpu["sm_mhz_lowest"] for gpu in found], _CLOCK)  # fmt: skip
    _range(power, order, [gpu["watts"] for gpu in found],
           [gpu["watts_highest"] for gpu in found], _POWER)  # fmt: skip
    held = [bool(gpu["throttle"]) for gpu in found]
    if any(held):
        _shade(clock, list(order), held)
    return figure


def _panels(unit: str) -> tuple[Figure, Axes, Axes]:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    clock, power = figure.subplots(2, 1, sharex=True)
    clock.set_ylabel("SM clock, MHz", fontsize=8)
    power.set_ylabel("power, W", fontsize=8)
    power.set_xlabel(unit, fontsize=8)
    for axes in (clock, power):
        quiet(axes, "y")
    return figure, clock, power


def _range(
    axes: Axes, x: Sequence[int], medians: Sequence[float], ends: Sequence[float], colour: str
) -> None:
    axes.vlines(x, medians, ends, color=colour, linewidth=0.9, alpha=0.5)
    axes.plot(x, medians, color=colour, linestyle="", marker="o", markersize=3)


def _shade(axes: Axes, x: Sequence[float], held: Sequence[bool]) -> None:
    """Half a step to either side of each place where the clock is held back."""
    middles = [(a + b) / 2 for a, b in pairwise(x)]
    ends = [2 * x[0] - middles[0], 2 * x[-1] - middles[-1]]
    edges = [ends[0], *(edge for middle in middles for edge in (middle, middle)), ends[1]]
    where = [flag for flag in held for _ in range(2)]
    axes.fill_between(edges, 0, 1, where=where, transform=axes.get_xaxis_transform(),
                      color=MUTED_COLOUR, alpha=0.18, linewidth=0)  # fmt: skip
