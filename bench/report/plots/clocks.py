"""Draw clock and power over a run: from a suite's log, or a point for each job."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import Record
from bench.sampling import THROTTLE_REASONS, Sample
from twin_attention.interop.rendering.plots import COLOURS, MUTED_COLOUR, quiet

_CLOCK, _POWER = COLOURS[0], COLOURS[5]


def over_time(log: Sequence[Sample]) -> Figure:
    minutes = [(sample.time - log[0].time) / 60 for sample in log]
    throttled = [any(sample.throttle & bit for bit in THROTTLE_REASONS) for sample in log]
    figure, clock, power = _panels("minutes", minutes, throttled)
    clock.plot(minutes, [sample.sm_mhz for sample in log], color=_CLOCK, linewidth=0.8)
    power.plot(minutes, [sample.watts for sample in log], color=_POWER, linewidth=0.8)
    return figure


def over_jobs(records: Sequence[Record]) -> Figure:
    jobs = list({(r.case["name"], r.operation): r.gpu for r in records if r.gpu}.values())
    order = range(len(jobs))
    throttled = [bool(gpu["throttle"]) for gpu in jobs]
    figure, *panels = _panels("job, in the order in which they ran", order, throttled)
    for axes, colour, middle, end in zip(
        panels, (_CLOCK, _POWER), ("sm_mhz", "watts"), ("sm_mhz_lowest", "watts_highest"),
        strict=True,
    ):  # fmt: skip
        medians = [gpu[middle] for gpu in jobs]
        axes.vlines(order, medians, [gpu[end] for gpu in jobs], color=colour, linewidth=0.9,
                    alpha=0.5)  # fmt: skip
        axes.plot(order, medians, color=colour, linestyle="", marker="o", markersize=3)
    return figure


def _panels(unit: str, x: Sequence[float], throttled: Sequence[bool]) -> tuple[Figure, Axes, Axes]:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    clock, power = figure.subplots(2, 1, sharex=True)
    clock.set_ylabel("SM clock, MHz", fontsize=8)
    power.set_ylabel("power, W", fontsize=8)
    power.set_xlabel(unit, fontsize=8)
    for axes in (clock, power):
        quiet(axes, "y")
    if any(throttled):  # half a step to either side of each place
        middles = [(a + b) / 2 for a, b in pairwise(x)]
        ends = [2 * x[0] - middles[0], *middles, 2 * x[-1] - middles[-1]]
        edges = [edge for pair in pairwise(ends) for edge in pair]
        clock.fill_between(edges, 0, 1, where=[flag for flag in throttled for _ in range(2)],
                           transform=clock.get_xaxis_transform(), color=MUTED_COLOUR, alpha=0.18,
                           linewidth=0)  # fmt: skip
    return figure, clock, power
