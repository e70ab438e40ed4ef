"""Columns that several suites have: functions of a record."""

from __future__ import annotations

from operator import attrgetter

from bench.records import Record
from bench.registry import Column

OPERATION, TFLOPS = attrgetter("operation"), attrgetter("tflops")


def yes_no(field: str) -> Column:
    """Return a column that says whether a case's field is set."""
    return lambda record: "yes" if record.case[field] else "no"


def scaled(field: str, divisor: float) -> Column:
    """Return a column of a record's number in another unit, such as megabytes."""

    def cell(record: Record) -> float | None:
        value = getattr(record, field)
        return None if value is None else value / divisor

    return cell


def of_median(field: str, factor: float = 1.0) -> Column:
    """Return a column of the median of a record's times, such as microseconds of the host."""

    def cell(record: Record) -> float | None:
        times = getattr(record, field)
        return None if times is None else factor * times.median

    return cell


def of_gpu(field: str) -> Column:
    """Return a column of what was sampled while a record was timed, such as the SMs' clock."""
    return lambda record: (record.gpu or {}).get(field)


SAVED, MEMORY = scaled("held", 1e6), scaled("memory", 1e6)  # megabytes
HOST = of_median("host", 1e3)  # microseconds
MODEL = {
    "model": lambda record: f"{record.case['form']} {record.case['size']}",
    "batch": "batch",
    "context": "context",
    "dtype": "dtype",
}
