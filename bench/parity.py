"""Compare a case of parity with the reference, with a record per implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.job import Entry
from bench.ours import FAMILY_NAMES
from bench.records import PARITY, Record, failed
from bench.sampling import Sampler
from twin_attention.interop.parity.cases import Case
from twin_attention.interop.parity.records import CaseResult


@dataclass(frozen=True)
class ParityJob:
    problem: Case
    subjects: Sequence[Entry]
    device: str = "cuda"

    @property
    def case(self) -> dict[str, Any]:
        return asdict(self.problem)

    @property
    def title(self) -> str:
        return f"{self.problem.name} {PARITY}"

    def only(self, texts: Sequence[str]) -> ParityJob | None:
        chosen = [subject for subject in self.subjects if subject.is_one_of(texts)]
        return replace(self, subjects=chosen) if chosen else None

    def plan(self, origin: dict[str, Any]) -> dict[Entry, Record]:
        shared = {"case": self.case, "operation": PARITY, **origin}
        return {subject: Record(**subject._asdict(), **shared) for subject in self.subjects}

    def measure(
        self, planned: Mapping[Entry, Record], sampler: Sampler, show: Callable[[str], object]
    ) -> list[Record]:
        """Nothing is timed, so nothing is sampled."""
        from twin_attention.interop.parity import sides
        from twin_attention.interop.parity.harness import run_case

        show("compiles and is checked")
        ours = {
            subject: sides.Ours(*FAMILY_NAMES[subject.implementation], subject.target)
            for subject in planned
        }
        result = run_case(self.problem, [list(ours.values())], self.device)
        return [_filled(planned[name], result, subject.label) for name, subject in ours.items()]


def _filled(record: Record, result: CaseResult, label: str) -> Record:
    if result.error is not None:
        return failed(record, RuntimeError(result.error))
    run = next((run for run in result.runs if run.subject == label), None)
    if run is None:
        return replace(record, status="absent", message="it has no kernels for this problem")
    if run.error is not None:
        return failed(record, RuntimeError(run.error))
    own = [c for c in result.comparisons if label in (c.subject, c.against)]
    wrong = [c for c in own if not c.ok]
    error = max(c.agreement.ratio for c in wrong or own)
    if not wrong:
        return replace(record, status="ok", error=error)
    names = ", ".join(dict.fromkeys(c.output for c in wrong))
    message = f"the error of {names} is {error:.3g} times the budget"
    return replace(record, status="refused by parity", error=error, message=message)
