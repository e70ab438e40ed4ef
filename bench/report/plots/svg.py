"""Style figures and write them as SVG."""

from __future__ import annotations

import io
import re
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, distinct without red and green.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A7F00", "#555555")
RULE_COLOUR = "#eeeeee"
MUTED_COLOUR = "#6b6b70"
# Variables of page.css, which follow the reader's light or dark mode.
_PAGE_COLOURS = {
    "#000000": "currentColor",
    RULE_COLOUR: "var(--faint)",
    MUTED_COLOUR: "var(--muted)",
    "#ffffff": "var(--paper)",
    **{colour.lower(): f"var(--series-{i})" for i, colour in enumerate(COLOURS, 1)},
}
# What takes most bytes: the font, which is the page's, and rotations by 0.
_SUPERFLUOUS = re.compile(r"""font-family: [^;"]*; | transform="rotate\(-0 [^"]*\"""")


def quiet(axes: Axes, grid: Literal["x", "y", "both"]) -> None:
    axes.grid(axis=grid, color=RULE_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, length=3, width=0.6)
    axes.tick_params(which="minor", length=0)
    if grid == "x":  # rows of names
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)


def legend(figure: Figure) -> None:
    """Name the panels' contents once, above the figure, in columns that fit."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    entry = 0.55 + 0.065 * max(map(len, found), default=0)  # inches, with its handle
    columns = max(1, int(figure.get_figwidth() / entry))
    figure.legend(found.values(), found.keys(), loc="outside upper left", alignment="left",
                  ncols=columns, frameon=False, fontsize=8, handletextpad=0.5, columnspacing=1.4,
                  handlelength=2.6)  # fmt: skip


def to_svg(figure: Figure, standalone: bool = False) -> str:
    """Return the figure as SVG: a standalone one has letters as outlines, another real text."""
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
