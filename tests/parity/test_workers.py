import multiprocessing
import os
import signal
import time
from contextlib import closing
from dataclasses import asdict

import pytest

from twin_attention.interop.parity import workers
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.records import CaseResult
from twin_attention.interop.parity.workers import run_cases


def run(case: FlashCase) -> CaseResult:
    error = None
    if case.name == "raise":
        error = "RuntimeError: no"
    elif case.name == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    elif case.name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif case.name == "exit":
        os._exit(3)
    elif case.name == "sleep":
        time.sleep(600)
    return CaseResult(case.name, asdict(case) | {"process": os.getpid()}, 0.0, error=error)


def cases(*names: str) -> list[FlashCase]:
    return [FlashCase(name) for name in names]


def ignore(name: str) -> None:
    pass


def test_one_job_stays_in_this_process():
    (result,) = run_cases(cases("a"), run, 1, ignore)
    assert result.problem["process"] == os.getpid()


def test_every_case_runs_once_in_a_process_that_is_kept():
    names = [f"case-{n}" for n in range(8)]
    begun: list[str] = []
    results = list(run_cases(cases(*names), run, 2, begun.append))
    assert begun == names
    assert sorted(result.name for result in results) == names
    assert all(result.ok for result in results)
    processes = {result.problem["process"] for result in results}
    assert os.getpid() not in processes
    assert len(processes) <= 2


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("raise", "RuntimeError: no"),
        ("crash", "worker process died: SIGSEGV"),
        ("exit", "worker process died: exit code 3"),
    ],
)
def test_a_process_is_replaced_after(name, error):
    names = (name, "sleep", "after", "later")
    results = []
    with closing(run_cases(cases(*names), run, 2, ignore)) as finished:
        results += [next(finished) for _ in range(3)]
    assert [(result.name, result.error) for result in results] == [
        (name, error),
        ("after", None),
        ("later", None),
    ]
    first, after, later = (result.problem.get("process") for result in results)
    assert first != after == later


class SlowStart:
    def __reduce__(self):
        return start_slowly, ()

    def __call__(self, case: FlashCase) -> CaseResult:
        raise NotImplementedError


def start_slowly():
    time.sleep(2)
    return run


@pytest.mark.usefixtures("forked_workers")
def test_a_slow_start_is_no_hang(monkeypatch):
    (result,) = run_cases(cases("a"), SlowStart(), 1, ignore, 1.0)
    assert result.error is None
    monkeypatch.setattr(workers, "START", 0.0)
    (result,) = run_cases(cases("a"), SlowStart(), 1, ignore, 1.0)
    assert result.error == "hung: no result after 1 seconds"


@pytest.mark.usefixtures("forked_workers")
def test_an_interrupt_is_left_to_the_parent():
    results = list(run_cases(cases("interrupt", "a"), run, 2, ignore))
    assert sorted((result.name, result.error) for result in results) == [
        ("a", None),
        ("interrupt", None),
    ]


@pytest.fixture
def ctrl_c():
    """Ctrl-C as in a terminal; what a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c", "forked_workers")
def test_an_interrupt_ends_all_processes_at_once():
    def interrupt(name: str) -> None:
        if name == "last":
            signal.raise_signal(signal.SIGINT)

    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        list(run_cases(cases("sleep", "a", "last"), run, 2, interrupt))
    assert not multiprocessing.active_children()
    assert time.perf_counter() - start < 60
