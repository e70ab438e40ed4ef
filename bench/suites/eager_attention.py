"""Time and memory of attention that keeps all scores."""

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
    "One call is attention of 8 sequences of one head, without a mask, in float32. Eager is the "
    "formula in torch operations; the torch twin stands beside it. Saved is what a backward finds "
    "in memory: its forward's output and what that saved. Memory is what a call allocates beyond "
    "that at its peak. What needs more memory than there is, or than --memory-cap leaves, is a "
    "row without a time. Backward is timed by itself, on a graph that is made beforehand."
)

BATCH = 8
HEAD_DIMS = (16, 32, 64, 128)
LENGTHS = (256, 1024, 4096, 8192, 16384)


def jobs(targets: Sequence[str], pattern: str = "") -> list[Job]:
    """Forward and backward of every case whose name contains `pattern`.

    Args:
        targets: what our kernels are compiled for; only the first, the device's own, is timed.
    """
    triton = Subject("torch triton", targets[0])
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
    """Return the shape and the memory."""
    case = record.case
    return {
        "d": case["head_dim"],
        "length": case["seq_q"],
        "saved, MB": None if record.held is None else record.held / 1e6,
        "memory, MB": None if record.memory is None else record.memory / 1e6,
    }
