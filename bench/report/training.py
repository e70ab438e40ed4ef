from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from bench.peaks import datasheet
from bench.records import Record
from bench.registry import Cells
from bench.report.tables import groups, number, percent, status, to_grid
from bench.training.case import PHASES
from bench.training.steps import OPERATIONS, WARMUPS, mean_after
from twin_attention.interop.rendering.tables import Grid

GAINS = "A step with our attention: the others' time, of its framework and mode, over its own"
PEAKS = "MB by category at the peak of a step"
_BEFORE = "what keeps all scores"
_EAGER = {"torch": "eager", "jax": "xla"}


def mfu(record: Record) -> str | None:
    """Return the model's FLOP rate over the datasheet's of bfloat16, if known."""
    sheet = datasheet(record.device)
    return percent(record.tflops / sheet.tflops) if record.tflops and sheet else None


def mean_text(record: Record, warmup: int) -> str:
    found = mean_after(record.steps, warmup)
    return f"{number(found.mean)} ± {number(found.deviation)}" if found else ""


def gains(records: Sequence[Record]) -> Grid:
    """Return each step's gain over other attention of its framework and mode."""
    rows = [["case", "implementation", "step, ms", "best other", "best other / this",
             f"{_BEFORE} / this"]]  # fmt: skip
    steps = [record for record in records if record.operation == "step"]
    for group in groups(steps, lambda r: (r.case["name"], *_kind(r))).values():
        for ours in (record for record in group if attention(record) == "twin"):
            rows.append([ours.case["name"], ours.label, *_compared(ours, group)])
    return rows


def phases(records: Sequence[Record]) -> Grid:
    """Return a row per implementation of a case: phases, rate, memory, status."""
    rows = []
    for group in trainings(records):
        whole = group["step"]
        row: Cells = {"case": whole.case["name"], "implementation": whole.label}
        row |= {f"{name}, ms": mean_text(record, WARMUPS[-1]) for name, record in group.items()}
        if whole.times:
            tokens = whole.case["batch"] * whole.case["context"]
            row["tokens/s"] = number(1e3 * tokens / fmean(whole.steps[WARMUPS[-1] :]))
            row["MFU"] = mfu(whole)
        row["saved, MB"] = _megabytes(group["forward"].held)
        for name in PHASES:
            row[f"{name} peak, MB"] = _megabytes(group[name].memory)
        rows.append(row | {"status": status(whole)})
    return to_grid(rows)


def warmups(records: Sequence[Record]) -> Grid:
    """Return a row per implementation of a case: its means after each warm-up."""
    rows = []
    for group in trainings(records):
        whole = group["step"]
        if whole.times:
            row: Cells = {"case": whole.case["name"], "implementation": whole.label}
            row |= {
                f"{name}, {warmup}": mean_text(group[name], warmup)
                for name in OPERATIONS
                for warmup in WARMUPS
            }
            rows.append(row)
    return to_grid(rows)


def attention(record: Record) -> str:
    """Return the attention of an implementation such as "torch twin compiled"."""
    return record.implementation.split()[1]


def _kind(record: Record) -> tuple[str, bool]:
    framework, _, *mode = record.implementation.split()
    return framework, bool(mode)


def _compared(ours: Record, group: Sequence[Record]) -> list[str]:
    if not ours.times:
        return [status(ours), "", "", ""]
    own = ours.times.median
    others = {attention(r): r for r in group if r is not ours}
    timed = {name: r.times.median / own for name, r in others.items() if r.times}
    best = min(timed, key=lambda name: timed[name], default="")
    eager = _EAGER[_kind(ours)[0]]
    before = others.get(eager)
    before_text = f"{timed[eager]:.2f}" if eager in timed else (before and status(before)) or ""
    return [number(own), best, f"{timed[best]:.2f}" if best else "", before_text]


def trainings(records: Sequence[Record]) -> Iterator[dict[str, Record]]:
    for group in groups(records, lambda r: (r.case["name"], r.label)).values():
        found = {record.operation: record for record in group}
        if found.keys() >= set(OPERATIONS):
            yield {name: found[name] for name in OPERATIONS}


def _megabytes(count: int | None) -> str:
    return "" if count is None else number(count / 1e6)
