"""Ranges of keys: a prefix, spans and block diffusion, beside masks, a bias and plain causality."""

from __future__ import annotations

from collections.abc import Sequence

from bench import ours
from bench.job import Entry, Job, Operation
from bench.peers import TREE as MASKED
from bench.problems import attention_job
from bench.ranges import RangeCase
from bench.records import Record
from bench.report.tables import ratio_text
from bench.suites.columns import MEMORY, OPERATION, TFLOPS, every_implementation, own_times
from bench.suites.columns import of_median as median
from twin_attention.interop.parity.cases import VarlenCase
from twin_attention.interop.rendering.tables import Grid

CHANNELS, TOKENS, HEADS = 2048, 8192, 2  # rows of so many heads are checked
PATTERNS = (("prefix", 2048), ("spans", 256), ("diffusion", 32))
HEAD_DIMS = (128, 64)
OPERATIONS: tuple[Operation, ...] = ("forward", "both")
GAINS = "The others' time over this"
COLUMNS = {
    "D": "head_dim", "pass": OPERATION, "ms": median("times"), "TFLOP/s": TFLOPS,
    "memory, MB": MEMORY,
}  # fmt: skip


def jobs(targets: Sequence[str]) -> list[Job]:
    found = []
    for head_dim in HEAD_DIMS:
        heads = CHANNELS // head_dim
        causal = VarlenCase(
            f"causal-d{head_dim}", ((TOKENS, TOKENS),), (0, 0), heads, heads, head_dim
        )
        for operation in OPERATIONS:
            packed = ours.packed_factories(targets[:1])
            found.append(attention_job(causal, operation, packed, HEADS))
            for pattern, size in PATTERNS:
                name = f"{pattern}-{size}-d{head_dim}"
                case = range_case(name, pattern, size, TOKENS, heads, head_dim)
                found.append(job(case, operation, targets[:1]))
    return found


def range_case(
    name: str, pattern: str, size: int, tokens: int, heads: int, head_dim: int
) -> RangeCase:
    window = (0, 0) if pattern == "diffusion" else None
    return RangeCase(
        name, 1, tokens, tokens, heads, heads, head_dim, causal=True, window_size=window,
        pattern=pattern, size=size,
    )  # fmt: skip


def job(case: RangeCase, operation: Operation, targets: Sequence[str]) -> Job:
    peers = {Entry(name): factory for name, factory in MASKED.items()}
    return attention_job(case, operation, ours.range_factories(targets) | peers, HEADS)


def tables(records: Sequence[Record]) -> dict[str, Grid]:
    others = dict.fromkeys(r.label for r in records if r.is_peer)
    grid = [["case", "pass", "implementation", "pairs/s over causal", "bias / this",
             *(f"{x} / this" for x in others)]]  # fmt: skip
    for operation, cases, name, record in own_times(records):
        if name.startswith("causal") or record.implementation.endswith(" bias"):
            continue
        head_dim, framework = record.case["head_dim"], record.implementation.split()[0]
        plain = cases.get(f"causal-d{head_dim}", {}).values()
        rates = [r.tflops for r in plain if r.tflops and r.implementation.startswith(framework)]
        rate = f"{record.tflops / max(rates):.2f}" if rates and record.tflops else ""
        by_label = {r.label: r for r in cases[name].values()}
        bias = next((x for x, r in by_label.items() if r.implementation.endswith(" bias")), None)
        found = [ratio_text(cases[name], record.label, x) for x in (bias, *others)]
        grid.append([name, operation, record.label, rate, *found])
    return {GAINS: grid, "Every implementation": every_implementation(records, COLUMNS)}
