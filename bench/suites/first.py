"""First calls in a new process: what a user waits for before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from bench.first import FirstCallJob
from bench.job import Entry
from bench.ours import CHOSEN_NAMES
from bench.suites.columns import OPERATION, of_median
from twin_attention.interop.parity.cases import FlashCase

# 16384 tokens of 2048 channels.
CASES = (
    FlashCase("4x4096x32x64", 4, 4096, 4096, 32, 32, 64),
    FlashCase("4x4096x16x128-causal", 4, 4096, 4096, 16, 16, 128, causal=True),
)
COLUMNS = {"case": "name", "step": OPERATION, "s": of_median("times", 1e-3)}


def jobs(targets: Sequence[str]) -> list[FirstCallJob]:
    keys = product(CASES, CHOSEN_NAMES)
    return [FirstCallJob(case, Entry(name, targets[0])) for case, name in keys]
