"""Draw training steps: the phases of each implementation, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import Record
from bench.report.plots.style import name_width
from bench.report.tables import groups, number
from bench.report.training import trainings
from bench.training.case import PHASES
from interop.rendering.plots import COLOURS, MUTED_COLOUR, legend, quiet

_COLOURS = dict(zip(PHASES, (COLOURS[0], COLOURS[5], COLOURS[7]), strict=True))
_COLUMNS = 2


def steps(records: Sequence[Record]) -> Figure:
    """Draw a panel for each case, a bar of median milliseconds for each implementation."""
    cases = groups(trainings(records), lambda t: t["step"].case["name"])
    shown = [[t for t in found if t["step"].status != "absent"] for found in cases.values()]
    shown = [found for found in shown if found]
    grid = [shown[i : i + _COLUMNS] for i in range(0, len(shown), _COLUMNS)]
    heights = [0.22 * max(map(len, row)) + 0.8 for row in grid]
    labels = [t["step"].label for found in shown for t in found]
    width = _COLUMNS * (name_width(labels) + 4.2)
    figure = Figure(figsize=(width, sum(heights) + 0.4), layout="constrained")
    panels = figure.subplots(
        len(grid), _COLUMNS, squeeze=False, gridspec_kw={"height_ratios": heights}
    ).ravel()
    for axes, found in zip(panels, shown, strict=False):
        _panel(axes, found)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    legend(figure)
    return figure


def _panel(axes: Axes, found: Sequence[dict[str, Record]]) -> None:
    """Draw one case; what has no time says why."""
    for place, training in enumerate(found):
        left = 0.0
        for phase in PHASES:
            if times := training[phase].times:
                axes.barh(place, times.median, left=left, height=0.7, color=_COLOURS[phase],
                          label=phase)  # fmt: skip
                left += times.median
        whole = training["step"]
        text = f"{number(whole.times.median)}" if whole.times else whole.status
        axes.annotate(text, (left, place), (3, 0), textcoords="offset points", va="center",
                      fontsize=7, color=MUTED_COLOUR)  # fmt: skip
    axes.set_yticks(range(len(found)), [training["step"].label for training in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_title(found[0]["step"].case["name"], fontsize=9.5, loc="left")
    axes.set_xlabel("ms", fontsize=8)
    quiet(axes, "x")
