"""Trees of tokens: a prompt that continuations share, and documents, beside separate sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench import ours
from bench.job import Entry, Job, Operation
from bench.peers import TREE
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
from bench.trees import TreeCase, separate_pairs
from twin_attention.contract.cost import tree_pairs
from twin_attention.interop.rendering.tables import Grid

CHANNELS = 2048
HEADS = 2  # whose rows are checked
# Tokens of a prompt, continuations, tokens of each, head dimension.
TREES = ((8192, 16, 1024, 128), (8192, 16, 1024, 64), (1024, 8, 2048, 128))
DOCUMENTS = (16, 1024, 128)  # how many, tokens of each, head dimension
OPERATIONS: tuple[Operation, ...] = ("forward", "both")

GAINS = "The others' time over this"
SEPARATE = "separate"


def jobs(targets: Sequence[str]) -> list[Job]:
    return [job(case, operation, targets[:1]) for case in cases() for operation in OPERATIONS]


def cases() -> list[TreeCase]:
    """Return every tree in order of worth, as a run may be cut off."""
    documents, length, head_dim = DOCUMENTS
    name = f"documents-{documents}x{length}-d{head_dim}"
    roots = tree_case(name, [-1] * documents, [length] * documents, head_dim)
    return [roots, *(_prompt(*shape) for shape in TREES)]


def _prompt(prompt: int, count: int, length: int, head_dim: int) -> TreeCase:
    name = f"tree-{prompt}-{count}x{length}-d{head_dim}"
    return tree_case(name, [-1, *[0] * count], [prompt, *[length] * count], head_dim)


def tree_case(
    name: str, parents: Sequence[int], lengths: Sequence[int], head_dim: int, **fields: Any
) -> TreeCase:
    heads, tokens = CHANNELS // head_dim, sum(lengths)
    shape = {"heads_q": heads, "heads_kv": heads, "head_dim": head_dim, "causal": True} | fields
    return TreeCase(
        name, 1, tokens, tokens, parents=tuple(parents), segment_lengths=tuple(lengths), **shape
    )


def job(case: TreeCase, operation: Operation, targets: Sequence[str]) -> Job:
    peers = {Entry(name): factory for name, factory in TREE.items()}
    return attention_job(case, operation, ours.tree_factories(case, targets) | peers, HEADS)


def _pairs_per_second(record: Record) -> float | None:
    if record.times is None:
        return None
    case = TreeCase(**record.case)
    pairs = separate_pairs(case) if _kind(record) == SEPARATE else tree_pairs(case.spec, case.ends)
    return pairs / record.times.median / 1e9


COLUMNS = {
    "tokens": "seq_q", "heads": "heads_q", "D": "head_dim", "pass": OPERATION,
    "ms": of_median("times"), "TFLOP/s": TFLOPS, "10^12 pairs/s": _pairs_per_second,
    "memory, MB": MEMORY,
}  # fmt: skip


def tables(records: Sequence[Record]) -> dict[str, Grid]:
    return {GAINS: _gains(records), "Every implementation": every_implementation(records, COLUMNS)}


def _gains(records: Sequence[Record]) -> Grid:
    """Return how much faster attention over a tree is than each other way to the same result."""
    peers = list(dict.fromkeys(r.label for r in records if r.is_peer))
    others = [SEPARATE, *peers]
    grid = [["case", "pass", "implementation", f"pairs/s over {SEPARATE}",
             *(f"{x} / this" for x in others)]]  # fmt: skip
    for operation, cases, name, record in own_times(records):
        if _kind(record) == SEPARATE:
            continue
        own = _fastest_separate(cases[name], record)
        rates = [_pairs_per_second(r) for r in (record, own) if r is not None]
        known = [rate for rate in rates if rate is not None]
        rate = f"{known[0] / known[1]:.2f}" if len(known) == 2 else ""
        labels = [None if own is None else own.label, *peers]
        found = [ratio_text(cases[name], record.label, label) for label in labels]
        grid.append([name, operation, record.label, rate, *found])
    return grid


def _fastest_separate(row: dict[str, Record], record: Record) -> Record | None:
    alike = (r for r in row.values() if r.times and r.framework == record.framework)
    own = (r for r in alike if not r.is_peer and _kind(r) == SEPARATE)
    return min(own, key=lambda r: r.times.median if r.times else 0.0, default=None)


def _kind(record: Record) -> str:
    return record.implementation.rsplit(" ", 1)[-1]
