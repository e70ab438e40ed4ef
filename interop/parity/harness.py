"""One case: inputs, oracle, every implementation, comparisons."""

from __future__ import annotations

import time
from dataclasses import asdict

import torch

from interop.parity.cases import Case
from interop.parity.compare import compare
from interop.parity.inputs import Tensors, make_inputs
from interop.parity.oracle import Expectation, expectations
from interop.parity.records import CaseResult, Comparison, RunRecord
from interop.parity.run import Runner, explain, run


def run_case(case: Case, groups: list[list[Runner]], device: str) -> CaseResult:
    """Run one case on every implementation and compare; an exception becomes part of the result.

    Args:
        case: the problem.
        groups: runners that are compared with each other; one group's results are freed before
            the next group runs.
        device: torch device of the inputs.
    """
    start = time.perf_counter()
    runs: list[RunRecord] = []
    comparisons: list[Comparison] = []
    error = None
    try:
        inputs = make_inputs(case, device)
        expected = expectations(inputs, case.spec)
        for group in groups:
            records, found = _run_group(case, group, inputs, expected)
            runs += records
            comparisons += found
    except Exception as failure:
        error = describe(failure)
    seconds = time.perf_counter() - start
    return CaseResult(case.name, asdict(case), seconds, runs, comparisons, error)


def what_runs(case: Case, runners: list[Runner], device: str) -> dict[str, str]:
    """By runner: which implementation its package says it runs for a case, where and why."""
    inputs = make_inputs(case, device)
    said = {}
    for runner in runners:
        try:
            said[runner.label] = str(explain(runner, case, inputs)).splitlines()[0]
        except Exception as failure:
            said[runner.label] = describe(failure)
    return said


def describe(failure: Exception) -> str:
    """An exception in one line."""
    message = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {message}" if message else type(failure).__name__


def _run_group(
    case: Case, group: list[Runner], inputs: Tensors, expected: list[Expectation]
) -> tuple[list[RunRecord], list[Comparison]]:
    records, results = [], {}
    for runner in group:
        try:
            done = run(runner, case, inputs)
        except Exception as failure:
            records.append(RunRecord(runner.label, error=describe(failure)))
        else:
            records.append(RunRecord(runner.label, done.seconds, str(done.explanation)))
            results[runner] = done.results
        if torch.cuda.is_initialized():
            # JAX allocates from the same card: return what torch keeps for itself.
            torch.cuda.empty_cache()
    return records, compare(results, expected, case.dtype)
