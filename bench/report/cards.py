"""Compare cards: the facts and a table of each, with the same columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bench.peaks import Peak, peaks
from bench.records import Record
from bench.report.sections import facts
from bench.report.tables import best_peer, by_case, by_operation, groups, number, ratio, runs
from twin_attention.interop.parity.cases import DecodeCase
from twin_attention.interop.rendering.tables import Grid
from twin_attention.targets import paged

CAPTION = (
    "TFLOP/s, of a decode GB/s, of what each framework runs by default. Of the fastest peer: its "
    "time over ours, so that above 1 we are faster."
)
_TITLES = ["case", "pass", "torch", "jax", "FA2", "cuDNN", "fastest peer", "/ torch", "/ jax"]
_SHOWN = ("GPU", "card", "clocks", "power", "versions", "commit", "date")
# The order in which a framework chooses its families.
_FAMILIES = {"torch": ("torch gluon", "torch triton"), "jax": ("jax mosaic", "jax triton")}
_PEERS = {
    "FA2": ("FA2", "FA2 varlen", "FA2 dense"),
    "cuDNN": ("cuDNN", "cuDNN padded", "cuDNN dense"),
}
_TARGETS = ("sm90", "sm80")  # that of the device first


class Card(NamedTuple):
    title: str
    facts: dict[str, str]
    grid: Grid


def cards(records: Iterable[Record]) -> list[Card]:
    return [_card(run) for run in runs(records)]


def are_several(records: Iterable[Record]) -> bool:
    return len({(record.device, str(record.card)) for record in records}) > 1


def title(run: Sequence[Record]) -> str:
    return run[0].device.partition(" (")[0]


def _card(run: Sequence[Record]) -> Card:
    known = facts(run)
    shown = {name: known[name] for name in _SHOWN if name in known}
    if checked := [r for r in run if not r.is_peer and r.error is not None]:
        right = sum(record.status == "ok" for record in checked)
        most = max(record.error or 0.0 for record in checked)
        shown["parity"] = (
            f"{right} of {len(checked)} results right, the largest error {most:.2f} of its budget"
        )
    return Card(title(run), shown, _grid(run))


def _grid(run: Sequence[Record]) -> Grid:
    rows = []
    of_device = (record for record in run if record.suite != "host")
    for suite in groups(of_device, lambda record: record.suite).values():
        bounds = peaks(suite)
        for operation, group in by_operation(suite).items():
            peak = bounds.of(group[0])
            for case, row in by_case(group).items():
                if any(ours := [_ours(row, name, operation) for name in _FAMILIES]):
                    rows.append([case, operation, *_cells(row, ours, peak)])
    return [_TITLES, *rows]


def _cells(row: dict[str, Record], ours: Sequence[Record | None], peak: Peak) -> Iterator[str]:
    for record in (*ours, *(_first(row, labels) for labels in _PEERS.values())):
        if record is None or record.times is None:
            yield "" if record is None else record.status
        else:
            yield number(peak.known_rate(record))
    fastest = best_peer(row)
    yield fastest or ""
    for record in ours:
        gain = ratio(row, record.label, fastest) if record and fastest else None
        yield "" if gain is None else f"{gain:.2f}"


def _ours(row: dict[str, Record], framework: str, operation: str) -> Record | None:
    labels = [f"{name} {target}" for target in _TARGETS for name in _FAMILIES[framework]]
    return _first(row, [x for x in labels if not (x in row and _is_slower(row[x], operation))])


def _is_slower(record: Record, operation: str) -> bool:
    """Return True for paged kernels that a framework's default prefers others to."""
    if operation != "decode" or record.implementation != "jax mosaic":
        return False
    spec = DecodeCase(**record.case).spec
    return paged.slower("paged_decode", spec, record.target) is not None


def _first(row: dict[str, Record], labels: Sequence[str]) -> Record | None:
    found = [row[label] for label in labels if label in row]
    return next((record for record in found if record.status != "absent"), None)
