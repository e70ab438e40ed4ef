"""Draw what plots share: styles of implementations, grids of panels, and bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import Record
from bench.report.plots.svg import COLOURS, MUTED_COLOUR, quiet
from bench.report.tables import labels

Style = dict[str, Any]

_OURS = {"torch": COLOURS[0], "jax": COLOURS[5]}
_PEERS = (COLOURS[2], COLOURS[3], COLOURS[1], COLOURS[4], COLOURS[6], COLOURS[7])


def styles(records: Sequence[Record]) -> dict[str, Style]:
    """Return a style by label; ours are bold, SM80 code is dashed, peers are thin or dotted."""
    ours: dict[str, Style] = {}
    firsts = {r.label: r for r in records if not r.is_peer}
    implementations = sorted({r.implementation for r in firsts.values()})
    for label, record in firsts.items():
        family = [name for name in implementations if name.split()[0] == record.framework]
        is_sm80 = record.target == "sm80"
        ours[label] = {
            "color": _OURS[record.framework],
            "linestyle": (0, (4, 1.5)) if is_sm80 else "-",
            "linewidth": 2.2,
            "marker": "oXP*"[family.index(record.implementation) % 4],
            "markersize": 5.5,
            "markerfacecolor": "none" if is_sm80 else None,
        }
    peers = {
        label: {
            "color": _PEERS[i % len(_PEERS)],
            "linestyle": ("-", ":")[i // len(_PEERS) % 2],
            "linewidth": 1.2,
            "marker": "sD^v<>"[i % 6],
            "markersize": 4,
        }
        for i, label in enumerate(labels(records, peers=True))
    }
    return ours | peers


def name_width(names: Iterable[str]) -> float:
    return 0.3 + 0.065 * max(map(len, names))


def panels(figure: Figure, count: int, columns: int, **options: Any) -> list[Axes]:
    grid = figure.subplots(-(-count // columns), columns, squeeze=False, **options).ravel()
    for axes in grid[count:]:
        axes.set_visible(False)
    return list(grid[:count])


def bars(
    axes: Axes,
    rows: Sequence[tuple[str, Mapping[str, float], str]],
    colours: Mapping[str, Any],
    unit: str,
) -> None:
    for place, (_, parts, text) in enumerate(rows):
        left = 0.0
        for part, width in parts.items():
            axes.barh(place, width, left=left, height=0.7, color=colours[part], label=part)
            left += width
        axes.annotate(text, (left, place), (3, 0), textcoords="offset points", va="center",
                      fontsize=7, color=MUTED_COLOUR)  # fmt: skip
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(unit, fontsize=8)
    quiet(axes, "x")
