"""The picture of a report: every error over its budget, as inline SVG."""

from __future__ import annotations

import io
import math
import re
from collections import defaultdict

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from interop.parity.records import Report

# Okabe and Ito's colours, told apart without red and green.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A7F00", "#555555")
BUDGET_COLOUR = "#d62728"
RULE_COLOUR = "#eeeeee"
MUTED_COLOUR = "#6b6b70"
OUTPUTS = ("out", "lse", "dq", "dk", "dv")
LEFT_EDGE = 1e-3
LANE_HEIGHT = 0.8
# By a picture's own colours, those of page.css, which follow the reader's light or dark mode.
_PAGE_COLOURS = {
    "#000000": "currentColor",
    RULE_COLOUR: "var(--faint)",
    MUTED_COLOUR: "var(--muted)",
    BUDGET_COLOUR: "var(--budget)",
    **{colour.lower(): f"var(--series-{i})" for i, colour in enumerate(COLOURS, 1)},
}
# Most of the bytes of a picture with much text: the font, which is the page's, and a turn by 0.
_SUPERFLUOUS = re.compile(r"""font-family: [^;"]*; | transform="rotate\(-0 [^"]*\"""")


def ratio_plot(report: Report) -> str:
    """A lane for each output and implementation, a dot for each case, the budget as a line.

    Within a lane the cases stand in their order, from its top to its bottom. A ratio under
    `LEFT_EDGE` stands at the left edge; one that is not finite, as a cross, at the right edge.
    """
    titles = report.titles
    lanes = _lanes(report)
    outputs = [name for name in OUTPUTS if any(output == name for output, _ in lanes)]
    ratios = [ratio for lane in lanes.values() for _, _, ratio in lane]
    right_edge = 3 * max([2.0, *filter(math.isfinite, ratios)])
    step = len(titles) + 1  # the lanes of one output, and a gap

    height = 1.3 + 0.24 * step * len(outputs)
    figure = Figure(figsize=(10, height), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_xlim(LEFT_EDGE, right_edge)
    axes.set_ylim(len(outputs) * step - 1.2, -0.8)
    axes.axvspan(1, right_edge, color=BUDGET_COLOUR, alpha=0.08, linewidth=0)
    axes.axvline(1, color=BUDGET_COLOUR, linewidth=1.2)
    axes.set_title("budget", x=_position(1, right_edge), color=BUDGET_COLOUR, fontsize=10)
    edge = f"left edge: {LEFT_EDGE:g} or less"
    axes.set_xlabel(f"error / budget, the worse of maximum and RMSE ({edge})")
    middles = [i * step + (len(titles) - 1) / 2 for i in range(len(outputs))]
    axes.set_yticks(middles, outputs, fontsize=11, fontweight="bold")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=RULE_COLOUR, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)

    colours = {title: COLOURS[i % len(COLOURS)] for i, title in enumerate(titles)}
    for (output, title), lane in lanes.items():
        y = outputs.index(output) * step + titles.index(title)
        spots = [
            (min(max(ratio, LEFT_EDGE), right_edge), y + LANE_HEIGHT * (place - 0.5), ratio, name)
            for name, place, ratio in lane
        ]
        _draw_lane(axes, y, spots, colours[title])
    handles = [
        Line2D([], [], marker="o", linestyle="", color=colour, label=title)
        for title, colour in colours.items()
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False)
    return to_svg(figure)


def _lanes(report: Report) -> dict[tuple[str, str], list[tuple[str, float, float]]]:
    """By output and title: each case's name, its place from 0 to 1, and its ratio."""
    lanes = defaultdict(list)
    for i, case in enumerate(report.cases):
        for c in case.comparisons:
            place = (i + 0.5) / len(report.cases)
            lanes[c.output, c.title].append((case.name, place, c.agreement.ratio))
    return lanes


def _draw_lane(
    axes: Axes, y: float, spots: list[tuple[float, float, float, str]], colour: str
) -> None:
    """Dots and crosses of one lane, the name of its worst case beside it."""
    axes.axhline(y, color=RULE_COLOUR, linewidth=0.6, zorder=0)
    dots = [spot for spot in spots if math.isfinite(spot[2])]
    crosses = [spot for spot in spots if not math.isfinite(spot[2])]
    style = {"color": colour, "alpha": 0.75, "clip_on": False}
    axes.scatter([s[0] for s in dots], [s[1] for s in dots], s=14, linewidths=0, **style)
    axes.scatter([s[0] for s in crosses], [s[1] for s in crosses], s=40, marker="x", **style)
    x, height, _, name = max(spots, key=lambda spot: spot[2])
    side, offset = ("left", 5) if x <= 1 else ("right", -5)
    axes.annotate(
        name, (x, height), (offset, 0), textcoords="offset points",
        fontsize=7, color=MUTED_COLOUR, ha=side, va="center",
    )  # fmt: skip


def _position(ratio: float, right_edge: float) -> float:
    """Where a ratio stands on the logarithmic axis, from 0 to 1."""
    return math.log(ratio / LEFT_EDGE) / math.log(right_edge / LEFT_EDGE)


def to_svg(figure: Figure, standalone: bool = False) -> str:
    """Return the figure as SVG, without metadata.

    Args:
        standalone: a file that needs no page: on white, letters as outlines. Otherwise an element
            whose text is text, in the page's font and colours.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    letters = "path" if standalone else "none"
    with matplotlib.rc_context({"svg.fonttype": letters, "svg.hashsalt": "parity"}):
        figure.savefig(buffer, format="svg", metadata=nothing, transparent=not standalone)
    text = buffer.getvalue()
    if standalone:
        return text
    text = re.sub("#[0-9a-f]{6}", lambda found: _PAGE_COLOURS.get(found[0], found[0]), text)
    text = _SUPERFLUOUS.sub("", text)
    return text[text.index("<svg") :]
