"""Choose a colour, a dash and a marker for each implementation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bench.records import Record
from bench.report.tables import labels
from interop.rendering.plots import COLOURS

Style = dict[str, Any]

_OURS = {"torch": COLOURS[0], "jax": COLOURS[5]}
_PEERS = (COLOURS[2], COLOURS[3], COLOURS[1], COLOURS[4], COLOURS[6], COLOURS[7])


def styles(records: Sequence[Record]) -> dict[str, Style]:
    """Return a style by label, the same in every picture of these records.

    Ours are bold: a colour for each framework, dashed where it is SM80 code, with a marker for each
    implementation. Peers are thin, and dotted from the seventh on.
    """
    ours: dict[str, Style] = {}
    firsts = {r.label: r for r in records if not r.is_peer}
    implementations = sorted({r.implementation for r in firsts.values()})
    for label, record in firsts.items():
        framework = record.implementation.split()[0]
        family = [name for name in implementations if name.split()[0] == framework]
        is_sm80 = record.target == "sm80"
        ours[label] = {
            "color": _OURS[framework],
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
    """Return the inches that names of cases take."""
    return 0.3 + 0.065 * max(map(len, names))
