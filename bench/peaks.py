"""Relate rates to the device's peaks, measured in the same run, and to its datasheet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.job import Call, Entry, Job
from bench.records import Record

_SIZE = 8192  # of the matrices
_BYTES = 2**30  # of what is read or copied: many times any L2


class Datasheet(NamedTuple):
    """Peak dense rates of a device, as NVIDIA gives them."""

    tflops: float
    gigabytes_per_second: float


# By a part of CUDA's device name; the first that fits counts. From the datasheets of NVIDIA A30
# (2021), A100 (2020), H100 (2023) and H200 (2024).
DATASHEETS = {
    "H200 NVL": Datasheet(835, 4800),
    "H200": Datasheet(989, 4800),
    "H100 PCIe": Datasheet(756, 2039),
    "H100 80GB HBM3": Datasheet(989, 3350),
    "A100 80GB PCIe": Datasheet(312, 1935),
    "A100-SXM4-80GB": Datasheet(312, 2039),
    "A100-SXM4-40GB": Datasheet(312, 1555),
    "A100-PCIE-40GB": Datasheet(312, 1555),
    "A30": Datasheet(165, 933),
}


def datasheet(device: str) -> Datasheet | None:
    """Return the datasheet of a device by its name, None if unknown.

    >>> datasheet("NVIDIA A30 (compute capability 8.0)")
    Datasheet(tflops=165, gigabytes_per_second=933)
    """
    return next((sheet for name, sheet in DATASHEETS.items() if name in device), None)


def peak_jobs() -> list[Job]:
    """Return a bfloat16 matrix product, a read (a sum) and a copy, each by torch."""
    square = 2 * _SIZE * _SIZE  # bytes of a matrix
    return [
        _job("matmul", 2 * _SIZE**3, 2 * square, square, _matmul),
        _job("read", 0, _BYTES, 0, _read),
        _job("copy", 0, _BYTES, _BYTES, _copy),
    ]


def _job(name: str, flops: int, reads: int, writes: int, factory: Callable[[None], Call]) -> Job:
    factories = {Entry("torch"): factory}
    return Job({"name": name}, "peak", flops, reads + writes, lambda: None, factories, None,
               reads, writes)  # fmt: skip


def _matmul(_: None) -> Call:
    import torch

    a, b = torch.randn(2, _SIZE, _SIZE, device="cuda").bfloat16()
    return Call(lambda: a @ b, None)


def _read(_: None) -> Call:
    import torch

    x = torch.ones(_BYTES // 4, device="cuda")
    return Call(x.sum, None)


def _copy(_: None) -> Call:
    import torch

    source, target = torch.zeros(2, _BYTES, dtype=torch.int8, device="cuda")
    return Call(lambda: target.copy_(source), None)


@dataclass(frozen=True)
class Peak:
    """A peak rate of the device; `measured` by torch in the same run is no bound."""

    name: str
    unit: str
    measured: float | None
    datasheet: float | None

    def rate(self, record: Record) -> float | None:
        if self.unit == "TFLOP/s":
            return record.tflops
        return None if record.bytes_per_second is None else record.bytes_per_second / 1e9

    def known_rate(self, record: Record) -> float:
        rate = self.rate(record)
        assert rate is not None, f"{record.label} has no rate on {record.case['name']}"
        return rate

    def share(self, record: Record, of: float | None) -> float | None:
        """Return the record's rate over `of`, such as `measured`; None if either is unknown."""
        rate = self.rate(record)
        return None if rate is None or not of else rate / of


class Peaks(NamedTuple):
    matmul: Peak
    read: Peak

    def of(self, record: Record) -> Peak:
        reads = record.operation == "decode" or record.case["name"] in ("read", "copy")
        return self.read if reads else self.matmul


def peaks(records: Sequence[Record]) -> Peaks:
    found = {r.case["name"]: r for r in records if r.operation == "peak" and r.times}
    matmul, read = found.get("matmul"), found.get("read")
    sheet = datasheet(records[0].device) if records else None
    bandwidth = read and read.bytes_per_second
    return Peaks(
        Peak("bf16 matmul", "TFLOP/s", matmul and matmul.tflops, sheet and sheet.tflops),
        Peak("read", "GB/s", bandwidth and bandwidth / 1e9, sheet and sheet.gigabytes_per_second),
    )
