"""Make tables of attention by patterns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.records import Record
from bench.report.tables import by_case, by_operation, groups, number, ratio
from bench.report.training import status
from bench.suites import Cells
from interop.rendering.tables import Grid

GAINS = "Speed-ups by patterns: the others' time over this"
DOUBLINGS = "The time of twice the tokens over this one"
NAMES = {"forward": "Forward", "both": "Forward and backward"}
_OWN = ("dense", "standard")  # of the same framework
_APART = (*_OWN, "module")  # whose speed-ups are not shown


def rows(records: Sequence[Record], columns: Callable[[Record], Cells]) -> dict[str, Grid]:
    """Return a row for each implementation that was tried, a table for each operation."""
    found = {}
    for operation, group in by_operation(r for r in records if r.status != "absent").items():
        cells = [{"implementation": record.label} | columns(record) for record in group]
        found[NAMES[operation]] = [
            [*cells[0]],
            *([_text(x) for x in row.values()] for row in cells),
        ]
    return found


def gains(records: Sequence[Record]) -> dict[str, Grid]:
    """Return how much faster our attention by a pattern is than each other implementation."""
    ours = [r for r in records if r.times and not r.is_peer and _kind(r) not in _APART]
    peers = list(dict.fromkeys(r.label for r in records if r.is_peer))
    grid = [["case", "pass", "implementation", *(f"{x} / this" for x in (*_OWN, *peers))]]
    rows_of = {operation: by_case(group) for operation, group in by_operation(records).items()}
    for record in ours:
        row = rows_of[record.operation][record.case["name"]]
        own = {_kind(r): r.label for r in row.values() if _framework(r) == _framework(record)}
        others = [own.get(kind) for kind in _OWN] + peers
        cells = [_gain(row, record.label, other) for other in others]
        name = NAMES[record.operation].lower()
        grid.append([record.case["name"], name, record.label, *cells])
    return {GAINS: grid}


def doublings(records: Sequence[Record]) -> dict[str, Grid]:
    """Return how the time of one sequence grows with its length."""
    grid = [["pattern", "pass", "implementation", "tokens", "twice / this"]]
    single = (r for r in records if r.times and r.case["batch"] == 1 and not r.is_yardstick)
    series = groups(single, lambda r: (r.case["name"].partition("-")[0], r.operation, r.label))
    for (pattern, operation, label), group in series.items():
        times = {(r.case["dtype"], r.case["seq_q"]): r.times.median for r in group if r.times}
        for (dtype, length), own in sorted(times.items()):
            if twice := times.get((dtype, 2 * length)):
                cells = [
                    pattern,
                    NAMES[operation].lower(),
                    label,
                    str(length),
                    f"{twice / own:.2f}",
                ]
                grid.append(cells)
    return {DOUBLINGS: grid}


def _gain(row: dict[str, Record], label: str, other: str | None) -> str:
    if other is None or other not in row or row[other].status == "absent":
        return ""
    found = ratio(row, label, other)
    return status(row[other]) if found is None else f"{found:.2f}"


def _framework(record: Record) -> str:
    return record.implementation.split()[0]


def _kind(record: Record) -> str:
    return record.implementation.split(" ", 1)[1]


def _text(value: str | float | None) -> str:
    if value is None:
        return ""
    return number(value) if isinstance(value, float) else str(value)
