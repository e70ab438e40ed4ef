"""A few small cases of parity: whether the results are right on this card."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product

from bench.job import Entry
from bench.ours import FAMILY_NAMES, has_kernels
from bench.parity import ParityJob
from bench.records import Record
from bench.report.tables import to_grid
from twin_attention.interop.parity.records import problem_text
from twin_attention.interop.parity.suites.kinds import KINDS
from twin_attention.interop.rendering.tables import Grid

# Each operation, all options, 32 and 8 bits, and the largest tiles.
CASES = (
    "all-options", "full-bf16-d256-causal", "mqa-d128", "varlen-all-options",
    "decode-all-options", "paged-mixed", "tf32-causal", "decode-int8", "segments",
    "block-sparse-causal",
)  # fmt: skip
COLUMNS = {"problem": lambda record: problem_text(record.case)}


def jobs(targets: Sequence[str]) -> list[ParityJob]:
    subjects = [Entry(*key) for key in product(FAMILY_NAMES, targets) if has_kernels(key)]
    found = {case.name: case for case in chain(*(cases("full") for cases in KINDS))}
    return [ParityJob(found[name], subjects) for name in CASES]


def tables(records: Sequence[Record]) -> dict[str, Grid]:
    shown = [record for record in records if record.status != "absent"]
    rows = [
        {
            "case": record.case["name"],
            "implementation": record.label,
            "error / budget": record.error,
            "status": record.status,
            "message": record.message,
        }
        for record in shown
    ]
    return {"Largest error over its budget": to_grid(rows)}
