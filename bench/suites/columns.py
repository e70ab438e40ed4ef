from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from bench.records import Record
from bench.registry import Column, cells
from bench.report.tables import by_case, by_operation, status, to_grid
from twin_attention.interop.rendering.tables import Grid

OPERATION, TFLOPS = attrgetter("operation"), attrgetter("tflops")


def yes_no(field: str) -> Column:
    return lambda record: "yes" if record.case[field] else "no"


def scaled(field: str, divisor: float) -> Column:
    def cell(record: Record) -> float | None:
        value = getattr(record, field)
        return None if value is None else value / divisor

    return cell


def of_median(field: str, factor: float = 1.0) -> Column:
    def cell(record: Record) -> float | None:
        times = getattr(record, field)
        return None if times is None else factor * times.median

    return cell


def of_gpu(field: str) -> Column:
    return lambda record: (record.gpu or {}).get(field)


SAVED, MEMORY = scaled("held", 1e6), scaled("memory", 1e6)  # megabytes
HOST = of_median("host", 1e3)  # microseconds
MODEL = {
    "model": lambda record: f"{record.case['form']} {record.case['size']}",
    "batch": "batch",
    "context": "context",
    "dtype": "dtype",
}


PASSES = {"forward": "Forward", "both": "Forward and backward"}


def tables_by_pass(records: Sequence[Record], columns: Mapping[str, Column]) -> dict[str, Grid]:
    return {
        PASSES[operation]: to_grid([{"implementation": r.label} | cells(columns, r) for r in group])
        for operation, group in by_operation(r for r in records if r.status != "absent").items()
    }


def every_implementation(records: Sequence[Record], columns: Mapping[str, Column]) -> Grid:
    return to_grid(
        [
            {"case": r.case["name"], "implementation": r.label}
            | cells(columns, r)
            | {"status": status(r)}
            for r in records
            if r.status != "absent"
        ]
    )


def own_times(
    records: Sequence[Record],
) -> Iterator[tuple[str, dict[str, dict[str, Record]], str, Record]]:
    """Yield operation, all its cases as `by_case` has them, a case's name, and our timed record."""
    for operation, group in by_operation(records).items():
        cases = by_case(group)
        for name, row in cases.items():
            for record in row.values():
                if record.times and not record.is_peer:
                    yield operation, cases, name, record
