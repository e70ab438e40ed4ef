"""Memory over a training step of `models/` by category, with our attention and others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from bench.job import Entry
from bench.records import Record
from bench.registry import Column
from bench.report.tables import number, status
from bench.report.training import PEAKS
from bench.suites.columns import MEMORY, MODEL
from bench.training.case import TrainingCase
from bench.training.job import Show, Training, TrainingJob, start
from bench.training.steps import fields
from bench.training.timeline import CATEGORIES, peak, shortened, totals
from twin_attention.interop.rendering.tables import Grid

CONTEXTS = (1024, 2048, 4096, 8192, 16384)
JAX_CONTEXTS = (4096, 16384)  # JAX compiles for every shape
TINY = TrainingCase("tiny", 2, 64)
ATTENTIONS = {"torch": ("twin", "eager", "sdpa"), "jax": ("twin", "xla")}
_STEPS = 3  # before memory is looked at; the first compiles


def jobs(targets: Sequence[str | None]) -> list[TrainingJob]:
    """Torch goes first; jobs are tiny on a CPU."""
    target = targets[0]
    device = "cpu" if target is None else "cuda"
    cases = [TINY] if target is None else [TrainingCase("S", 1, context) for context in CONTEXTS]
    found = []
    for side, attentions in ATTENTIONS.items():
        for case in cases:
            if side == "jax" and case is not TINY and case.context not in JAX_CONTEXTS:
                continue
            for name in attentions:
                subject = Entry(f"{side} {name}", target if name == "twin" else None)
                begin = partial(start, case, side, name, device)
                found.append(TrainingJob(case, subject, begin, observe, ("step",)))
    return found


def observe(training: Training, case: TrainingCase, show: Show) -> dict[str, dict[str, Any]]:
    steps = []
    for i in range(_STEPS):
        show(f"step {i + 1}")
        steps.append(training.time_step()["step"])
    show("recording memory")
    timeline = training.timeline()
    found = {"timeline": shortened(timeline), "memory": max(totals(timeline))}
    return {"step": fields(steps, 1, case.flops("step")) | found}


def _at_peak(category: str) -> Column:
    return lambda record: peak(record.timeline)[category] / 1e6 if record.timeline else None


COLUMNS = (
    MODEL
    | {f"{name}, MB": _at_peak(name) for name in CATEGORIES}
    | {"memory, MB": MEMORY, "status": status}
)


def tables(records: Sequence[Record]) -> dict[str, Grid]:
    rows = [["case", "implementation", *CATEGORIES, "all", "status"]]
    for record in records:
        at_peak = peak(record.timeline) if record.timeline else {}
        cells = [number(at_peak[name] / 1e6) if at_peak else "" for name in CATEGORIES]
        whole = number(record.memory / 1e6) if record.memory else ""
        rows.append([record.case["name"], record.label, *cells, whole, status(record)])
    return {PEAKS: rows}
