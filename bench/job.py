"""Describe what a suite measures: calls that are timed together, on the same tensors.

A suite lists `Job`s and measures nothing itself; `bench.runner` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bench.records import Record

if TYPE_CHECKING:
    from bench.timing import Timing

Operation = Literal["forward", "backward", "both", "decode", "append", "peak"]
Check = Callable[[Sequence[Any]], float]
# Times several calls against each other.
Timer = Callable[["Mapping[Subject, Callable[[], Any]]"], "Mapping[Subject, Timing]"]


class Subject(NamedTuple):
    """An implementation, and the target that it is compiled for: None for a peer."""

    implementation: str
    target: str | None = None

    def is_one_of(self, texts: Sequence[str]) -> bool:
        """Return True if its name, such as "torch triton sm90", contains one of the texts."""
        name = " ".join(filter(None, self))
        return any(text in name for text in texts)


class Absent(Exception):
    """Raised by a factory: the peer is not installed or does not do the case, with the reason."""


class Call(NamedTuple):
    """One implementation on a job's tensors.

    Attributes:
        run: the timed function; launches and does not wait.
        result: from what `run` returned, the arrays to check, torch's or JAX's [B, S, H, D]: (out,)
            of a forward or a decode, (dq, dk, dv) of a backward, (out, dq, dk, dv) of both,
            (k_pages, v_pages) of an append. None where it is not the problem's result.
        saved: bytes of a forward's output and saved activations before a backward, None if unknown.
        planned: returns the bytes that a call adds, where its compiler plans them; to be called
            after `run`. None where the timer sees them.
    """

    run: Callable[[], Any]
    result: Callable[[Any], Sequence[Any]] | None
    saved: int | None = None
    planned: Callable[[], int] | None = None


@dataclass(frozen=True)
class Job:
    """Several implementations of one operation on the same tensors.

    Attributes:
        case: the case's fields, its "name" among them.
        operation: what one call does.
        flops, bytes: operations and least traffic (reads and writes) of one call; 0 for no rate.
        inputs: makes the tensors.
        factories: from those tensors, each implementation's call, or `Absent`.
        check: from those tensors, a function that returns the worst error of a result over its
            budget; above 1 refuses the result (see `interop.parity.check`). None if nothing is
            checked.
        reads, writes: `bytes` by direction, where a suite shows them.
        time: times the calls; None for the run's own timer, which takes device times.
    """

    case: dict[str, Any]
    operation: Operation
    flops: int
    bytes: int
    inputs: Callable[[], Any]
    factories: Mapping[Subject, Callable[[Any], Call]]
    check: Callable[[Any], Check] | None = None
    reads: int | None = None
    writes: int | None = None
    time: Timer | None = None

    @property
    def title(self) -> str:
        return f"{self.case['name']} {self.operation}"

    def only(self, texts: Sequence[str]) -> Job | None:
        """Return the job of the implementations that are one of the texts; None without any."""
        chosen = {s: make for s, make in self.factories.items() if Subject(*s).is_one_of(texts)}
        return replace(self, factories=chosen) if chosen else None

    def plan(self, origin: dict[str, Any]) -> dict[Subject, Record]:
        """Return the records that measuring would fill."""
        return {
            Subject(*subject): Record(
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
