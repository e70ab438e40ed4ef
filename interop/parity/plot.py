"""Draw every error over its budget."""

from __future__ import annotations

import math
from collections import defaultdict

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from twin_attention.contract.operands import FlashOperands
from twin_attention.interop.parity.records import Report
from twin_attention.interop.rendering.plots import (
    BUDGET_COLOUR,
    COLOURS,
    MUTED_COLOUR,
    PAPER_COLOUR,
    RULE_COLOUR,
    legend,
    quiet,
)

OUTPUTS = (
    "out", "lse", "row_max", *(f"d{name}" for name in FlashOperands._fields), "douts", "dlses",
    "tout", "tlse", "q", "k_pages", "v_pages",
)  # fmt: skip
LEFT_EDGE = 1e-3
LANE_HEIGHT = 0.8
LETTER = 0.055  # inches of a letter of a name
WIDTH, PLOT_WIDTH = 10, 8.5  # inches, with and without the names of outputs


def _place(output: str) -> tuple[int, str]:
    return OUTPUTS.index(output) if output in OUTPUTS else len(OUTPUTS), output


def ratio_plot(report: Report) -> Figure:
    """Draw a lane per output and implementation, a dot per case, and the budget as a line."""
    titles = report.titles
    lanes = _lanes(report)
    outputs = sorted({output for output, _ in lanes}, key=_place)
    ratios = [ratio for lane in lanes.values() for _, _, ratio in lane]
    right_edge = max([6.0, *(10 * ratio for ratio in ratios if 1 < ratio < math.inf)])
    step = len(titles) + 1  # the lanes of one output, and a gap

    height = 1.3 + 0.24 * step * len(outputs)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
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
    axes.set_yticks(middles, outputs, fontweight="bold")
    quiet(axes, "x")
    axes.tick_params(axis="y", labelsize=11)

    colours = {title: COLOURS[i % len(COLOURS)] for i, title in enumerate(titles)}
    for (output, title), lane in lanes.items():
        y = outputs.index(output) * step + titles.index(title)
        spots = [
            (
                min(max(ratio, LEFT_EDGE), right_edge),
                y + LANE_HEIGHT * (position - 0.5),
                ratio,
                name,
            )
            for name, position, ratio in lane
        ]
        _draw_lane(axes, y, spots, colours[title])
    for title, colour in colours.items():
        axes.plot([], [], marker="o", linestyle="", color=colour, label=title)
    legend(figure)
    return figure


def _lanes(report: Report) -> dict[tuple[str, str], list[tuple[str, float, float]]]:
    lanes = defaultdict(list)
    for i, case in enumerate(report.cases):
        for c in case.comparisons:
            position = (i + 0.5) / len(report.cases)
            lanes[c.output, c.title].append((case.name, position, c.agreement.ratio))
    return lanes


def _draw_lane(
    axes: Axes, y: float, spots: list[tuple[float, float, float, str]], colour: str
) -> None:
    axes.axhline(y, color=RULE_COLOUR, linewidth=0.6, zorder=0)
    dots = [spot for spot in spots if math.isfinite(spot[2])]
    crosses = [spot for spot in spots if not math.isfinite(spot[2])]
    style = {"color": colour, "alpha": 0.75, "clip_on": False}
    axes.scatter([s[0] for s in dots], [s[1] for s in dots], s=14, linewidths=0, **style)
    axes.scatter([s[0] for s in crosses], [s[1] for s in crosses], s=40, marker="x", **style)
    x, height, _, name = max(spots, key=lambda spot: spot[2])
    # Behind the dot, unless it would cross the budget's line or the edge.
    right_edge = axes.get_xlim()[1]
    end = 1 if x <= 1 else right_edge
    inches = PLOT_WIDTH * math.log(end / x)
    fits = inches / math.log(right_edge / LEFT_EDGE) > LETTER * len(name) + 0.1
    side, offset = ("left", 5) if fits else ("right", -5)
    axes.annotate(
        name, (x, height), (offset, 0), textcoords="offset points",
        fontsize=7, color=MUTED_COLOUR, ha=side, va="center", zorder=1.5,
        bbox={"facecolor": PAPER_COLOUR, "edgecolor": "none", "pad": 0.4},
    )  # fmt: skip


def _position(ratio: float, right_edge: float) -> float:
    return math.log(ratio / LEFT_EDGE) / math.log(right_edge / LEFT_EDGE)
