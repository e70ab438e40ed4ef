"""Draw clock and power over a run, a point for each job."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import Record
from twin_attention.interop.rendering.plots import COLOURS, MUTED_COLOUR, quiet

_CLOCK, _POWER = COLOURS[0], COLOURS[5]


def over_jobs(records: Sequence[Record]) -> Figure:
    jobs = list({(r.case["name"], r.operation): r.gpu for r in records if r.gpu}.values())
    order = range(len(jobs))
    throttled = [bool(gpu["throttle"]) for gpu in jobs]
    figure, *panels = _panels(throttled)
    for axes, colour, middle, end in zip(
        panels, (_CLOCK, _POWER), ("sm_mhz", "watts"), ("sm_mhz_lowest", "watts_highest"),
        strict=True,
    ):  # fmt: skip
        medians = [gpu[middle] for gpu in jobs]
        axes.vlines(order, medians, [gpu[end] for gpu in jobs], color=colour, linewidth=0.9,
                    alpha=0.5)  # fmt: skip
        axes.plot(order, medians, color=colour, linestyle="", marker="o", markersize=3)
    return figure


def _panels(throttled: Sequence[bool]) -> tuple[Figure, Axes, Axes]:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    clock, power = figure.subplots(2, 1, sharex=True)
    clock.set_ylabel("SM clock, MHz", fontsize=8)
    power.set_ylabel("power, W", fontsize=8)
    power.set_xlabel("job, in the order in which they ran", fontsize=8)
    for axes in (clock, power):
        quiet(axes, "y")
    if any(throttled):  # half a step to either side of each place
        edges = [i + side for i in range(len(throttled)) for side in (-0.5, 0.5)]
        clock.fill_between(edges, 0, 1, where=[flag for flag in throttled for _ in range(2)],
                           transform=clock.get_xaxis_transform(), color=MUTED_COLOUR, alpha=0.18,
                           linewidth=0)  # fmt: skip
    return figure, clock, power
