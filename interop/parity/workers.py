"""Run cases in several processes, each with its own frameworks and CUDA context.

A process announces its steps (`tell`), so that a report of a death or hang can name one.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar, Protocol

from twin_attention.interop.parity.records import CaseResult

# A forked process could not use its parent's GPU.
SPAWN = multiprocessing.get_context("spawn")
# Seconds for a process to import what it needs, on a busy machine.
START = 120.0
# XLA keeps memory of every compiled program, so a process is replaced after this many cases.
CASES_OF_A_PROCESS = 200

_pipe: Connection | None = None  # of this process to its parent, if it is a worker


class Named(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...


Run = Callable[[Any], CaseResult]


def tell(step: str) -> None:
    if _pipe is not None:
        _pipe.send(step)


def run_cases(
    cases: Iterable[Named],
    run: Run,
    jobs: int,
    begin: Callable[[str], None],
    limit: float | None = None,
) -> Generator[CaseResult]:
    """Run cases in `jobs` processes and yield results as they come; one job needs no process.

    A process that dies fails its case; one whose case raised is replaced, because a CUDA context is
    unusable after an illegal memory access. Closing the generator ends all processes. A next case
    is taken once the result before it was yielded.

    limit: seconds of silence after which a process is ended and its case fails; a new process
    gets at least START. None waits for ever.
    """
    if jobs == 1 and limit is None:
        for case in cases:
            begin(case.name)
            yield run(case)
        return

    busy: dict[Connection, _Worker] = {}
    waiting = iter(cases)

    def start(worker: _Worker, case: Named) -> None:
        busy[worker.pipe] = worker
        worker.start(case)
        begin(case.name)

    try:
        for case in islice(waiting, jobs):
            start(_Worker(run, limit), case)
        while busy:
            remaining = min(worker.remaining() for worker in busy.values())
            ready = wait(list(busy), None if remaining == math.inf else remaining)
            for worker in [*busy.values()]:
                if worker.pipe in ready:
                    result = worker.receive()
                elif worker.remaining() == 0:
                    result = worker.hung()
                else:
                    continue
                if result is None:
                    continue
                yield result
                case = next(waiting, None)
                ends = bool(result.errors) or worker.cases == CASES_OF_A_PROCESS
                if case is None or ends:
                    del busy[worker.pipe]
                    worker.end()
                if case is not None:
                    start(_Worker(run, limit) if ends else worker, case)
    finally:
        for worker in busy.values():
            worker.end()


class _Worker:
    def __init__(self, run: Run, limit: float | None):
        self.pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that the pipe ends when the process does
        self._limit = math.inf if limit is None else limit
        self._allowed = max(self._limit, START)
        self.cases = 0
        self._send(run)

    def start(self, case: Named) -> None:
        self._case, self._step = case, ""
        self._started = self._heard = time.perf_counter()
        self.cases += 1
        self._send(case)

    def remaining(self) -> float:
        return max(0.0, self._heard + self._allowed - time.perf_counter())

    def receive(self) -> CaseResult | None:
        """Return the case's result, or a failure if the process died; None for a new step."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            death = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
            return self._failure(f"worker process died: {death}")
        if isinstance(message, CaseResult):
            return message
        self._step, self._heard = message, time.perf_counter()
        self._allowed = self._limit
        return None

    def hung(self) -> CaseResult:
        return self._failure(f"hung: no result after {self._allowed:g} seconds")

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()

    def _failure(self, error: str) -> CaseResult:
        seconds = time.perf_counter() - self._started
        where = f", in {self._step}" if self._step else ""
        return CaseResult(self._case.name, asdict(self._case), seconds, error=error + where)

    def _send(self, message: Any) -> None:
        with suppress(ConnectionError):  # a dead process is found out by `receive`
            self.pipe.send(message)


def _serve(pipe: Connection) -> None:
    global _pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends us
    _pipe = pipe
    run = pipe.recv()
    while True:
        case = pipe.recv()
        tell("")  # the time that this process took to start is not the case's
        pipe.send(run(case))
