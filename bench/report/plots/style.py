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

# Okabe and Ito's: blue and vermilion are ours, the rest are the peers'.
_OURS = {"torch": COLOURS[0], "jax": COLOURS[5]}
_PEERS = (COLOURS[2], COLOURS[3], COLOURS[1], COLOURS[4], COLOURS[6], COLOURS[7])
_DASHES = {"sm80": (0, (4, 1.5))}


def styles(records: Sequence[Record]) -> dict[str, Style]:
    """By label, the same in every picture of these records.

    Ours are bold: a colour for each framework, dashed where it is SM80 code, with a marker for each
    implementation. Peers are thin, and dotted from the seventh on.
    """
    ours: dict[str, Style] = {}
    firsts = {r.label: r for r in records if not r.is_peer}
    kinds = sorted({r.implementation for r in firsts.values()})
    for label, record in firsts.items():
        framework = record.implementation.split()[0]
        variants = [kind for kind in kinds if kind.split()[0] == framework]
        ours[label] = {
            "color": _OURS[framework],
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


def rule(axes: Axes, value: float, text: str, dashed: bool = False, below: bool = False) -> None:
    """A horizontal line for a limit, named above or below its left end."""
    axes.axhline(value, color=MUTED_COLOUR, linewidth=0.9, linestyle="--" if dashed else "-",
                 zorder=1)  # fmt: skip
    axes.annotate(text, (0.01, value), (0, -3 if below else 2), fontsize=7, color=MUTED_COLOUR,
                  xycoords=axes.get_yaxis_transform(), textcoords="offset points",
                  va="top" if below else "bottom")  # fmt: skip


def legend(figure: Figure, columns: int = 7) -> None:
    """Name what all panels show, once, above the figure."""
    found = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    figure.legend(found.values(), found.keys(), loc="outside upper left", alignment="left",
                  ncols=columns, frameon=False, fontsize=8, handletextpad=0.5, columnspacing=1.4,
                  handlelength=2.6)  # fmt: skip


def name_width(names: Iterable[str]) -> float:
    """Inches that the names of cases take."""
    return 0.3 + 0.065 * max(map(len, names))
