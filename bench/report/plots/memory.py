"""Draw memory by category: at the peak of each step, and over steps side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import Record
from bench.report.plots.style import name_width
from bench.report.tables import groups, number
from bench.report.training import status
from bench.training.timeline import CATEGORIES, peak
from interop.rendering.plots import COLOURS, MUTED_COLOUR, legend, quiet

_COLOURS = dict(zip(CATEGORIES, (COLOURS[0], COLOURS[4], COLOURS[2], COLOURS[5], COLOURS[7]),
                    strict=True))  # fmt: skip
_UNITS = ((1e9, "GB"), (1e6, "MB"))


def peaks_by_case(records: Sequence[Record]) -> Figure:
    """Draw a bar for each implementation of each case: its categories at the peak."""
    cases = groups(records, lambda record: record.case["name"]).values()
    shown = [record for group in cases for record in group if record.status != "absent"]
    texts = [f"{record.case['name']}, {record.label}" for record in shown]
    size = (name_width(texts) + 7, 0.24 * len(shown) + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    divisor, unit = _unit(shown)
    for place, record in enumerate(shown):
        left = 0.0
        for category, num_bytes in (peak(record.timeline) if record.timeline else {}).items():
            width = num_bytes / divisor
            axes.barh(place, width, left=left, height=0.7, color=_COLOURS[category],
                      label=category)  # fmt: skip
            left += width
        axes.annotate(number(left) if left else status(record), (left, place), (3, 0),
                      textcoords="offset points", va="center", fontsize=7,
                      color=MUTED_COLOUR)  # fmt: skip
    axes.set_yticks(range(len(shown)), texts)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    axes.set_xlabel(unit, fontsize=8)
    quiet(axes, "x")
    legend(figure)
    return figure


def over_a_step(records: Sequence[Record]) -> Figure | None:
    """Draw the steps of the longest context at which most implementations have one."""
    drawn = [record for record in records if record.timeline]
    if not drawn:
        return None
    cases = list(groups(drawn, lambda record: record.case["name"]).values())
    found = max(cases, key=lambda group: (len(group), group[0].case["context"]))
    figure = Figure(figsize=(3.0 * len(found) + 1, 3.4), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False, sharey=True).ravel()
    divisor, unit = _unit(found)
    for axes, record in zip(panels, found, strict=True):
        _step(axes, record, divisor)
    panels[0].set_ylabel(unit, fontsize=8)
    legend(figure)
    return figure


def _step(axes: Axes, record: Record, divisor: float) -> None:
    """Draw the categories one on top of the other, and where the phases begin."""
    timeline = record.timeline
    assert timeline is not None
    points = range(len(timeline["phase"]))
    layers = [[x / divisor for x in timeline[category]] for category in CATEGORIES]
    colours = [_COLOURS[category] for category in CATEGORIES]
    areas = axes.stackplot(
        points, layers, labels=CATEGORIES, colors=colours, linewidth=0, step="post"
    )
    for area in areas:
        area.set_rasterized(True)  # as paths, thousands of points take ten times the bytes
    starts = [next(group)[0] for _, group in groupby(enumerate(timeline["phase"]), lambda x: x[1])]
    for start in starts[1:]:
        axes.axvline(start, color=MUTED_COLOUR, linewidth=0.8)
    axes.set_xticks(starts, [timeline["phase"][start] for start in starts], ha="left", rotation=-20)
    axes.set_xlim(0, len(points) - 1)
    axes.set_title(f"{record.label}, {record.case['name']}", fontsize=8.5, loc="left")
    quiet(axes, "y")


def _unit(records: Sequence[Record]) -> tuple[float, str]:
    """Return a divisor of bytes that leaves the largest peak above 1, and its unit."""
    most = max((record.memory or 0 for record in records), default=0)
    return next((unit for unit in _UNITS if most >= unit[0]), _UNITS[-1])
