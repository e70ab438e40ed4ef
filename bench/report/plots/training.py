"""Draw training: the phases of its steps, and memory by category at the peak and over a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import Record
from bench.report.plots.style import bars, name_width, panels
from bench.report.plots.svg import COLOURS, MUTED_COLOUR, legend, quiet
from bench.report.tables import groups, number, status
from bench.report.training import trainings
from bench.training.case import PHASES
from bench.training.timeline import CATEGORIES, peak

_PHASES: dict[str, str] = dict(zip(PHASES, (COLOURS[0], COLOURS[5], COLOURS[7]), strict=True))
_CATEGORIES = dict(zip(CATEGORIES, (COLOURS[0], COLOURS[4], COLOURS[2], COLOURS[5], COLOURS[7]),
                       strict=True))  # fmt: skip
_COLUMNS = 2
_UNITS = ((1e9, "GB"), (1e6, "MB"))


def steps(records: Sequence[Record]) -> Figure:
    cases = groups(trainings(records), lambda t: t["step"].case["name"])
    shown = [[t for t in found if t["step"].status != "absent"] for found in cases.values()]
    shown = [found for found in shown if found]
    grid = [shown[i : i + _COLUMNS] for i in range(0, len(shown), _COLUMNS)]
    heights = [0.22 * max(map(len, row)) + 0.8 for row in grid]
    labels = [t["step"].label for found in shown for t in found]
    width = _COLUMNS * (name_width(labels) + 4.2)
    figure = Figure(figsize=(width, sum(heights) + 0.4), layout="constrained")
    ratios = {"height_ratios": heights}
    of_cases = panels(figure, len(shown), _COLUMNS, gridspec_kw=ratios)
    for axes, found in zip(of_cases, shown, strict=True):
        bars(axes, [_phases(training) for training in found], _PHASES, "ms")
        axes.set_title(found[0]["step"].case["name"], fontsize=9.5, loc="left")
    legend(figure)
    return figure


def _phases(training: dict[str, Record]) -> tuple[str, dict[str, float], str]:
    whole = training["step"]
    parts = {x: times.median for x in PHASES if (times := training[x].times)}
    return whole.label, parts, number(whole.times.median) if whole.times else whole.status


def peaks_by_case(records: Sequence[Record]) -> Figure:
    cases = groups(records, lambda record: record.case["name"]).values()
    shown = [record for group in cases for record in group if record.status != "absent"]
    divisor, unit = _unit(shown)
    rows = [_categories(record, divisor) for record in shown]
    size = (name_width(name for name, *_ in rows) + 7, 0.24 * len(shown) + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    bars(figure.subplots(), rows, _CATEGORIES, unit)
    legend(figure)
    return figure


def _categories(record: Record, divisor: float) -> tuple[str, dict[str, float], str]:
    at_peak = peak(record.timeline) if record.timeline else {}
    parts = {category: num_bytes / divisor for category, num_bytes in at_peak.items()}
    text = number(sum(parts.values())) if parts else status(record)
    return f"{record.case['name']}, {record.label}", parts, text


def over_a_step(records: Sequence[Record]) -> Figure | None:
    drawn = [record for record in records if record.timeline]
    if not drawn:
        return None
    cases = list(groups(drawn, lambda record: record.case["name"]).values())
    found = max(cases, key=lambda group: (len(group), group[0].case["context"]))
    figure = Figure(figsize=(3.0 * len(found) + 1, 3.4), layout="constrained")
    grid = panels(figure, len(found), len(found), sharey=True)
    divisor, unit = _unit(found)
    for axes, record in zip(grid, found, strict=True):
        _step(axes, record, divisor)
    grid[0].set_ylabel(unit, fontsize=8)
    legend(figure)
    return figure


def _step(axes: Axes, record: Record, divisor: float) -> None:
    timeline = record.timeline
    assert timeline is not None
    points = range(len(timeline["phase"]))
    layers = [[x / divisor for x in timeline[category]] for category in CATEGORIES]
    colours = [_CATEGORIES[category] for category in CATEGORIES]
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
    most = max((record.memory or 0 for record in records), default=0)
    return next((unit for unit in _UNITS if most >= unit[0]), _UNITS[-1])
