"""Run a suite: measure what is missing, and keep every record at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import Progress, TaskID

from bench.first import FirstCallJob
from bench.job import Call, Check, Entry, Job, Timer
from bench.journal import Journal
from bench.records import Record, append, failed, load
from bench.report.tables import brief
from bench.sampling import Sampler
from bench.training.job import TrainingJob
from twin_attention.interop.parity.subjects.absent import Absent
from twin_attention.interop.rendering.tables import NARROW, PROGRESS, progress_columns, to_terminal

if TYPE_CHECKING:
    from bench.timing import Timing

INTERRUPTED = 130  # the exit code
NO_JOURNAL = Journal()
TIME_UP = "the time is up"

Run = Callable[[], Any]
AnyJob = Job | TrainingJob | FirstCallJob


class Instruments(NamedTuple):
    """The functions that use the device; `limit` bounds the memory of a first call."""

    time: Timer
    wait: Callable[[Any], object]
    sample: Callable[[], Sampler]
    release: Callable[[], object]
    limit: Callable[[], AbstractContextManager] = nullcontext


def run_suite(
    jobs: Sequence[AnyJob],
    origin: dict[str, Any],
    instruments: Instruments,
    console: Console,
    path: Path | None = None,
    resume: bool = False,
    journal: Journal = NO_JOURNAL,
    deadline: float = math.inf,
    quiet: bool = False,
) -> int:
    """Measure every job and print the table; return the exit code.

    resume: reuse the measurements in `path`, but try failures again.
    deadline: by `time.monotonic`. A job is skipped if one as long as the longest so far would
    end after it.
    """
    records = {}
    if resume and path is not None and path.exists():
        records = {r.key: r for r in load(path) if r.status not in ("failed", "skipped")}
    records |= journal.measured
    planned = [record.key for job in jobs for record in job.plan(origin).values()]
    code, longest = INTERRUPTED, 0.0
    progress = Progress(*progress_columns(), console=console, **PROGRESS)
    with suppress(KeyboardInterrupt), progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            title = job.title
            plan: dict[Any, Record] = {**job.plan(origin)}
            todo = {part: record for part, record in plan.items() if record.key not in records}
            sampler, start = instruments.sample(), time.monotonic()
            show = partial(_show, progress, task, title)
            measured = []
            if start + longest > deadline:
                measured = [replace(r, status="skipped", message=TIME_UP) for r in todo.values()]
                todo = {}
            for together in _apart(todo, journal.suspects):
                if isinstance(job, Job):
                    measured += measure(job, together, instruments, sampler, show, journal)
                else:
                    journal.begin(together.values())
                    with instruments.limit():
                        measured += job.measure(together, sampler, show)
            instruments.release()
            longest = max(longest, time.monotonic() - start)
            if path is not None:
                append(path, measured)
            journal.end(measured)
            records |= {record.key: record for record in measured}
            for record in {(r.label, r.message): r for r in measured}.values():
                if record.message not in (None, TIME_UP):
                    progress.console.print(
                        f"{title}, {record.label}: {record.status}: {record.message}",
                        style="dim" if record.status == "absent" else "red", markup=False,
                    )  # fmt: skip
            if any(record.status == "skipped" for record in measured):
                progress.console.print(f"{title}: skipped, {TIME_UP}", style="dim", markup=False)
            progress.advance(task)
            if not console.is_terminal:  # which shows no bar
                console.print(f"{title}: {time.monotonic() - start:.1f} s", markup=False)
        code = 0
    if not quiet:
        _print([records[key] for key in planned if key in records], console)
    if code == INTERRUPTED:
        console.print("Interrupted; what was measured is kept.")
    return code


def _apart(todo: dict[Any, Record], suspects: set[str]) -> list[dict[Any, Record]]:
    alone = [{part: record} for part, record in todo.items() if record.key in suspects]
    together = {part: r for part, r in todo.items() if r.key not in suspects}
    return [together, *alone] if together else alone


def _show(progress: Progress, task: TaskID, title: str, step: str) -> None:
    progress.update(task, description=f"{title}: {step}")


def _print(records: Sequence[Record], console: Console) -> None:
    shown = [record for record in records if record.status not in ("absent", "skipped")]
    absent = sum(record.status == "absent" for record in records)
    caption = f"{absent} absent: a peer is not installed, or does not do the case"
    console.print(to_terminal(*brief(shown), caption=caption if absent else None, **NARROW))


def measure(
    job: Job,
    planned: Mapping[Entry, Record],
    instruments: Instruments,
    sampler: Sampler,
    show: Callable[[str], object],
    journal: Journal = NO_JOURNAL,
) -> list[Record]:
    """Fill the planned records of one job; an error becomes the status of what it stopped.

    Implementations are timed together while they fit in memory; one that does not waits.
    """
    if not planned:
        return []
    show("making tensors")
    journal.begin(planned.values())
    try:
        inputs = job.inputs()
        check = None if job.check is None else job.check(inputs)
    except Exception as error:
        return [failed(record, error) for record in planned.values()]
    done: list[Record] = []
    waiting = list(planned)
    while waiting:
        ready: dict[Entry, tuple[Record, Run]] = {}
        for subject in list(waiting):
            show(f"{planned[subject].label} compiles and is checked")
            journal.begin([planned[subject]])
            record, call = _prepare(
                planned[subject], job.factories[subject], inputs, check, instruments
            )
            if record.status == "out of memory":
                instruments.release()
                if ready:
                    break
            waiting.remove(subject)
            if call is None:
                done.append(record)
            else:
                ready[subject] = record, call
        show("timing")
        done += _time(job, ready, instruments, sampler, journal)
        ready.clear()
        call = None
        if waiting:
            instruments.release()
    return done


def _prepare(
    record: Record,
    factory: Callable[[Any], Call],
    inputs: Any,
    check: Check | None,
    instruments: Instruments,
) -> tuple[Record, Run | None]:
    limit = nullcontext if record.operation == "peak" else instruments.limit
    try:
        with limit():
            call = factory(inputs)
            result = call.run()
            instruments.wait(result)
        record = replace(record, held=call.saved, memory=call.planned and call.planned())
        if check is None or call.result is None:
            return record, call.run
        error = check(call.result(result))
    except Absent as absent:
        return replace(record, status="absent", message=str(absent)), None
    except Exception as error:
        return failed(record, error), None
    record = replace(record, error=error)
    if error <= 1:
        return record, call.run
    message = f"its error is {error:.3g} times the budget"
    return replace(record, status="refused by parity", message=message), None


def _time(
    job: Job,
    ready: Mapping[Entry, tuple[Record, Run]],
    instruments: Instruments,
    sampler: Sampler,
    journal: Journal,
) -> list[Record]:
    """Time calls against each other; if that fails, time each separately to find the culprit."""
    if not ready:
        return []
    timer = job.time or instruments.time
    journal.begin(record for record, _ in ready.values())
    try:
        with sampler:
            timings = timer({subject: call for subject, (_, call) in ready.items()})
        gpu = sampler.summary()
    except Exception as error:
        if len(ready) == 1:
            return [failed(record, error) for record, _ in ready.values()]
    else:
        return [_filled(record, job, timings[s], gpu) for s, (record, _) in ready.items()]
    alone = [_time(job, {s: ready[s]}, instruments, sampler, journal) for s in ready]
    return [record for records in alone for record in records]


def _filled(record: Record, job: Job, timing: Timing, gpu: dict[str, Any] | None) -> Record:
    seconds = timing.busy.median / 1e3
    return replace(
        record,
        status="ok",
        times=timing.busy,
        span=timing.span,
        host=timing.host,
        events=timing.events,
        kernels=timing.kernels,
        tflops=job.flops / seconds / 1e12 if job.flops else None,
        bytes_per_second=job.bytes / seconds if job.bytes else None,
        memory=record.memory if timing.memory is None else timing.memory,
        gpu=gpu,
    )
