"""What the vendor says of a device: the one place for such figures.

Sources: the datasheets of NVIDIA A30 (2021), A100 (2020), H100 (2023) and H200 (2024). Rates are
dense, without sparsity. The clock is the boost clock; that of the Hopper cards follows from their
rate and their tensor cores' 2048 multiply-adds a cycle.
"""

from __future__ import annotations

from typing import NamedTuple


class Datasheet(NamedTuple):
    """Peak rates of a device.

    Attributes:
        tflops: 10^12 bfloat16 or float16 tensor core operations a second.
        gigabytes_per_second: of device memory.
        gigahertz: clock of the multiprocessors.
    """

    tflops: float
    gigabytes_per_second: float
    gigahertz: float


A100 = Datasheet(312, 2039, 1.41)  # 80 GB, SXM
H200 = Datasheet(989, 4800, 1.83)  # SXM
# By a part of the device's name as CUDA gives it; the first that fits counts.
DATASHEETS = {
    "H200 NVL": Datasheet(835, 4800, 1.54),
    "H200": H200,
    "H100 PCIe": Datasheet(756, 2039, 1.62),
    "H100 80GB HBM3": Datasheet(989, 3350, 1.83),
    "A100 80GB PCIe": Datasheet(312, 1935, 1.41),
    "A100-SXM4-80GB": A100,
    "A100-SXM4-40GB": Datasheet(312, 1555, 1.41),
    "A100-PCIE-40GB": Datasheet(312, 1555, 1.41),
    "A30": Datasheet(165, 933, 1.44),
}


def datasheet(device: str) -> Datasheet | None:
    """The datasheet of a device by its name; None where it is not known.

    >>> datasheet("NVIDIA A30 (compute capability 8.0)")
    Datasheet(tflops=165, gigabytes_per_second=933, gigahertz=1.44)
    """
    return next((sheet for name, sheet in DATASHEETS.items() if name in device), None)
