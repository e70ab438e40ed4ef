"""Running a suite with instruments that need no GPU: gate, resume, failures, memory, Ctrl-C."""

import io
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
from rich.console import Console

from bench.job import Absent, Call, Job, Subject
from bench.records import Times, load
from bench.runner import Instruments, run_suite
from bench.sampling import Sample, Sampler
from bench.timing import Timing

OURS, PEER = Subject("torch triton", "sm90"), Subject("FA2")
TIMING = Timing(
    busy=Times(2.0, 1.9, 2.1), span=Times(2.5, 2.4, 2.6), host=Times(0.1, 0.1, 0.1), kernels=("k",),
    events=2.6, memory=1024,
)  # fmt: skip


def fake_timer(calls):
    """2 ms for whatever is asked."""
    return {subject: replace(TIMING, kernels=(call(),)) for subject, call in calls.items()}


def raises(error):
    """A stand-in for whatever is called and must fail."""

    def call(*arguments):
        raise error

    return call


def factory(name, result=lambda result: (result,)):
    return lambda tensors: Call(lambda: f"{name} of {tensors}", result)


def job(name, **changes):
    made = Job(
        case={"name": name, "batch": 1},
        operation="forward",
        flops=4 * 10**9,
        bytes=6 * 10**6,
        inputs=lambda: "tensors",
        factories={subject: factory(subject[0]) for subject in (OURS, PEER)},
    )
    return replace(made, **changes)


def read():
    return Sample(0.0, 1980.0, 3201.0, 500.0, 60.0, 0)


@pytest.fixture
def run(tmp_path, origin):
    """Run jobs; gives the exit code, the records in the file and what was printed."""
    path = tmp_path / "records.jsonl"

    def run(*jobs, timer=fake_timer, origin=origin, path=path, resume=False, log=None, **changes):
        console = Console(file=io.StringIO(), width=200)
        instruments = Instruments(timer, lambda x: x, lambda: Sampler(read), lambda: None)
        instruments = instruments._replace(**changes)
        code = run_suite(jobs, origin, instruments, console, path, resume, log)
        records = load(path) if path is not None and path.exists() else []
        return code, records, console.file.getvalue()

    return run


def test_a_record_holds_what_was_measured(run, origin):
    code, records, printed = run(job("a", reads=4, writes=2))
    assert code == 0
    assert [(r.case["name"], r.label, r.status) for r in records] == [
        ("a", "torch triton sm90", "ok"),
        ("a", "FA2", "ok"),
    ]
    ours = records[0]
    assert (ours.times, ours.span, ours.host) == (TIMING.busy, TIMING.span, TIMING.host)
    assert (ours.events, ours.memory) == (2.6, 1024)
    assert ours.kernels == ("torch triton of tensors",)
    assert (ours.tflops, ours.bytes_per_second) == (2.0, 3e9)
    assert (ours.reads, ours.writes, ours.error) == (4, 2, None)
    assert ours.gpu["sm_mhz"] == 1980.0
    assert {name: getattr(ours, name) for name in origin} == origin
    assert "2.00" in printed


def test_a_job_may_bring_a_timer_and_no_rates(run):
    def timer(calls):
        return {s: replace(t, busy=Times(0.5, 0.5, 0.5)) for s, t in fake_timer(calls).items()}

    _, records, _ = run(job("a", time=timer, flops=0, bytes=0), job("b"))
    assert [r.times.median for r in records] == [0.5, 0.5, 2.0, 2.0]
    assert {(r.tflops, r.bytes_per_second) for r in records[:2]} == {(None, None)}


@pytest.mark.parametrize(("operation", "limited"), [("forward", ["first call"]), ("peak", [])])
def test_memory_is_limited_for_the_implementation_alone(run, operation, limited):
    inside, seen = [], []

    @contextmanager
    def limit():
        inside.append("limit")
        yield
        inside.clear()

    def seeing(what, result):
        if inside:
            seen.append(what)
        return result

    made = job(
        "a",
        operation=operation,
        inputs=lambda: seeing("inputs", "tensors"),
        factories={
            OURS: lambda tensors: Call(lambda: seeing("first call", "out"), lambda out: (out,))
        },
        check=lambda tensors: lambda arrays: seeing("check", 0.5),
    )
    _, records, _ = run(made, timer=lambda calls: seeing("timer", fake_timer(calls)), limit=limit)
    assert [record.status for record in records] == ["ok"]
    assert seen == limited


def test_samples_go_into_the_log_that_is_asked_for(run, tmp_path):
    log = tmp_path / "gpu.csv"
    run(job("a"), job("b"), log=log)
    head, *lines = log.read_text().splitlines()
    assert head == "job,time,sm_mhz,memory_mhz,watts,celsius,throttle"
    assert {line.split(",")[0] for line in lines} == {"a forward", "b forward"}


@pytest.mark.parametrize(("error", "status"), [(0.5, "ok"), (1.0, "ok"), (1.1, "refused by parity"),
                                               (float("nan"), "refused by parity")])  # fmt: skip
def test_only_what_is_right_is_timed(run, error, status):
    made = []

    def check(tensors):
        made.append(tensors)
        return lambda arrays: error if arrays == ("torch triton of tensors",) else 0.1

    timed = []

    def timer(calls):
        timed.extend(calls)
        return fake_timer(calls)

    _, records, printed = run(job("a", check=check), timer=timer)
    ours, peer = sorted(records, key=lambda r: r.is_peer)
    assert (ours.status, peer.status, peer.error) == (status, "ok", 0.1)
    assert ours.error == pytest.approx(error, nan_ok=True)
    assert timed == ([OURS, PEER] if status == "ok" else [PEER])
    assert made == ["tensors"]  # the oracle runs once a job
    if status != "ok":
        assert f"torch triton sm90: refused by parity: its error is {error:.3g} times" in printed


def test_a_call_without_a_result_is_not_checked(run):
    factories = {OURS: factory("no result", result=None)}
    check = lambda tensors: raises(AssertionError("checked"))  # noqa: E731
    _, records, _ = run(job("a", factories=factories, check=check))
    assert [(r.status, r.error) for r in records] == [("ok", None)]


def test_what_is_measured_is_not_measured_again(run):
    run(job("a"))
    timed = []

    def timer(calls):
        timed.append(list(calls))
        return fake_timer(calls)

    code, records, printed = run(job("a"), job("b"), timer=timer, resume=True)
    assert code == 0
    assert timed == [[OURS, PEER]]
    assert [r.case["name"] for r in records] == ["a", "a", "b", "b"]
    assert printed.count("torch triton sm90") == 2  # the table shows both


def test_resume_adds_the_implementation_that_is_missing(run):
    factories = job("a").factories
    run(job("a", factories={OURS: factories[OURS]}))
    _, records, printed = run(job("a"), resume=True)
    assert [r.label for r in records] == ["torch triton sm90", "FA2"]
    assert printed.count("1.00") == 2  # and compares it with what was there


@pytest.mark.parametrize(
    ("error", "again"),
    [(RuntimeError("the card fell off"), 1), (MemoryError("out of memory"), 0), (Absent("no"), 0)],
)
def test_resume_tries_again_what_failed_and_nothing_else(run, error, again):
    factories = job("a").factories | {OURS: raises(error)}
    run(job("a", factories=factories))
    _, records, _ = run(job("a"), resume=True)
    assert len(records) == 2 + again
    assert [r.status for r in records[2:]] == ["ok"] * again


def test_another_commit_is_measured_again(run, origin):
    run(job("a"))
    _, records, _ = run(job("a"), resume=True, origin=origin | {"commit": "ba9876543210"})
    assert len(records) == 4


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
    factories = job("a").factories | {OURS: raises(error)}
    code, records, printed = run(job("a", factories=factories), job("b"))
    assert code == 0
    found = {(r.case["name"], r.label): r for r in records}
    failed = found.pop(("a", "torch triton sm90"))
    assert (failed.status, failed.times, failed.tflops) == (status, None, None)
    first_line = str(error).splitlines()[0]
    assert failed.message == f"{type(error).__name__}: {first_line}"
    assert [r.status for r in found.values()] == ["ok"] * 3
    assert f"torch triton sm90: {status}: {failed.message}" in printed


def test_a_peer_that_is_absent_says_why(run):
    factories = job("a").factories | {PEER: raises(Absent("no such package"))}
    code, records, _ = run(job("a", factories=factories))
    assert code == 0
    found = {r.label: (r.status, r.message) for r in records}
    assert found == {"torch triton sm90": ("ok", None), "FA2": ("absent", "no such package")}


@pytest.mark.parametrize("stage", ["run", "result", "check"])
def test_a_call_that_fails_is_a_row(run, stage):
    error = raises(RuntimeError("later"))
    call = Call(error if stage == "run" else str, error if stage == "result" else lambda x: (x,))
    check = error if stage == "check" else lambda arrays: 0.5
    broken = job("a", check=lambda tensors: check, factories={PEER: lambda tensors: call})
    _, records, _ = run(broken, job("b"))
    assert [(r.label, r.status) for r in records] == [
        ("FA2", "failed"), ("torch triton sm90", "ok"), ("FA2", "ok"),
    ]  # fmt: skip


@pytest.mark.parametrize("stage", ["inputs", "check", "timer"])
def test_a_case_that_fails_is_a_row_of_each_implementation(run, stage):
    error = raises(MemoryError("out of memory"))
    broken = job("a") if stage == "timer" else job("a", **{stage: error})
    code, records, _ = run(broken, timer=error)
    assert code == 0
    assert [(r.label, r.status) for r in records] == [
        ("torch triton sm90", "out of memory"),
        ("FA2", "out of memory"),
    ]


def test_what_cannot_be_timed_does_not_take_the_others_with_it(run):
    def timer(calls):
        if PEER in calls:
            raise RuntimeError("a trace without kernels")
        return fake_timer(calls)

    _, records, _ = run(job("a"), timer=timer)
    assert {r.label: r.status for r in records} == {"torch triton sm90": "ok", "FA2": "failed"}


class Memory:
    """Stands for what takes memory; counts what something still refers to."""

    def __init__(self):
        self.held = []

    def take(self):
        taken = Memory()
        self.held.append(weakref.ref(taken))
        return taken

    @property
    def in_use(self):
        return sum(reference() is not None for reference in self.held)


def test_what_does_not_fit_beside_the_others_is_timed_after_them(run):
    memory, timed = Memory(), []

    def heavy(tensors):
        if memory.in_use:
            raise MemoryError("out of memory")
        return factory("heavy")(tensors)

    def light(tensors):
        graph = memory.take()
        return Call(lambda: graph and "done", lambda result: (result,))

    def timer(calls):
        timed.append([subject.implementation for subject in calls])
        return fake_timer(calls)

    factories = {
        Subject("light"): light,
        Subject("heavy"): heavy,
        Subject("other"): factory("other"),
    }
    _, records, _ = run(job("a", factories=factories), timer=timer)
    assert timed == [["light"], ["heavy", "other"]]
    assert [r.status for r in records] == ["ok"] * 3


def test_memory_is_released_once_nothing_refers_to_it(run):
    memory, in_use = Memory(), []

    def works(tensors):
        graph = memory.take()
        return Call(lambda: graph and "done", lambda result: (result,))

    def too_large(tensors):
        taken = memory.take()
        raise MemoryError(f"out of memory {taken}")

    broken = job("a", inputs=memory.take, factories={OURS: works, PEER: too_large})
    run(broken, release=lambda: in_use.append(memory.in_use))
    inputs, graph = 1, 1
    # PEER fails, OURS is timed, PEER fails again, the job is done.
    assert in_use == [inputs + graph, inputs, inputs, 0]


@pytest.mark.parametrize("stage", ["inputs", "factory", "timer"])
def test_ctrl_c_keeps_what_is_measured(run, stage):
    interrupt = raises(KeyboardInterrupt)
    second = {
        "inputs": job("b", inputs=interrupt),
        "factory": job("b", factories={OURS: interrupt}),
        "timer": job("b"),
    }[stage]

    def timer(calls):
        times = fake_timer(calls)
        return interrupt() if stage == "timer" and timer.calls.pop() == "b" else times

    timer.calls = ["b", "a"]
    code, records, printed = run(job("a"), second, job("c"), timer=timer)
    assert code == 130
    assert [r.case["name"] for r in records] == ["a", "a"]
    assert "2.00" in printed
    assert "Interrupted; what was measured is kept." in printed
