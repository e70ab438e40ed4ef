"""The pictures of a report: throughput over length or by case, and ratios to the peers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from bench.records import Record
from bench.report.tables import by_case, by_operation, labels, number, ratio
from interop.parity.plot import COLOURS
from interop.parity.records import problem_text

_OF_LENGTH = ("name", "batch", "seq_q", "seq_kv", "lengths", "max_pages")


def figures(run: Sequence[Record]) -> dict[str, Figure]:
    """The figures that a run's records fill, by title."""
    families = _families(run)
    lines = {name: rs for name, rs in families.items() if len(set(map(_length, rs))) > 1}
    bars = [r for name, rs in families.items() if name not in lines for r in rs]
    found = {}
    if lines:
        found["TFLOP/s over length"] = _over_length(lines, labels(run))
    if bars:
        found["TFLOP/s by case"] = _by_case(bars)
    if labels(run, peers=True) and labels(run, peers=False):
        found["Peer's time / ours"] = _heat_maps(run)
    return found


def _families(run: Sequence[Record]) -> dict[str, list[Record]]:
    """Records whose throughput is known, by what of the case is no length."""
    families: dict[str, list[Record]] = {}
    for record in run:
        if record.tflops is not None:
            rest = {k: v for k, v in record.case.items() if k not in _OF_LENGTH}
            families.setdefault(str(rest), []).append(record)
    return families


def _length(record: Record) -> int:
    return max(record.case.get("lengths") or [record.case["seq_kv"]])


def _over_length(families: dict[str, list[Record]], titles: list[str]) -> Figure:
    """A panel for each family and operation, a line for each implementation."""
    operations = list(dict.fromkeys(r.operation for rs in families.values() for r in rs))
    figure = Figure(figsize=(5 * len(operations), 3 * len(families) + 0.8), layout="constrained")
    panels = figure.subplots(len(families), len(operations), squeeze=False)
    for line, records in zip(panels, families.values(), strict=True):
        for axes, operation in zip(line, operations, strict=True):
            group = [r for r in records if r.operation == operation]
            for label in labels(group):
                points = sorted((_length(r), r.tflops) for r in group if r.label == label)
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label,
                          color=_colour(label, titles))  # fmt: skip
            lengths = sorted(set(map(_length, group)))
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, map(str, lengths), fontsize=8)
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_title(f"{_without_length(records[0])}, {operation}", fontsize=9)
            axes.set_ylim(bottom=0)
            _style(axes, "y")
    for axes in panels[-1]:
        axes.set_xlabel("keys")
    _legend(figure, panels[0, 0])
    return figure


def _without_length(record: Record) -> str:
    words = problem_text(record.case).split()
    return " ".join(word for word in words if not word.startswith(("B", "Sq", "Skv", "T", "pages")))


def _by_case(records: Sequence[Record]) -> Figure:
    """Bars: a panel for each operation, a group for each case."""
    titles = labels(records)
    operations = by_operation(records)
    names = {r.case["name"]: problem_text(r.case) for r in records}
    size = (
        _width(names.values()) + 3.5 * len(operations),
        1.1 + 0.17 * (len(titles) + 1) * len(names),
    )
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(operations), squeeze=False, sharex=True, sharey=True)[0]
    places = {name: place for place, name in enumerate(names)}
    for axes, (operation, group) in zip(panels, operations.items(), strict=True):
        for i, label in enumerate(titles):
            own = [r for r in group if r.label == label]
            y = [places[r.case["name"]] + (i + 0.5) / (len(titles) + 1) - 0.43 for r in own]
            widths = [r.tflops or 0.0 for r in own]
            bars = axes.barh(
                y, widths, 0.9 / (len(titles) + 1), label=label, color=_colour(label, titles)
            )
            axes.bar_label(bars, [number(width) for width in widths], padding=2, fontsize=6.5)
        axes.set_yticks(range(len(names)), names.values(), fontsize=8)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_title(operation, fontsize=10)
        axes.set_xlabel("TFLOP/s")
        axes.margins(x=0.08)
        _style(axes, "x")
    _legend(figure, panels[0])
    return figure


def _heat_maps(run: Sequence[Record]) -> Figure:
    """A panel for each operation and peer: cases down, our implementations across."""
    peers, ours, operations = labels(run, peers=True), labels(run, peers=False), by_operation(run)
    names = {r.case["name"]: problem_text(r.case) for r in run}
    size = (
        _width(names.values()) + 0.75 * len(ours) * len(peers) + 1.5,
        (0.3 + 0.35 * len(names)) * len(operations) + 0.8,
    )
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(operations), len(peers), squeeze=False, sharex=True, sharey=True)
    for line, (operation, records) in zip(panels, operations.items(), strict=True):
        rows = by_case(records)
        for axes, peer in zip(line, peers, strict=True):
            values = np.array(
                [[ratio(rows.get(name, {}), own, peer) for own in ours] for name in names], float
            )
            image = axes.imshow(values, norm=LogNorm(0.4, 2.5), cmap="RdBu", aspect="auto")
            for (y, x), value in np.ndenumerate(values):
                if np.isfinite(value):
                    dark = not 0.55 < value < 1.8
                    axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7,
                              color="white" if dark else "black")  # fmt: skip
            axes.set_title(f"{operation}, against {peer}", fontsize=9)
            axes.set_xticks(range(len(ours)), ours, fontsize=8, rotation=30, ha="right")
            axes.set_yticks(range(len(names)), names.values(), fontsize=8)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=panels, shrink=0.6, extend="both", ticks=[0.5, 1, 2])
    bar.ax.set_yticklabels(["0.5, slower", "1", "2, faster"], fontsize=8)
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    return figure


def _width(names: Iterable[str]) -> float:
    """Inches that the names of cases take."""
    return 0.3 + 0.06 * max(map(len, names))


def _colour(label: str, titles: list[str]) -> str:
    return COLOURS[titles.index(label) % len(COLOURS)]


def _style(axes: Axes, grid: Literal["x", "y"]) -> None:
    axes.grid(axis=grid, color="#eeeeee", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=6, frameon=False, fontsize=8)
