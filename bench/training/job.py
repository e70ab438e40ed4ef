"""Run a training, and keep a record per operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Protocol

from bench.job import Entry
from bench.records import Record, failed
from bench.sampling import Sampler
from bench.training.case import TrainingCase
from bench.training.timeline import Timeline
from twin_attention.interop.parity.subjects.absent import Absent

Show = Callable[[str], object]


class Steps(Protocol):
    def time_step(self) -> dict[str, float]: ...

    def memory(self) -> tuple[int | None, dict[str, int]]: ...


class Training(Steps, Protocol):
    def timeline(self) -> Timeline: ...


# Returns the fields of each operation's record, given what a job starts.
Observe = Callable[[Any, TrainingCase, Show], Mapping[str, dict[str, Any]]]


@dataclass(frozen=True)
class TrainingJob:
    """One model with one attention, made, observed and freed before the next one."""

    training: TrainingCase
    subject: Entry
    start: Callable[[], Steps]
    observe: Observe
    operations: Sequence[str]

    @property
    def case(self) -> dict[str, Any]:
        return self.training.fields

    @property
    def title(self) -> str:
        return f"{self.training.name} {self.subject.implementation}"

    def only(self, texts: Sequence[str]) -> TrainingJob | None:
        return self if self.subject.is_one_of(texts) else None

    def plan(self, origin: dict[str, Any]) -> dict[str, Record]:
        shared = {"case": self.case, **self.subject._asdict(), **origin}
        return {name: Record(operation=name, **shared) for name in self.operations}

    def measure(self, planned: Mapping[str, Record], sampler: Sampler, show: Show) -> list[Record]:
        """Fill the planned records; an error becomes the status of all of them."""
        if not planned:
            return []
        show("making the model")
        try:
            training = self.start()
            with sampler:
                found = self.observe(training, self.training, show)
        except (Absent, NotImplementedError) as reason:
            absent = {"status": "absent", "message": str(reason)}
            return [replace(record, **absent) for record in planned.values()]
        except Exception as error:
            return [failed(record, error) for record in planned.values()]
        gpu = sampler.summary()
        return [
            replace(record, status="ok", gpu=gpu, **found[operation])
            for operation, record in planned.items()
        ]


def start(
    case: TrainingCase, framework: str, attention: str, device: str, compiled: bool = False
) -> Training:
    """Make a training; NotImplementedError: the device does not run the attention for this case."""
    if framework == "torch":
        from bench.training.torch_training import TorchTraining

        return TorchTraining(case, attention, device, compiled)
    if missing := [name for name in ("flax", "optax") if find_spec(name) is None]:
        raise Absent(f"{' and '.join(missing)} not installed")
    from bench.training.jax_training import JaxTraining

    return JaxTraining(case, attention)
