"""Draw rates: lines over length for series of cases, dots for others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator

from bench.peaks import Peak
from bench.records import Record
from bench.report.plots.style import Style, name_width, panels
from bench.report.plots.svg import MUTED_COLOUR, RULE_COLOUR, legend, quiet
from bench.report.tables import groups, labels, names

PANEL_SHARE = 0.75  # of a panel's height, beside titles and ticks
NAME_HEIGHT = 0.13  # inches of a line's name
_OF_LENGTH = ("name", "batch", "seq_q", "seq_kv", "lengths", "max_pages")


def length(record: Record) -> int:
    lengths = record.case.get("lengths") or [record.case["seq_kv"]]
    return max(max(x) if isinstance(x, list | tuple) else x for x in lengths)


def split_series(records: Sequence[Record]) -> tuple[list[list[Record]], list[Record]]:
    """Return groups of cases that differ only in length, and the other cases."""
    series, alone = [], []
    for group in groups(records, _family).values():
        lengths = {record.case["name"]: length(record) for record in group}
        if 1 < len(lengths) == len(set(lengths.values())):
            series.append(group)
        else:
            alone += group
    return sorted(series, key=_order), alone


def over_length(
    series: Sequence[Sequence[Record]],
    peak: Peak,
    looks: dict[str, Style],
    columns: int = 2,
    named: bool = False,
) -> Figure:
    """Draw a panel for each series of one operation; `named` lines have names at their ends."""
    panel_width = 13 / columns  # inches
    columns = min(columns, len(series))
    rows = -(-len(series) // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
    figure = Figure(figsize=(panel_width * columns, 3.3 * rows + 0.6), layout=layout)
    grid = panels(figure, len(series), columns, sharey=True)
    rates = [peak.known_rate(record) for records in series for record in records]
    # Rates of single heads span orders; a bandwidth is compared with its peak.
    logarithmic = peak.unit == "TFLOP/s" and max(rates) > 100 * min(rates)
    rules = {f"measured {peak.name}": peak.measured, "datasheet": peak.datasheet}
    near = {name: rate for name, rate in rules.items() if rate and rate < 2 * max(rates)}
    if logarithmic:
        near.pop("datasheet", None)  # too near the measured one on this scale
        grid[0].set_yscale("log")
    else:
        grid[0].set_ylim(0, 1.08 * max([*rates, *near.values()]))
    for axes, records in zip(grid, series, strict=True):
        _panel(axes, records, peak, looks)
        for name, rate in near.items():
            axes.axhline(rate, color=MUTED_COLOUR, linewidth=0.9, zorder=1,
                         linestyle="--" if name == "datasheet" else "-")  # fmt: skip
            axes.annotate(name, (0.01, rate), (0, -3 if logarithmic else 2), fontsize=7,
                          color=MUTED_COLOUR, xycoords=axes.get_yaxis_transform(),
                          textcoords="offset points",
                          va="top" if logarithmic else "bottom")  # fmt: skip
        quiet(axes, "y")
        if named:
            _name_lines(axes, 3.3 * PANEL_SHARE)
    for axes in grid[::columns]:
        axes.set_ylabel(peak.unit, fontsize=8)
    if named:
        figure.legend([], [], loc="outside upper left", alignment="left", frameon=False)
    else:
        legend(figure)
    return figure


def _name_lines(axes: Axes, height: float) -> None:
    """Write the lines' names to the right of their ends, without overlap; axes have limits."""
    own = [(str(line.get_label()), line) for line in axes.lines]
    own = [(name, line) for name, line in own if not name.startswith("_")]
    ends = [np.asarray(line.get_xydata())[-1] for _, line in own]
    to_axes = axes.transData - axes.transAxes
    places = spread([float(to_axes.transform(end)[1]) for end in ends], NAME_HEIGHT / height)
    for (name, line), end, place in zip(own, ends, places, strict=True):
        axes.annotate(
            name, (float(end[0]), float(end[1])), (1.06, place), textcoords="axes fraction",
            fontsize=7.5, va="center", fontweight="bold" if line.get_linewidth() > 2 else "normal",
            arrowprops={"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.7,
                        "shrinkA": 1, "shrinkB": 4},
        )  # fmt: skip


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Return places in the same order near the given ones, at least a gap apart.

    >>> spread([0.5, 0.0, 0.5], 0.25)
    [0.375, 0.0, 0.625]
    """
    groups: list[list[float]] = []  # of places that touch: number, middle
    for place in sorted(places):
        groups.append([1, place])
        while len(groups) > 1 and _bottom(groups[-1], gap) < _top(groups[-2], gap) + gap:
            number, middle = groups.pop()
            before, below = groups[-1]
            total = before + number
            groups[-1] = [total, (before * below + number * middle) / total]
    found = [_bottom(group, gap) + i * gap for group in groups for i in range(int(group[0]))]
    order = sorted(range(len(places)), key=lambda i: places[i])
    result = dict(zip(order, found, strict=True))
    return [result[i] for i in range(len(places))]


def _bottom(group: Sequence[float], gap: float) -> float:
    return group[1] - gap * (group[0] - 1) / 2


def _top(group: Sequence[float], gap: float) -> float:
    return group[1] + gap * (group[0] - 1) / 2


def by_case(records: Sequence[Record], peak: Peak, looks: dict[str, Style]) -> Figure:
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
            [peak.known_rate(record) for record in own],
            [places[record.case["name"]] for record in own],
            label=label,
            **looks[label] | {"linestyle": "", "markersize": looks[label]["markersize"] + 1.5},
        )
    if peak.measured and peak.measured < 2 * max(map(peak.known_rate, records)):
        axes.axvline(peak.measured, color=MUTED_COLOUR, linewidth=0.9, zorder=1)
        axes.annotate(f"measured {peak.name}", (peak.measured, 1), (-3, -3), va="top", ha="right",
                      xycoords=axes.get_xaxis_transform(), textcoords="offset points", fontsize=7,
                      color=MUTED_COLOUR, rotation=90)  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_ylim(len(apart) - 0.5, -0.5)
    axes.set_yticks(range(len(apart)), apart.values())
    axes.set_xlabel(peak.unit, fontsize=8)
    quiet(axes, "x")
    legend(figure)
    return figure


def _panel(axes: Axes, records: Sequence[Record], peak: Peak, looks: dict[str, Style]) -> None:
    for label in labels(records):
        points = sorted((length(r), peak.known_rate(r)) for r in records if r.label == label)
        axes.plot(*zip(*points, strict=True), zorder=3 if looks[label]["linewidth"] > 2 else 2,
                  label=label, **looks[label])  # fmt: skip
    lengths = sorted(set(map(length, records)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, map(short, lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(_title(records[0]), fontsize=9.5, loc="left")
    axes.set_xlabel("keys", fontsize=8)


def short(length: int) -> str:
    """Return a length in few characters.

    >>> short(512), short(32768)
    ('512', '32k')
    """
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def _family(record: Record) -> str:
    case = record.case
    if "padding" in case and "new_tokens" not in case:  # packed sequences, whose lengths differ
        return case["name"]
    rest = {name: value for name, value in case.items() if name not in _OF_LENGTH}
    if "lengths" in case:
        rest |= {"sequences": len(case["lengths"]), "wide": _has_wide_table(record)}
    return str(rest)


def _has_wide_table(record: Record) -> bool:
    case = record.case
    return case["max_pages"] * case["page_size"] > length(record) + case["page_size"]


def _order(group: Sequence[Record]) -> tuple:
    """Return a key that puts panels that differ in one thing side by side."""
    case = group[0].case
    return case["head_dim"], -case["heads_q"], -case["heads_kv"], case["dtype"], _family(group[0])


def _title(record: Record) -> str:
    case = record.case
    words = [f"D {case['head_dim']}", f"{case['heads_q']}/{case['heads_kv']} heads"]
    if "lengths" in case:
        sequences = len(case["lengths"])
        words.append(f"{sequences} sequence{'s' if sequences > 1 else ''}")
        words += [f"{case['tokens']} tokens"] if (case["tokens"] or 1) > 1 else []
        words += [f"{sum(case['new_tokens'])} new tokens"] if "new_tokens" in case else []
        words.append(f"pages of {case['page_size']}")
        words += ["wide table"] if _has_wide_table(record) else []
    words.append(case.get("kv_dtype") or case["dtype"])
    words += ["causal"] if case.get("causal") else []
    for name in ("window_size", "softcap"):
        words += [f"{name} {case[name]}"] if case.get(name) is not None else []
    return ", ".join(words)
