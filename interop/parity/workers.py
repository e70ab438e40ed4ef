"""Cases spread over processes, each with its own frameworks and its own CUDA context."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from typing import Any

from interop.parity.cases import Case
from interop.parity.records import CaseResult

RunCase = Callable[[Case], CaseResult]
# A forked process could not use the GPU that its parent uses.
SPAWN = multiprocessing.get_context("spawn")


def run_cases(
    cases: Sequence[Case], run: RunCase, jobs: int, begin: Callable[[str], None]
) -> Generator[CaseResult]:
    """Run cases in `jobs` processes, or in this one if `jobs` is 1; yield results as they come.

    A process that dies fails its case. One whose case raised an exception is replaced, since
    after an illegal memory access nothing else runs in a CUDA context. Closing the generator
    ends all processes.

    Args:
        cases: the problems.
        run: makes a case's result; picklable if `jobs` is not 1.
        jobs: number of processes.
        begin: told the name of each case that begins.
    """
    if jobs == 1:
        for case in cases:
            begin(case.name)
            yield run(case)
        return

    busy: dict[Connection, _Worker] = {}

    def start(worker: _Worker, case: Case) -> None:
        busy[worker.pipe] = worker
        worker.start(case)
        begin(case.name)

    waiting = iter(cases[jobs:])
    try:
        for case in cases[:jobs]:
            start(_Worker(run), case)
        while busy:
            ready = wait(list(busy))
            for pipe in [pipe for pipe in busy if pipe in ready]:
                worker = busy[pipe]
                result = worker.result()
                case = next(waiting, None)
                if case is None or result.errors:
                    del busy[pipe]
                    worker.end()
                if case is not None:
                    start(_Worker(run) if result.errors else worker, case)
                yield result
    finally:
        for worker in busy.values():
            worker.end()


class _Worker:
    """A process that runs one case after the other, seen from its parent."""

    def __init__(self, run: RunCase):
        self.pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that the pipe ends when the process does
        self._send(run)

    def start(self, case: Case) -> None:
        self._case, self._started = case, time.perf_counter()
        self._send(case)

    def result(self) -> CaseResult:
        """Return the result of the case; a failure if the process died."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            death = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
        seconds, error = time.perf_counter() - self._started, f"worker process died: {death}"
        return CaseResult(self._case.name, asdict(self._case), seconds, error=error)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()

    def _send(self, message: Any) -> None:
        with suppress(ConnectionError):  # a dead process is found out by `result`
            self.pipe.send(message)


def _serve(pipe: Connection) -> None:
    """Receive `run`, then answer each case with its result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends us
    run = pipe.recv()
    while True:
        pipe.send(run(pipe.recv()))
