"""One case: inputs, oracle, every subject, comparisons."""

from __future__ import annotations

import re
import time
from dataclasses import asdict

import torch

from twin_attention.interop.parity.cases import Case
from twin_attention.interop.parity.check import check_layout, compare
from twin_attention.interop.parity.inputs import Tensors, make_inputs
from twin_attention.interop.parity.oracle import Expectation, expectations, parts_of
from twin_attention.interop.parity.records import CaseResult, Comparison, RunRecord
from twin_attention.interop.parity.subjects.absent import Absent
from twin_attention.interop.parity.subjects.subject import Subject, taken_by


def run_case(case: Case, groups: list[list[Subject]], device: str) -> CaseResult:
    """Run every subject on one case and compare; an exception becomes part of the result.

    Subjects of a group are compared with each other; its results are freed before the next one
    runs.
    """
    start = time.perf_counter()
    runs: list[RunRecord] = []
    comparisons: list[Comparison] = []
    error = None
    try:
        inputs = make_inputs(case, device)
        known: dict[tuple[str, ...], list[Expectation]] = {}
        for group in filter(None, groups):
            own = taken_by(group[0], inputs)
            if (*own,) not in known:
                known[*own,] = expectations(own, parts_of(case.spec))
            records, found = _run_group(case, group, own, known[*own,])
            runs += records
            comparisons += found
    except Exception as failure:
        error = describe(failure)
    seconds = time.perf_counter() - start
    return CaseResult(case.name, asdict(case), seconds, runs, comparisons, error)


def what_runs(case: Case, subjects: list[Subject], device: str) -> dict[str, str]:
    """Return what each subject's side says that it runs for a case, and why."""
    inputs = make_inputs(case, device)
    said = {}
    for subject in subjects:
        try:
            said[subject.label] = str(subject.explain(case, inputs)).splitlines()[0]
        except Exception as failure:
            said[subject.label] = describe(failure)
    return said


# Colours of a terminal, and where packages are installed.
_NOISE = re.compile(r'\x1b\[[0-9;]*m|[^\s"]*/site-packages/')


def describe(failure: Exception) -> str:
    message = " ".join(_NOISE.sub("", str(failure)).split())
    return f"{type(failure).__name__}: {message}" if message else type(failure).__name__


def _run_group(
    case: Case, group: list[Subject], inputs: Tensors, expected: list[Expectation]
) -> tuple[list[RunRecord], list[Comparison]]:
    records, results = [], {}
    for subject in group:
        if subject.supports(case) is not None:
            continue
        try:
            start = time.perf_counter()
            found = subject.start()(case, inputs)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            check_layout(found, inputs, case.spec, case.name)
            ran = str(subject.explain(case, inputs))
        except Absent as reason:
            records.append(RunRecord(subject.label, refused=str(reason)))
        except Exception as failure:
            records.append(RunRecord(subject.label, error=describe(failure)))
        else:
            records.append(RunRecord(subject.label, seconds, ran))
            results[subject] = found
        if torch.cuda.is_initialized():
            # JAX allocates from the same card.
            torch.cuda.empty_cache()
    return records, compare(results, expected, case, inputs)
