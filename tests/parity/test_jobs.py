"""Cases spread over several processes."""

import os
from dataclasses import dataclass
from functools import partial

import pytest

from interop.parity.cases import DecodeCase, FlashCase
from interop.parity.environment import choose_jobs
from interop.parity.harness import run_case
from interop.parity.sides import Subject
from interop.parity.workers import run_cases

GROUPS = [[Subject("torch_attn", "reference"), Subject("pallas_attn", "reference")]]
RUN = partial(run_case, groups=GROUPS, device="cpu")
CASES = [
    FlashCase("small-3", batch=1, seq_q=3, seq_kv=3, head_dim=16),
    DecodeCase("small-5", lengths=(5,), head_dim=16),
]


@dataclass(frozen=True)
class Deadly(FlashCase):
    """A case that takes its process down, as a crash in native code does."""

    @property
    def options(self):
        os._exit(3)


@pytest.fixture(scope="module")
def spread():
    """Run a case that dies and the others in two processes; return what started, and the results.

    Processes take seconds to start, so that the tests share them.
    """
    started = []
    deadly = Deadly("deadly", batch=1, seq_q=3, seq_kv=3, head_dim=16)
    return started, {x.name: x for x in run_cases([deadly, *CASES], RUN, 2, started.append)}


def test_results_do_not_depend_on_the_number_of_processes(spread):
    started = []
    alone = list(run_cases(CASES, RUN, 1, started.append))
    assert started == ["small-3", "small-5"] == spread[0][1:]
    assert [result.name for result in alone] == ["small-3", "small-5"]
    for result in alone:
        assert result.comparisons
        assert spread[1][result.name].comparisons == result.comparisons


def test_a_process_that_dies_is_a_failed_case(spread):
    _, results = spread
    assert results["deadly"].status == "failed"
    assert results["deadly"].errors == ["worker process died: exit code 3"]
    assert [results[case.name].status for case in CASES] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("device", "suite", "cores", "cases", "jobs"),
    [
        ("cuda", "full", 16, 226, 14),
        ("cuda", "full", 8, 226, 8),
        ("cuda", "quick", 16, 16, 8),
        ("cuda", "quick", 16, 1, 1),
        ("cuda", "large", 16, 8, 1),
        ("cpu", "quick", 2, 16, 2),
        ("cpu", "quick", 16, 16, 4),
        ("cpu", "quick", None, 16, 1),
    ],
)
def test_the_default_number_of_processes(device, suite, cores, cases, jobs, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert choose_jobs(device, suite, cases) == jobs


@pytest.mark.parametrize("jobs", ["0", "-1", "many"])
def test_a_number_of_processes_is_positive(jobs, capsys):
    from interop.parity.__main__ import main

    with pytest.raises(SystemExit) as exit:
        main(["--jobs", jobs])
    assert exit.value.code == 2
    assert "--jobs" in capsys.readouterr().err
