"""First calls in processes of their own, and a record for each step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.job import Entry
from bench.ours import kernels_of
from bench.records import Record, Times, failed
from bench.sampling import Sampler
from twin_attention.interop.parity.cases import FlashCase

# Of a process with empty caches, and of a second one with what the first left on disk.
STEPS = (
    "import", "forward", "backward", "new shape", "new class", "second forward", "second backward"
)  # fmt: skip
TURNS = 3
LONGEST = 180  # seconds of a process
# What keeps compiled code from one process to the next, and where.
_CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
_WITHOUT = ("JAX_COMPILATION_CACHE_DIR",)


@dataclass(frozen=True)
class FirstCallJob:
    problem: FlashCase
    subject: Entry
    turns: int = TURNS

    @property
    def case(self) -> dict[str, Any]:
        return asdict(self.problem)

    @property
    def title(self) -> str:
        return f"{self.problem.name} {' '.join(filter(None, self.subject))}"

    def only(self, texts: Sequence[str]) -> FirstCallJob | None:
        return self if self.subject.is_one_of(texts) else None

    def plan(self, origin: dict[str, Any]) -> dict[str, Record]:
        shared = {"case": self.case, **self.subject._asdict(), **origin}
        return {name: Record(operation=name, **shared) for name in STEPS}

    def measure(
        self, planned: Mapping[str, Record], sampler: Sampler, show: Callable[[str], object]
    ) -> list[Record]:
        """The card is not sampled, since it waits most of the time."""
        if not planned:
            return []
        found: list[dict[str, float]] = []
        try:
            for turn in range(self.turns):
                show(f"process {turn + 1}")
                found.append(self._run())
        except Exception as error:
            return [failed(record, error) for record in planned.values()]
        return [
            replace(record, status="ok", times=_times([1e3 * x[step] for x in found]))
            for step, record in planned.items()
        ]

    def _run(self) -> dict[str, float]:
        with TemporaryDirectory() as folder:
            first, second = (self._process(folder) for _ in range(2))
        return first | {f"second {step}": second[step] for step in ("forward", "backward")}

    def _process(self, folder: str) -> dict[str, float]:
        """Return the seconds of each step in a process; an error has its last line."""
        name, target = self.subject
        command = [sys.executable, "-m", "bench.first_call", *kernels_of(name)]
        changed = dict.fromkeys(_CACHES, folder) | {"TWIN_ATTENTION_TARGET": target or ""}
        environment = {k: v for k, v in os.environ.items() if k not in _WITHOUT} | changed
        done = subprocess.run(
            [*command, json.dumps(self.case)], env=environment, capture_output=True, text=True,
            timeout=LONGEST,
        )  # fmt: skip
        lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
        if done.returncode or not lines:
            raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
        return json.loads(lines[-1])


def _times(milliseconds: Sequence[float]) -> Times:
    return Times(median(milliseconds), min(milliseconds), max(milliseconds))
