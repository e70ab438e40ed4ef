"""Run a suite: measure what is not measured yet, keep every record as soon as it is there."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bench.records import Record, append, load
from bench.report.tables import terminal_table

if TYPE_CHECKING:
    from bench.timing import Timing

INTERRUPTED = 130  # the exit code
_OUT_OF_MEMORY = re.compile("out of memory|failed to allocate", re.IGNORECASE)

Call = Callable[[], object]
Wait = Callable[[object], object]


class Subject(NamedTuple):
    """An implementation, and the target that it is compiled for; None for a peer."""

    implementation: str
    target: str | None = None


Timer = Callable[[dict[Subject, Call], Wait], "dict[Subject, Timing]"]


@dataclass(frozen=True)
class Job:
    """What is timed together: several implementations on the same tensors.

    Attributes:
        case: the case's fields, its "name" among them.
        operation: what one call does.
        flops, bytes: operations and least traffic of one call.
        inputs: makes the tensors.
        makers: from those tensors, each implementation's call.
    """

    case: dict[str, Any]
    operation: str
    flops: int
    bytes: int
    inputs: Callable[[], Any]
    makers: Mapping[Subject, Callable[[Any], Call]]

    def plan(self, origin: dict[str, Any]) -> dict[Subject, Record]:
        """The records that measuring would fill."""
        return {
            subject: Record(self.case, self.operation, *subject, **origin)
            for subject in self.makers
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that every suite takes."""
    parser.add_argument("--filter", default="", help="part of a case's name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append records as JSON lines")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="measure only what FILE lacks for this device, these versions and this commit",
    )
    parser.set_defaults(refuse=parser.error)


def prepare(arguments: argparse.Namespace) -> None:
    """Make the frameworks share the card; exit with code 2 where nothing can be timed."""
    if arguments.resume and arguments.json is None:
        arguments.refuse("--resume: expected --json FILE beside it, got none")
    # torch and JAX share the card: JAX must not reserve most of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from interop.parity.environment import choose_device

    if choose_device() == "cpu":
        arguments.refuse("expected a CUDA GPU that torch and JAX both see, found none")


def run_suite(
    jobs: Sequence[Job],
    origin: dict[str, Any],
    timer: Timer,
    wait: Wait,
    console: Console,
    path: Path | None = None,
    resume: bool = False,
) -> int:
    """Measure every job and print the table; returns the exit code.

    Args:
        jobs: in the order to run them.
        origin: the fields that all records share.
        timer: times several calls against each other.
        wait: blocks until a call's result is there.
        path: file that records are appended to.
        resume: take from `path` what is measured already.
    """
    records = {}
    if resume and path is not None and path.exists():
        records = {record.key: record for record in load(path)}
    planned = [record.key for job in jobs for record in job.plan(origin).values()]
    code = INTERRUPTED
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(),
               TextColumn("left"))  # fmt: skip
    progress = Progress(*columns, console=console, transient=True, speed_estimate_period=600)
    with suppress(KeyboardInterrupt), progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=f"{job.case['name']} {job.operation}")
            todo = {s: r for s, r in job.plan(origin).items() if r.key not in records}
            measured = list(measure(job, todo, timer, wait))
            if path is not None:
                append(path, measured)
            for record in measured:
                records[record.key] = record
                if record.message is not None:
                    progress.console.print(
                        f"{record.case['name']} {record.operation}, {record.label}: "
                        f"{record.status}: {record.message}", style="red", markup=False,
                    )  # fmt: skip
            progress.advance(task)
        code = 0
    console.print(terminal_table([records[key] for key in planned if key in records]))
    if code == INTERRUPTED:
        console.print("Interrupted; what was measured is kept.")
    return code


def measure(job: Job, planned: dict[Subject, Record], timer: Timer, wait: Wait) -> Iterator[Record]:
    """Fill the planned records of one job; an error becomes the status of what it stopped."""
    if not planned:
        return
    try:
        inputs = job.inputs()
    except Exception as error:
        yield from (_failed(record, error) for record in planned.values())
        return
    calls: dict[Subject, Call] = {}
    for subject, record in planned.items():
        try:
            call = job.makers[subject](inputs)
            wait(call())
            calls[subject] = call
        except Exception as error:
            yield _failed(record, error)
    try:
        timings = timer(calls, wait)
    except Exception as error:
        yield from (_failed(planned[subject], error) for subject in calls)
        return
    for subject, timing in timings.items():
        seconds = timing.times.median / 1e3
        yield replace(
            planned[subject],
            status="ok",
            times=timing.times,
            kernels=timing.kernels,
            tflops=job.flops / seconds / 1e12,
            bytes_per_second=job.bytes / seconds,
        )


def _failed(record: Record, error: Exception) -> Record:
    message = f"{type(error).__name__}: {error}".strip()
    status = "out of memory" if _OUT_OF_MEMORY.search(message) else "failed"
    return replace(record, status=status, message=message.splitlines()[0])
