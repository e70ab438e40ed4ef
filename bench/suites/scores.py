"""Time biases, tables, slopes, dropout and row maxima against the plain call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench import ours
from bench.job import Entry, Job, Operation
from bench.peers import SCORES
from bench.problems import attention_job
from bench.records import Record
from bench.report.tables import ratio_text
from bench.suites.columns import (
    MEMORY,
    OPERATION,
    TFLOPS,
    every_implementation,
    of_median,
    own_times,
)
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.rendering.tables import Grid

HEADS_CHECKED = 2
TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": "hqk", "terms_in_q_dtype": True},
    "relative": {"relative": 128},
    "alibi": {"alibi": "heads"},
    "dropout": {"dropout_rate": 0.1},
    "row-max": {"row_max": True},
}
LENGTHS, TOKENS, HEADS, HEAD_DIM = (4096, 2048, 1024), 4096, 16, 128
AT_EVERY_LENGTH = ("plain", "bias")
OPERATIONS: tuple[Operation, ...] = ("forward", "both")

SHARES = "The time of 'plain' over this"


def jobs(targets: Sequence[str]) -> list[Job]:
    return [
        job(case, operation, targets[:1])
        for case in cases()
        for operation in OPERATIONS
        if not (case.row_max and operation == "both")  # it has no gradient
    ]


def cases() -> list[FlashCase]:
    found = []
    for length in LENGTHS:
        batch = TOKENS // length
        shape = FlashCase("", batch, length, length, HEADS, HEADS, HEAD_DIM)
        names = TERMS if length == LENGTHS[0] else AT_EVERY_LENGTH
        found += [replace(shape, name=f"{x}-{batch}x{length}", **TERMS[x]) for x in names]
    return found


def job(case: FlashCase, operation: Operation, targets: Sequence[str]) -> Job:
    peers = {Entry(name): factory for name, factory in SCORES.items()}
    factories = ours.score_factories(targets) | peers
    return attention_job(case, operation, factories, HEADS_CHECKED)


COLUMNS = {
    "length": "seq_q", "batch": "batch", "pass": OPERATION, "ms": of_median("times"),
    "TFLOP/s": TFLOPS, "memory, MB": MEMORY,
}  # fmt: skip


def tables(records: Sequence[Record]) -> dict[str, Grid]:
    return {
        SHARES: _shares(records), "Every implementation": every_implementation(records, COLUMNS)
    }  # fmt: skip


def _shares(records: Sequence[Record]) -> Grid:
    peers = list(dict.fromkeys(r.label for r in records if r.is_peer and r.times))
    grid = [["case", "pass", "implementation", "plain / this", *(f"{x} / this" for x in peers)]]
    for operation, by_name, name, record in own_times(records):
        term, _, shape = name.rpartition("-")
        plain, share = by_name.get(f"plain-{shape}", {}).get(record.label), ""
        if plain is not None and plain.times and record.times and term != "plain":
            share = f"{plain.times.median / record.times.median:.2f}"
        others = [ratio_text(by_name[name], record.label, peer) for peer in peers]
        grid.append([name, operation, record.label, share, *others])
    return grid
