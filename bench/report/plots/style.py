"""How pictures look: a colour, a dash and a marker for each implementation; quiet axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import Record
from bench.report.tables import labels
from interop.parity.plot import COLOURS, MUTED_COLOUR, RULE_COLOUR

Style = dict[str, Any]

PANEL_HEIGHT = 2.7  # inches
LINE_OF_TEXT = 0.13

# Okabe and Ito's: blue and vermilion are ours, the rest are the peers'.
_OURS = {"Triton": COLOURS[0], "Pallas": COLOURS[5]}
_PEERS = (COLOURS[2], COLOURS[3], COLOURS[1], COLOURS[4], COLOURS[6], COLOURS[7])
_DASHES = {"sm80": (0, (4, 1.5))}


def styles(records: Sequence[Record]) -> dict[str, Style]:
    """By label, the same in every picture of these records.

    Ours are bold: a colour for each framework's kernel, dashed where it is SM80 code, with another
    marker for a variant. Peers are thin, and dotted from the seventh on.
    """
    ours: dict[str, Style] = {}
    firsts = {r.label: r for r in records if not r.is_peer}
    kinds = list(dict.fromkeys(r.implementation for r in firsts.values()))
    for label, record in firsts.items():
        family = record.implementation.split()[0]
        variants = [kind for kind in kinds if kind.split()[0] == family]
        ours[label] = {
            "color": _OURS[family],
            "linestyle": _DASHES.get(record.target or "", "-"),
            "linewidth": 2.2,
            "marker": "oXP*"[variants.index(record.implementation) % 4],
            "markersize": 5.5,
            "markerfacecolor": "none" if record.target == "sm80" else None,
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


def quiet(axes: Axes, grid: Literal["x", "y", "both"]) -> None:
    """A light grid behind the data, and no frame that says nothing."""
    axes.grid(axis=grid, color=RULE_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, length=3, width=0.6)
    axes.tick_params(which="minor", length=0)


def label_ends(
    axes: Axes, ends: Iterable[tuple[str, float, float]], looks: dict[str, Style]
) -> None:
    """Name lines to the right of the panel, at the height of their ends but never overlapping.

    Args:
        ends: label and data coordinates of each line's last point.
    """
    to_panel = axes.transScale + axes.transLimits
    places = sorted((float(to_panel.transform((x, y))[1]), label, (x, y)) for label, x, y in ends)
    if not places:
        return
    heights = spread([height for height, *_ in places], LINE_OF_TEXT / PANEL_HEIGHT)
    for height, (_, label, end) in zip(heights, places, strict=True):
        colour = looks[label]["color"]
        axes.annotate(
            label, end, (1.045, height), textcoords="axes fraction", va="center", fontsize=7.5,
            color=colour, fontweight="bold" if looks[label]["linewidth"] > 2 else "normal",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 1,
                        "shrinkB": 4, "relpos": (0, 0.5)},
        )  # fmt: skip


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Rising places moved as little as keeps them `gap` apart: near ones move as one block.

    >>> spread([0.0, 0.5, 0.5], 0.25)
    [0.0, 0.375, 0.625]
    """
    blocks: list[tuple[float, int]] = []  # first place, how many
    for place in places:
        first, count = place, 1
        while blocks and first < blocks[-1][0] + blocks[-1][1] * gap:
            before, members = blocks.pop()
            total = members + count
            # The mean of where each member's block wants to begin.
            first = (before * members + (first - members * gap) * count) / total
            count = total
        blocks.append((first, count))
    return [first + i * gap for first, count in blocks for i in range(count)]


def rule(axes: Axes, value: float, text: str, dashed: bool = False, below: bool = False) -> None:
    """A horizontal line for a limit, named above or below its left end."""
    axes.axhline(value, color=MUTED_COLOUR, linewidth=0.9, linestyle="--" if dashed else "-",
                 zorder=1)  # fmt: skip
    axes.annotate(text, (0.01, value), (0, -3 if below else 2), fontsize=7, color=MUTED_COLOUR,
                  xycoords=axes.get_yaxis_transform(), textcoords="offset points",
                  va="top" if below else "bottom")  # fmt: skip


def legend(figure: Figure, axes: Axes) -> None:
    """All of one panel's names, above the figure."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=7, frameon=False, fontsize=8,
                  handletextpad=0.5, columnspacing=1.4)  # fmt: skip


def name_width(names: Iterable[str]) -> float:
    """Inches that the names of cases take."""
    return 0.3 + 0.065 * max(map(len, names))
