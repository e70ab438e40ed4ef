"""Draw ratios to the peers: a panel for each of our implementations, a row for each case."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure

from bench.records import Record
from bench.report.plots.style import name_width, panels
from bench.report.tables import by_case, labels, names, ratio

_CELL = 0.44, 0.24  # inches
_WIDTH = 13
_COLOURS = LinearSegmentedColormap.from_list("", colormaps["RdBu"](np.linspace(0.12, 0.88, 255)))
_DARK, _LIGHT = "#010101", "#fefefe"
_MIDDLE = 0.179  # the luminance on which both have the same contrast


def ratios(records: Sequence[Record]) -> Figure:
    records = [record for record in records if not record.is_yardstick]
    peers = labels(records, peers=True)
    cases = {
        name: row
        for name, row in by_case(records).items()
        if any(record.is_peer for record in row.values())
    }
    # A variant that is timed on few cases would be an empty panel.
    ours = [
        label
        for label in labels(records, peers=False)
        if 3 * sum(label in row for row in cases.values()) >= len(cases)
    ]
    _, apart = names(r for r in records if r.case["name"] in cases)
    rows_of = [apart[name] for name in cases]
    panel = max(_CELL[0] * len(peers), 0.085 * max(map(len, ours))) + 0.2
    columns = max(1, min(len(ours), int((_WIDTH - name_width(rows_of)) / panel)))
    rows = -(-len(ours) // columns)
    size = (name_width(rows_of) + panel * columns, (_CELL[1] * len(rows_of) + 1.2) * rows)
    figure = Figure(figsize=size, layout="constrained")
    for axes, label in zip(panels(figure, len(ours), columns, sharey=True), ours, strict=True):
        found = [[ratio(row, label, peer) for peer in peers] for row in cases.values()]
        heat_map(axes, np.array(found, float))
        axes.set_title(label, fontsize=9.5, loc="left")
        axes.set_yticks(np.arange(len(rows_of)) + 0.5, rows_of)
        axes.set_xticks(np.arange(len(peers)) + 0.5, peers, rotation=40, ha="right",
                        rotation_mode="anchor")  # fmt: skip
        axes.tick_params(length=0, labelsize=8)
    return figure


def heat_map(axes: Axes, values: np.ndarray) -> None:
    norm, cells = LogNorm(0.4, 2.5), np.ma.masked_invalid(values)
    axes.pcolormesh(cells, norm=norm, cmap=_COLOURS, edgecolors="face", linewidth=0.3)
    lights = _luminances(_COLOURS(norm(cells)))
    for (y, x), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = _DARK if lights[y, x] > _MIDDLE else _LIGHT
            text = axes.text(x + 0.5, y + 0.5, _digits(value), ha="center", va="center",
                             fontsize=7.5, color=colour)  # fmt: skip
            text.set_in_layout(False)  # it is inside its cell; measuring all of them takes long
    axes.set_ylim(len(values), 0)
    axes.spines[:].set_visible(False)


def _luminances(colours: np.ndarray) -> np.ndarray:
    """Return the relative luminance of each colour (WCAG 2.2)."""
    channels = colours[..., :3]
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.95 else f"{value:.0f}"
