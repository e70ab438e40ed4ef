"""Running a suite with a timer that needs no GPU: resume, failures, Ctrl-C."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from bench.records import load
from bench.runner import Job, Subject, run_suite
from bench.statistics import Times
from bench.timing import Timing

OURS, PEER = Subject("Triton", "sm90"), Subject("FA2")


def fake_timer(calls, wait):
    """2 ms for whatever is asked."""
    return {name: Timing(Times(2.0, 1.9, 2.1), (wait(call()),)) for name, call in calls.items()}


def raises(error):
    """A stand-in for whatever is called and must fail."""

    def call(*arguments):
        raise error

    return call


def job(name, **changes):
    made = Job(
        case={"name": name},
        operation="forward",
        flops=4 * 10**9,
        bytes=6 * 10**6,
        inputs=lambda: "tensors",
        makers={s: lambda tensors, s=s: lambda: f"{s[0]} of {tensors}" for s in (OURS, PEER)},
    )
    return replace(made, **changes)


@pytest.fixture
def run(tmp_path, origin):
    """Run jobs; gives the exit code, the records in the file and what was printed."""
    path = tmp_path / "records.jsonl"

    def run(*jobs, timer=fake_timer, origin=origin, path=path, resume=False):
        console = Console(file=io.StringIO(), width=200)
        code = run_suite(jobs, origin, timer, lambda x: x, console, path, resume)
        records = load(path) if path is not None and path.exists() else []
        return code, records, console.file.getvalue()

    return run


def test_a_record_holds_what_was_measured(run, origin):
    code, records, printed = run(job("a"))
    assert code == 0
    assert [(r.case["name"], r.label, r.status) for r in records] == [
        ("a", "Triton sm90", "ok"),
        ("a", "FA2", "ok"),
    ]
    ours = records[0]
    assert ours.times == Times(2.0, 1.9, 2.1)
    assert ours.kernels == ("Triton of tensors",)
    assert (ours.tflops, ours.bytes_per_second) == (2.0, 3e9)
    assert (ours.device, ours.commit) == (origin["device"], origin["commit"])
    assert "2.000" in printed


def test_what_is_measured_is_not_measured_again(run):
    run(job("a"))
    timed = []

    def timer(calls, wait):
        timed.append(list(calls))
        return fake_timer(calls, wait)

    code, records, printed = run(job("a"), job("b"), timer=timer, resume=True)
    assert code == 0
    assert timed == [[OURS, PEER]]
    assert [r.case["name"] for r in records] == ["a", "a", "b", "b"]
    assert printed.count("Triton sm90") == 2  # the table shows both


def test_resume_adds_the_implementation_that_is_missing(run):
    makers = job("a").makers
    run(job("a", makers={OURS: makers[OURS]}))
    _, records, printed = run(job("a"), resume=True)
    assert [r.label for r in records] == ["Triton sm90", "FA2"]
    assert printed.count("1.00") == 2  # and compares it with what was there


def test_another_commit_is_measured_again(run, origin):
    run(job("a"))
    _, records, _ = run(job("a"), resume=True, origin=origin | {"commit": "ba9876543210"})
    assert len(records) == 4


def test_without_resume_everything_is_measured(run):
    run(job("a"))
    assert len(run(job("a"))[1]) == 4


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("no kernel\nfor this"), "failed"),
        (NotImplementedError("head_dim"), "failed"),
        (MemoryError("CUDA out of memory. Tried to allocate"), "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying"), "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Failed to allocate request"), "out of memory"),
        (RuntimeError("out of resource: shared memory"), "failed"),
    ],
)
def test_an_implementation_that_fails_is_a_row_and_the_run_goes_on(run, error, status):
    makers = job("a").makers | {OURS: raises(error)}
    code, records, printed = run(job("a", makers=makers), job("b"))
    assert code == 0
    found = {(r.case["name"], r.label): r for r in records}
    failed = found.pop(("a", "Triton sm90"))
    assert (failed.status, failed.times, failed.tflops) == (status, None, None)
    first_line = str(error).splitlines()[0]
    assert failed.message == f"{type(error).__name__}: {first_line}"
    assert [r.status for r in found.values()] == ["ok"] * 3
    assert f"Triton sm90: {status}: {failed.message}" in printed


def test_a_call_that_fails_is_a_row(run):
    makers = job("a").makers | {PEER: lambda tensors: raises(RuntimeError("later"))}
    _, records, _ = run(job("a", makers=makers))
    assert {r.label: r.status for r in records} == {"FA2": "failed", "Triton sm90": "ok"}


@pytest.mark.parametrize("stage", ["inputs", "timer"])
def test_a_case_that_fails_is_a_row_of_each_implementation(run, stage):
    error = raises(MemoryError("out of memory"))
    broken = job("a", inputs=error) if stage == "inputs" else job("a")
    code, records, _ = run(broken, timer=error)
    assert code == 0
    assert [(r.label, r.status) for r in records] == [
        ("Triton sm90", "out of memory"),
        ("FA2", "out of memory"),
    ]


@pytest.mark.parametrize("stage", ["inputs", "maker", "timer"])
def test_ctrl_c_keeps_what_is_measured(run, stage):
    interrupt = raises(KeyboardInterrupt)
    second = {
        "inputs": job("b", inputs=interrupt),
        "maker": job("b", makers={OURS: interrupt}),
        "timer": job("b"),
    }[stage]

    def timer(calls, wait):
        times = fake_timer(calls, wait)
        return interrupt() if stage == "timer" and timer.calls.pop() == "b" else times

    timer.calls = ["b", "a"]
    code, records, printed = run(job("a"), second, job("c"), timer=timer)
    assert code == 130
    assert [r.case["name"] for r in records] == ["a", "a"]
    assert "2.000" in printed
    assert "Interrupted; what was measured is kept." in printed


def test_records_need_no_file(run):
    code, _, printed = run(job("a"), path=None)
    assert code == 0
    assert "2.000" in printed
