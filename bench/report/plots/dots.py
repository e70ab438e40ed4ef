"""Rates of cases that form no series: a line for each case, a dot for each implementation."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from bench.records import Record
from bench.report.limits import Limit
from bench.report.plots.style import Style, legend, name_width, quiet
from bench.report.tables import labels, names
from interop.parity.plot import MUTED_COLOUR, RULE_COLOUR


def by_case(records: Sequence[Record], limit: Limit, looks: dict[str, Style]) -> Figure:
    """One operation's cases from top to bottom, its rates from left to right."""
    _, apart = names(records)
    places = {name: place for place, name in enumerate(apart)}
    size = (name_width(apart.values()) + 7, 0.3 * len(apart) + 1.3)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.hlines(range(len(apart)), 0, 1, transform=axes.get_yaxis_transform(), linewidth=0.8,
                color=RULE_COLOUR, zorder=0)  # fmt: skip
    for label in labels(records):
        own = [record for record in records if record.label == label]
        axes.plot(
            [limit.known_rate(record) for record in own],
            [places[record.case["name"]] for record in own],
            label=label,
            **looks[label] | {"linestyle": "", "markersize": looks[label]["markersize"] + 1.5},
        )
    highest = max(limit.known_rate(record) for record in records)
    if limit.measured and limit.measured < 2 * highest:
        axes.axvline(limit.measured, color=MUTED_COLOUR, linewidth=0.9, zorder=1)
        axes.annotate(f"measured {limit.name}", (limit.measured, 1), (-3, -3), va="top", ha="right",
                      xycoords=axes.get_xaxis_transform(), textcoords="offset points", fontsize=7,
                      color=MUTED_COLOUR, rotation=90)  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_ylim(len(apart) - 0.5, -0.5)
    axes.set_yticks(range(len(apart)), apart.values())
    axes.set_xlabel(limit.unit, fontsize=8)
    quiet(axes, "x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    legend(figure)
    return figure
