"""Time and memory of attention that keeps all scores: the table of seeds 001 and 004."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from bench import ours
from bench.job import Job, Subject
from bench.peers import FLASH
from bench.records import Record
from bench.suites import Cells
from bench.suites.flash_job import flash_job
from interop.parity.cases import FlashCase

TITLE = "Eager attention"
NOTE = (
    "One call is attention of 8 sequences of one head, without a mask, in float32; eager is the "
    "formula in torch operations, with the torch twin beside it. Held before is what a backward "
    "finds in memory, its forward's output and what that saved; memory is what a call adds to "
    "that at its peak. What needs more memory than there is, or than --memory-cap leaves, is a "
    "row without a time. Mended of the seeds' method: times are the device's own, the median of "
    "calls in several rounds after a warm-up (there a mean by the host's clock, which for short "
    "lengths is the time to launch); backward is timed by itself, on a graph that is made "
    "beforehand; memory is what a call allocates, not what the process has; and results are held "
    "to a float64 oracle before they are timed."
)

BATCH = 8
HEAD_DIMS = (16, 32, 64, 128)
LENGTHS = (256, 1024, 4096, 8192, 16384)


def jobs(targets: Sequence[str], pattern: str = "") -> list[Job]:
    """Forward and backward of every case whose name contains `pattern`.

    Args:
        targets: what our kernels are compiled for; only the first, the device's own, is timed.
    """
    triton = Subject("Triton", targets[0])
    twins = ours.flash_makers(targets[:1], compiling=False)
    makers = {Subject("eager"): FLASH["eager"], triton: twins[triton]}
    return [
        flash_job(case, operation, makers)
        for case in cases()
        if pattern in case.name
        for operation in ("forward", "backward")
    ]


def cases() -> list[FlashCase]:
    """Every head size and length."""
    return [
        FlashCase(f"d{head_dim}-{length}", BATCH, length, length, 1, 1, head_dim, dtype="float32")
        for head_dim, length in product(HEAD_DIMS, LENGTHS)
    ]


def columns(record: Record) -> Cells:
    """The seeds' columns."""
    case = record.case
    return {
        "d": case["head_dim"],
        "length": case["seq_q"],
        "held before, MB": None if record.held is None else record.held / 1e6,
        "memory, MB": None if record.memory is None else record.memory / 1e6,
    }
