"""Sample clocks, power and temperature of the GPU from NVML while something runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from threading import Event, Thread
from typing import Any, NamedTuple

# Bits of NVML's throttle reasons that slow a busy GPU.
THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


class Sample(NamedTuple):
    """The state of the GPU at one time: seconds since the epoch, and bits of throttle reasons."""

    time: float
    sm_mhz: float
    memory_mhz: float
    watts: float
    celsius: float
    throttle: int


class Sampler:
    """Sample in a thread while entered; entering again adds samples.

    >>> with Sampler(lambda: Sample(0.0, 1980.0, 3201.0, 500.0, 60.0, 0x04)) as sampler:
    ...     pass
    >>> sampler.summary()["throttle"]
    ['power cap']
    """

    def __init__(self, read: Callable[[], Sample] | None, interval: float = 0.05) -> None:
        """`read` takes a sample; None if there is nothing to read. `interval` is in seconds."""
        self.samples: list[Sample] = []
        self._read = read
        self._interval = interval
        self._stop = Event()
        self._thread: Thread | None = None

    def __enter__(self) -> Sampler:
        if self._read is not None:
            self._stop.clear()
            self._thread = Thread(target=self._run, args=(self._read,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _run(self, read: Callable[[], Sample]) -> None:
        while True:
            self.samples.append(read())
            if self._stop.wait(self._interval):
                return

    def summary(self) -> dict[str, Any] | None:
        if not self.samples:
            return None
        _, sm, memory, watts, celsius, throttle = zip(*self.samples, strict=True)
        return {
            "sm_mhz": median(sm),
            "sm_mhz_lowest": min(sm),
            "memory_mhz": median(memory),
            "watts": median(watts),
            "watts_highest": max(watts),
            "celsius": max(celsius),
            "throttle": [
                reason for bit, reason in THROTTLE_REASONS.items() if any(t & bit for t in throttle)
            ],
        }


def open_nvml() -> tuple[Any, Any] | None:
    """Return NVML and torch's current GPU in it; None without nvidia-ml-py or NVML."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    import torch

    try:
        nvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return None


def nvml_reader() -> Callable[[], Sample] | None:
    opened = open_nvml()
    if opened is None:
        return None
    nvml, gpu = opened
    try:

        def read() -> Sample:
            return Sample(
                time.time(),
                nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
                nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
                nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
                nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
                nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
            )

        read()
    except nvml.NVMLError:
        return None
    return read


def card() -> dict[str, Any]:
    """Return size, limits and driver of torch's current GPU, memory in GiB; None if unknown."""
    import torch

    has: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    found: dict[str, Any] = {
        "multiprocessors": has.multi_processor_count,
        "memory_gib": round(has.total_memory / 2**30, 1),
        "shared_memory": has.shared_memory_per_block_optin,
    } | dict.fromkeys(("watts", "sm_mhz", "memory_mhz", "driver"))
    opened = open_nvml()
    if opened is None:
        return found
    nvml, gpu = opened
    reads: dict[str, Callable[[], Any]] = {
        "watts": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
        "sm_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM),
        "driver": nvml.nvmlSystemGetDriverVersion,
    }
    for name, read in reads.items():
        with suppress(nvml.NVMLError):  # some cards do not tell
            found[name] = read()
    return found
