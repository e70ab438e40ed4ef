"""Draw the roofline: rate over arithmetic intensity, under two roofs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.peaks import Peaks
from bench.records import Record
from bench.report.plots.style import Style
from bench.report.tables import labels
from twin_attention.interop.rendering.plots import MUTED_COLOUR, legend, quiet

_PEERS = {"color": MUTED_COLOUR, "marker": ".", "markersize": 3.5, "alpha": 0.45}


def roofline(records: Sequence[Record], peaks: Peaks, looks: dict[str, Style]) -> Figure:
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log")
    peers = [record for record in records if record.is_peer]
    axes.plot(*_points(peers), label="peers", linestyle="", **_PEERS)
    for label in labels(records, peers=False):
        own = [record for record in records if record.label == label]
        look = looks[label] | {"linestyle": "", "markersize": 4.5, "markeredgewidth": 0.9}
        axes.plot(*_points(own), label=label, alpha=0.8, **look)
    intensities, rates = _points(records)
    left, right = min(intensities) / 2, max(intensities) * 2
    texts = []
    for name, dash in (("measured", "-"), ("datasheet", "--")):
        tflops, bandwidth = getattr(peaks.matmul, name), getattr(peaks.read, name)
        if tflops and bandwidth:
            _roof(axes, (left, right), tflops, bandwidth, dash)
            line = "solid" if dash == "-" else "dashed"
            texts.append(f"{line}: {name}, {tflops:.0f} TFLOP/s and {bandwidth / 1e3:.2f} TB/s")
    axes.set_title("; ".join(texts), fontsize=8, loc="right", color=MUTED_COLOUR)
    axes.set_xlim(left, right)
    axes.set_ylim(min(rates) / 2)
    axes.set_xlabel("floating-point operations per byte of least traffic", fontsize=8)
    axes.set_ylabel("TFLOP/s", fontsize=8)
    quiet(axes, "both")
    legend(figure)
    return figure


def _points(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    intensities, rates = [], []
    for record in records:
        assert record.tflops is not None
        assert record.bytes_per_second is not None
        intensities.append(1e12 * record.tflops / record.bytes_per_second)
        rates.append(record.tflops)
    return intensities, rates


def _roof(
    axes: Axes, ends: tuple[float, float], tflops: float, gigabytes: float, dash: str
) -> None:
    ridge = 1e3 * tflops / gigabytes
    x = np.array(sorted({ends[0], min(max(ridge, ends[0]), ends[1]), ends[1]}))
    y = np.minimum(tflops, x * gigabytes / 1e3)
    axes.plot(x, y, color=MUTED_COLOUR, linewidth=1.2, linestyle=dash, zorder=1)
