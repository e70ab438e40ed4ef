"""Tables of records: in the terminal, in markdown, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.table import Table

from bench.records import Record
from interop.parity.records import problem_text

Grid = list[list[str]]  # a table's cells, titles first


def runs(records: Iterable[Record]) -> list[list[Record]]:
    """Records that may be compared, together; of the same measurement the last one counts."""
    latest = {record.key: record for record in records}
    groups: dict[str, list[Record]] = {}
    for record in latest.values():
        groups.setdefault(record.run, []).append(record)
    return list(groups.values())


def by_operation(run: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each operation, operations in the order in which they first appear."""
    groups: dict[str, list[Record]] = {}
    for record in run:
        groups.setdefault(record.operation, []).append(record)
    return groups


def by_case(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """For each case's name, the records of one operation by label."""
    rows: dict[str, dict[str, Record]] = {}
    for record in records:
        rows.setdefault(record.case["name"], {})[record.label] = record
    return rows


def labels(records: Iterable[Record], peers: bool | None = None) -> list[str]:
    """Labels in the order in which they first appear: all, the peers', or our own."""
    chosen = (r for r in records if peers is None or r.is_peer == peers)
    return list(dict.fromkeys(record.label for record in chosen))


def ratio(row: dict[str, Record], label: str, peer: str) -> float | None:
    """A peer's time over ours, more than 1 where ours is faster; None where either is missing."""
    pair = [row[name].times for name in (label, peer) if name in row]
    if len(pair) < 2 or pair[0] is None or pair[1] is None:
        return None
    return pair[1].median / pair[0].median


def number(value: float) -> str:
    """Three digits, or all those before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def throughput(records: Sequence[Record]) -> Grid:
    """TFLOP/s of one operation: cases down, implementations across."""
    return _pivot(records, lambda r: number(r.tflops) if r.tflops is not None else r.status)


def milliseconds(records: Sequence[Record]) -> Grid:
    """Times of one operation and, in brackets, how far the rounds lie apart."""
    return _pivot(
        records,
        lambda r: f"{number(r.times.median)} ({r.times.spread:.1%})" if r.times else r.status,
    )


def speeds(run: Sequence[Record]) -> Grid:
    """Peer's time over ours, least to most over the cases; a column for each peer."""
    peers = labels(run, peers=True)
    rows = [["operation", "implementation", *peers]]
    for operation, records in by_operation(run).items():
        cases = by_case(records).values()
        for label in labels(records, peers=False):
            cells = []
            for peer in peers:
                found = [r for row in cases if (r := ratio(row, label, peer)) is not None]
                cells.append(f"{min(found):.2f} to {max(found):.2f}" if found else "")
            rows.append([operation, label, *cells])
    return rows


def unmeasured(run: Sequence[Record]) -> Grid:
    """What has no time, and why."""
    rows = [
        [r.case["name"], r.operation, r.label, r.status, r.message or ""]
        for r in run
        if r.times is None
    ]
    return [["case", "operation", "implementation", "status", "message"], *rows]


def terminal_table(records: Sequence[Record]) -> Table:
    """A row for each record, with its ratio to every peer."""
    peers = labels(records, peers=True)
    table = Table("case", "operation", "implementation")
    for title in ("ms", "spread", "TFLOP/s", *(f"of {peer}" for peer in peers)):
        table.add_column(title, justify="right")
    for (name, operation), group in groupby(records, lambda r: (r.case["name"], r.operation)):
        row = {record.label: record for record in group}
        for label, record in row.items():
            cells = [record.status]
            if record.times is not None:
                cells = [f"{record.times.median:.3f}", f"{record.times.spread:.1%}"]
                cells.append("" if record.tflops is None else number(record.tflops))
                ratios = [ratio(row, label, peer) for peer in peers]
                cells += ["" if value is None else f"{value:.2f}" for value in ratios]
            style = "" if record.status == "ok" else "red"
            table.add_row(name, operation, label, *cells, style=style)
        table.add_section()
    return table


def numeric(grid: Grid) -> list[bool]:
    """For each column, whether it holds numbers."""
    return [any(cell[:1].isdigit() for cell in column[1:]) for column in zip(*grid, strict=True)]


def markdown_table(grid: Grid) -> str:
    """The cells as a markdown table."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in grid]
    lines.insert(1, ["---:" if number else "---" for number in numeric(grid)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def to_csv(records: Iterable[Record]) -> str:
    """A row for each record, a column for each field, the case's own fields among them."""
    rows = [
        {f"case_{name}": value for name, value in record.case.items()}
        | {"operation": record.operation, "implementation": record.implementation}
        | {"target": record.target, "status": record.status, "message": record.message}
        | {f"{name}_ms": getattr(record.times, name, None) for name in _MILLISECONDS}
        | {"tflops": record.tflops, "bytes_per_second": record.bytes_per_second}
        | {"kernels": len(record.kernels), "device": record.device}
        | {f"clock_{name}": value for name, value in (record.clocks or {}).items()}
        | record.versions
        | {"commit": record.commit, "date": record.date}
        for record in records
    ]
    buffer = io.StringIO()
    fields = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(buffer, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


_MILLISECONDS = ("median", "fastest", "slowest", "p20", "p80")


def _pivot(records: Sequence[Record], cell) -> Grid:
    titles = labels(records)
    rows = [["case", *titles]]
    for row in by_case(records).values():
        case = next(iter(row.values())).case
        rows.append([problem_text(case), *(cell(row[t]) if t in row else "" for t in titles)])
    return rows
