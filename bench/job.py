"""Describe what a suite measures: calls timed together, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bench.records import Record

if TYPE_CHECKING:
    from bench.timing import Timing

Operation = Literal["forward", "backward", "both", "jvp", "decode", "append", "peak"]
Check = Callable[[Sequence[Any]], float]
Timer = Callable[["Mapping[Entry, Callable[[], Any]]"], "Mapping[Entry, Timing]"]


class Entry(NamedTuple):
    implementation: str
    target: str | None = None

    def is_one_of(self, texts: Sequence[str]) -> bool:
        name = " ".join(filter(None, self))
        return any(text in name for text in texts)


class Call(NamedTuple):
    """One implementation on a job's tensors.

    run: launches and does not wait.
    result: the arrays to check; None if they are not the problem's result.
    saved: bytes of a forward's output and saved activations.
    planned: returns the bytes that its compiler planned; None if the timer sees them.
    """

    run: Callable[[], Any]
    result: Callable[[Any], Sequence[Any]] | None
    saved: int | None = None
    planned: Callable[[], int] | None = None


@dataclass(frozen=True)
class Job:
    """Several implementations of one operation on the same tensors.

    flops, bytes: of one call, the least; 0 for no rate.
    factories: make a call from the tensors, or raise `Absent`.
    check: a function of a result: its worst error over its budget.
    """

    case: dict[str, Any]
    operation: Operation
    flops: int
    bytes: int
    inputs: Callable[[], Any]
    factories: Mapping[Entry, Callable[[Any], Call]]
    check: Callable[[Any], Check] | None = None
    reads: int | None = None
    writes: int | None = None
    time: Timer | None = None

    @property
    def title(self) -> str:
        return f"{self.case['name']} {self.operation}"

    def only(self, texts: Sequence[str]) -> Job | None:
        chosen = {s: make for s, make in self.factories.items() if Entry(*s).is_one_of(texts)}
        return replace(self, factories=chosen) if chosen else None

    def plan(self, origin: dict[str, Any]) -> dict[Entry, Record]:
        return {
            Entry(*subject): Record(
                case=self.case,
                operation=self.operation,
                implementation=subject[0],
                target=subject[1],
                reads=self.reads,
                writes=self.writes,
                **origin,
            )
            for subject in self.factories
        }
