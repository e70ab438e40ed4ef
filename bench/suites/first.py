"""First calls in a new process: what a user waits for before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from bench.first import FirstCallJob
from bench.job import Entry
from bench.ours import CHOSEN_NAMES
from bench.records import Record
from bench.report.tables import by_case, by_operation, labels
from bench.suites.columns import OPERATION, of_median
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.rendering.tables import Grid

# 16384 tokens of 2048 channels.
CASES = (
    FlashCase("4x4096x32x64", 4, 4096, 4096, 32, 32, 64),
    FlashCase("4x4096x16x128-causal", 4, 4096, 4096, 16, 16, 128, causal=True),
)
COLUMNS = {"case": "name", "step": OPERATION, "s": of_median("times", 1e-3)}


def jobs(targets: Sequence[str]) -> list[FirstCallJob]:
    keys = product(CASES, CHOSEN_NAMES)
    return [FirstCallJob(case, Entry(name, targets[0])) for case, name in keys]


def tables(records: Sequence[Record]) -> dict[str, Grid]:
    names = labels(records, peers=False)
    grid: Grid = [["case", "step", *names]]
    for step, group in by_operation(records).items():
        for case, row in by_case(group).items():
            times = (row[x].times if x in row else None for x in names)
            grid.append([case, step, *(f"{x.median / 1e3:.2f}" if x else "" for x in times)])
    return {"Seconds": grid}
