import signal
import sys
import textwrap

import pytest
import torch

from bench import journal, measure
from bench.journal import Journal, supervise
from bench.records import load


@pytest.fixture
def planned(record):
    return lambda name: record(implementation=name, target=None, status="planned", times=None)


def test_what_one_process_measured_the_next_one_has(tmp_path, planned):
    first, second = planned("FA2"), planned("Flex")
    before = Journal(tmp_path)
    before.begin([first])
    before.end([first])
    before.begin([second])
    after = Journal(tmp_path)
    assert [(r.label, r.status) for r in after.crashed] == [("Flex", "failed")]
    assert list(after.measured) == [first.key, second.key]
    assert Journal(tmp_path).crashed == []


def test_of_those_that_ran_together_none_is_to_blame_yet(tmp_path, planned):
    together = [planned("FA2"), planned("Flex")]
    Journal(tmp_path).begin(together)
    after = Journal(tmp_path)
    assert (after.crashed, after.measured) == ([], {})
    assert after.suspects == {r.key for r in together}


def test_a_broken_context_ends_the_process(monkeypatch, capsys):
    """A run in a new process goes on behind what broke it."""

    def empty_cache():
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(measure.os, "abort", lambda: sys.exit(-signal.SIGABRT))
    with pytest.raises(SystemExit) as ended:
        measure.release_memory()
    assert -ended.value.code in journal.CRASHES
    assert "illegal memory access" in capsys.readouterr().err


# torch is a fake, since each process would spend most of its time importing it.
SUITE = """
    import io, os, signal, sys
    from pathlib import Path
    from unittest.mock import MagicMock
    sys.modules |= dict.fromkeys(("torch", "torch.profiler"), MagicMock())
    from rich.console import Console
    from bench.job import Call, Entry
    from bench.journal import VARIABLE, Journal
    from bench.records import append
    from bench.runner import run_suite
    from tests.bench.conftest import ORIGIN
    from tests.bench.test_runner import INSTRUMENTS, job

    def factory(bad):
        calls = []
        def run():
            calls.append(bad)
            if bad and len(calls) == 2:
                os.kill(os.getpid(), signal.SIGSEGV)
        return lambda tensors: Call(run, None)

    path = Path(sys.argv[-1])
    factories = {Entry(name): factory(name == "bad") for name in ("good", "bad", "better")}
    journal = Journal(Path(os.environ[VARIABLE]))
    append(path, journal.crashed)
    print("started", file=sys.stderr)
    jobs, console = [job("a", factories=factories)], Console(file=io.StringIO())
    sys.exit(run_suite(jobs, ORIGIN, INSTRUMENTS, console, path, journal=journal))
"""


def test_a_crash_is_a_row_and_the_run_goes_on(monkeypatch, tmp_path, capfd):
    path = tmp_path / "records.jsonl"
    monkeypatch.setattr(journal, "_COMMAND", [sys.executable, "-c", textwrap.dedent(SUITE)])
    handlers = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
    assert supervise([str(path)]) == 0
    assert [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)] == handlers
    rows = {(r.case["name"], r.label): (r.status, r.message) for r in load(path)}
    bad = ("failed", "its process crashed")
    assert rows == {("a", "good"): ("ok", None), ("a", "bad"): bad, ("a", "better"): ("ok", None)}
    assert capfd.readouterr().err.count("started") == 3


def test_what_ran_when_it_was_terminated_is_named(monkeypatch, tmp_path, capfd):
    suite = textwrap.dedent(SUITE).replace("len(calls) == 2", "True").replace("SEGV", "TERM")
    monkeypatch.setattr(journal, "_COMMAND", [sys.executable, "-c", suite])
    assert supervise([str(tmp_path / "records.jsonl")]) == 128 + signal.SIGTERM
    assert capfd.readouterr().err.splitlines() == ["started", "SIGTERM during: a forward, bad"]
