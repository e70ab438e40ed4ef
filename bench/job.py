"""What a suite is made of: calls that are timed together, on the same tensors.

A suite lists `Job`s and measures nothing itself; `bench.runner` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from bench.records import Record

Operation = Literal["forward", "backward", "both", "decode", "ceiling"]
Check = Callable[[Sequence[Any]], float]


class Subject(NamedTuple):
    """An implementation, and the target that it is compiled for; None for a peer."""

    implementation: str
    target: str | None = None


class Absent(Exception):
    """A maker's: the peer is not installed, or does not do this case; the text says why."""


class Call(NamedTuple):
    """What a maker makes.

    Attributes:
        run: what is timed; launches and does not wait.
        result: the arrays to check, torch's or JAX's, from what `run` gave; None where the result
            is wrong on purpose, as an ablation's.
            Of a forward (out,), a backward (dq, dk, dv), both (out, dq, dk, dv), a decode (out,);
            each [B, S, H, D].
        held: bytes that a backward finds: its forward's output and what that saved; None where
            they are not known.
    """

    run: Callable[[], Any]
    result: Callable[[Any], Sequence[Any]] | None
    held: int | None = None


@dataclass(frozen=True)
class Job:
    """Several implementations of one operation on the same tensors.

    Attributes:
        case: the case's fields, its "name" among them.
        operation: what one call does.
        flops, bytes: operations and least traffic (reads and writes) of one call.
        inputs: makes the tensors.
        makers: from those tensors, each implementation's call. A maker raises `Absent` where it
            has none.
        check: from those tensors, what gives the worst error of a result over its budget; more
            than 1 refuses the result (see `bench.gate`). None where nothing is checked.
        reads, writes: `bytes` by direction, where a suite shows them.
    """

    case: dict[str, Any]
    operation: Operation
    flops: int
    bytes: int
    inputs: Callable[[], Any]
    makers: Mapping[Subject, Callable[[Any], Call]]
    check: Callable[[Any], Check] | None = None
    reads: int | None = None
    writes: int | None = None

    def plan(self, origin: dict[str, Any]) -> dict[Subject, Record]:
        """The records that measuring would fill."""
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
            for subject in self.makers
        }
