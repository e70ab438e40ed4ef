"""What bounds a record: the rate that the device reached in the same run, and the datasheet's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bench.datasheets import datasheet
from bench.records import Record


@dataclass(frozen=True)
class Limit:
    """A rate that no implementation can pass, in units of `unit`.

    Attributes:
        name: what was measured: "bf16 matmul" or "read".
        unit: "TFLOP/s" or "GB/s".
        measured: what the run's own ceiling reached; None where it was not measured.
        datasheet: what the device's datasheet gives; None for a device that we do not know.
    """

    name: str
    unit: str
    measured: float | None
    datasheet: float | None

    def rate(self, record: Record) -> float | None:
        """The record's rate in the limit's unit; None where it has none."""
        if self.unit == "TFLOP/s":
            return record.tflops
        return None if record.bytes_per_second is None else record.bytes_per_second / 1e9

    def known_rate(self, record: Record) -> float:
        """The rate of a record that has one."""
        rate = self.rate(record)
        assert rate is not None, f"{record.label} has no rate on {record.case['name']}"
        return rate

    def share(self, record: Record, of: float | None) -> float | None:
        """The record's rate over a rate, such as `measured`; None where either is not known."""
        rate = self.rate(record)
        return None if rate is None or not of else rate / of


class Limits(NamedTuple):
    """The two limits of attention: multiplying, and for a decode reading the cache."""

    matmul: Limit
    read: Limit

    def of(self, record: Record) -> Limit:
        """What bounds a record's operation."""
        reads = record.operation == "decode" or record.case["name"] in ("read", "copy")
        return self.read if reads else self.matmul


def limits(records: Sequence[Record]) -> Limits:
    """The limits of records that were measured together, from the ceilings among them."""
    ceilings = {r.case["name"]: r for r in records if r.operation == "ceiling" and r.times}
    sheet = datasheet(records[0].device) if records else None
    matmul = Limit("bf16 matmul", "TFLOP/s", None, sheet and sheet.tflops)
    read = Limit("read", "GB/s", None, sheet and sheet.gigabytes_per_second)
    if "matmul" in ceilings:
        matmul = replace(matmul, measured=matmul.rate(ceilings["matmul"]))
    if "read" in ceilings:
        read = replace(read, measured=read.rate(ceilings["read"]))
    return Limits(matmul, read)
