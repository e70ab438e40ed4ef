"""Run one problem: every subject, several rounds, each within the error budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from random import Random
from typing import Any

import torch

from twin_attention.contract.operands import TERMS
from twin_attention.interop.parity.cases import Case, MergeCase
from twin_attention.interop.parity.check import check_layout, compare
from twin_attention.interop.parity.fuzz.memory import (
    Guard,
    lay_out,
    poison_free_memory,
    saved_as,
    unchanged,
    with_odd_strides,
)
from twin_attention.interop.parity.fuzz.problems import Problem, hidden_values
from twin_attention.interop.parity.fuzz.schedules import InvariantCase, differing_bits
from twin_attention.interop.parity.harness import describe
from twin_attention.interop.parity.inputs import Tensors, make_inputs
from twin_attention.interop.parity.oracle import Expectation, expectations, parts_of
from twin_attention.interop.parity.records import CaseResult, Comparison, RunRecord
from twin_attention.interop.parity.subjects.absent import Absent
from twin_attention.interop.parity.subjects.subject import Run, Subject, taken_by
from twin_attention.interop.parity.workers import tell

REFUSED = "NotImplementedError: implementation: "


def run_problem(problem: Problem, groups: list[list[Subject]], device: str) -> CaseResult:
    """Run every subject that supports a problem; an exception becomes part of the result."""
    start = time.perf_counter()
    runs: list[RunRecord] = []
    comparisons: list[Comparison] = []
    error = None
    try:
        known: dict[tuple[bool, ...], Values] = {}

        def values(subject: Subject, again: bool) -> Values:
            key = again, subject.has_gradients, subject.has_dlse, subject.has_tangents
            if key not in known:
                tell("the oracle")
                known[key] = _values(problem, device, again, subject)
            return known[key]

        for subject in (subject for group in groups for subject in group):
            if subject.supports(problem.case) is not None:
                continue
            if not (_is_torch(subject) or problem.jax):
                continue
            record, found = _run_subject(subject, problem, values)
            runs += [] if record is None else [record]
            comparisons += found
    except Exception as failure:
        error = describe(failure)
    seconds = time.perf_counter() - start
    return CaseResult(problem.name, asdict(problem.case), seconds, runs, comparisons, error)


Values = tuple[Tensors, list[Expectation]]


def _values(problem: Problem, device: str, again: bool, subject: Subject) -> Values:
    """Return laid-out inputs and the right results. dlse is NaN where a row sees no key."""
    case = _again(problem.case) if again else problem.case
    inputs = taken_by(subject, make_inputs(case, device))
    for name in ("q", "k"):
        if problem.spread != 1 and name in inputs:
            inputs[name] *= problem.spread
    terms = [name for name in TERMS if name in inputs]
    if problem.hiding is not None and terms:
        name = Random(problem.name).choice(terms)
        inputs[name] = hidden_values(name, inputs[name], problem)
    expected = expectations(inputs, parts_of(case.spec))
    if "dlse" in inputs and "sinks" not in inputs and not isinstance(case, MergeCase):
        (whole,) = expected
        inputs["dlse"] = inputs["dlse"].masked_fill(whole.ref["lse"].isneginf(), torch.nan)
    for name, rows in problem.rows.items():
        if name in inputs:
            inputs[name] = lay_out(inputs[name], rows)
    if problem.odd_strides:
        inputs = {name: with_odd_strides(x) for name, x in inputs.items()}
    return inputs, expected


def _again(case: Case) -> Case:
    changed: dict[str, Any] = {"name": f"{case.name} again"}
    for name in ("lengths", "new_tokens"):
        if getattr(case, name, None):
            changed[name] = getattr(case, name)[::-1]
    return replace(case, **changed)


def _run_subject(
    subject: Subject, problem: Problem, values: Callable[[Subject, bool], Values]
) -> tuple[RunRecord | None, list[Comparison]]:
    """Run a subject's rounds until one fails; what ran is None if it refuses the layout."""
    start = time.perf_counter()
    comparisons: list[Comparison] = []
    run = subject.start()
    for name in _rounds(subject, problem):
        inputs, expected = values(subject, name == "again")
        tell(f"{subject.label}, {name}")
        if not _is_torch(subject):  # JAX's arrays have no strides
            contiguous = torch.contiguous_format
            inputs = {x: y.clone(memory_format=contiguous) for x, y in inputs.items()}
        try:
            results = _run_round(run, subject, problem, inputs, name)
            check_layout(results, inputs, problem.case.spec, name)
            own, others = problem.case, None
            if isinstance(own, InvariantCase) and own.batch_invariant and name != "again":
                others = differing_bits(_for_schedules(subject, run), own, inputs, results)
        except Absent as reason:
            return RunRecord(subject.label, refused=str(reason)), comparisons
        except Exception as failure:
            text = describe(failure)
            if text.startswith(REFUSED) and not _is_readable(inputs):
                return None, comparisons
            return RunRecord(subject.label, error=f"{name}: {text}"), comparisons
        case = _again(problem.case) if name == "again" else problem.case
        found = compare({subject: results}, expected, case, inputs)
        comparisons += [replace(c, subject=f"{subject.label}, {name}") for c in found]
        if others is not None:
            return RunRecord(subject.label, error=f"{name}: other bits: {others}"), comparisons
        if not all(c.ok for c in found):
            break
    seconds = time.perf_counter() - start
    return RunRecord(subject.label, seconds), comparisons


def _for_schedules(subject: Subject, run: Run) -> Run:
    """Return a function that runs the subject or, on a schedule that it lacks, the default."""
    default = subject.by_default().start()
    return lambda case, inputs: (default if subject.supports(case) else run)(case, inputs)


def _rounds(subject: Subject, problem: Problem) -> tuple[str, ...]:
    """Return a subject's rounds, in order.

    "guarded" runs through PyTorch's dispatcher with guarded memory; "first" is cached where PyTorch
    calls are cached, on a GPU; "again" repeats the call with other values and lengths, on another
    stream.
    """
    rounds = ["guarded"] if subject.is_guarded and _is_torch(subject) else ["first"]
    if subject.target:
        return tuple(dict.fromkeys((*rounds, "first", "again")))
    return (*rounds, *(["again"] if problem.hook and _is_torch(subject) else []))


def _run_round(run: Run, subject: Subject, problem: Problem, inputs: Tensors, name: str) -> Tensors:
    device = next(iter(inputs.values())).device
    guard = Guard() if name == "guarded" else nullcontext()
    hook = saved_as(problem.hook) if problem.hook and name == "again" else nullcontext()
    poison_free_memory(device)
    stream = nullcontext()
    if device.type == "cuda" and name == "again" and _is_torch(subject):
        torch.cuda.synchronize()
        stream = torch.cuda.stream(torch.cuda.Stream())
    with unchanged(inputs), guard, hook, stream:
        results = run(problem.case, inputs, problem.constants)
        if device.type == "cuda":
            torch.cuda.synchronize()
    if isinstance(guard, Guard):
        guard.check()
    return results


def _is_torch(subject: Subject) -> bool:
    return subject.framework == "torch"


def _is_readable(inputs: Tensors) -> bool:
    """Return False for rows or addresses whose alignment a subject may refuse."""
    return all(
        x.data_ptr() % 16 == 0
        and all(n == 1 or stride * x.itemsize % 16 == 0
                for n, stride in list(zip(x.shape, x.stride(), strict=True))[:-1])
        for x in inputs.values()
    )  # fmt: skip
