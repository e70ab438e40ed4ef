import io
import math
import time
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
from rich.console import Console

from bench.job import Call, Entry, Job
from bench.records import Times, load
from bench.runner import NO_JOURNAL, Instruments, run_suite
from bench.sampling import Sample, Sampler
from bench.timing import Timing
from tests.bench.conftest import raises
from twin_attention.interop.parity.subjects.absent import Absent

OURS, PEER = Entry("torch triton", "sm90"), Entry("FA2")
TIMING = Timing(
    busy=Times(2.0, 1.9, 2.1), span=Times(2.5, 2.4, 2.6), host=Times(0.1, 0.1, 0.1), kernels=("k",),
    events=2.6, memory=1024,
)  # fmt: skip


def fake_timer(calls):
    return {subject: replace(TIMING, kernels=(call(),)) for subject, call in calls.items()}


def factory(name, result=lambda result: (result,)):
    return lambda tensors: Call(lambda: f"{name} of {tensors}", result)


FACTORIES = {subject: factory(subject.implementation) for subject in (OURS, PEER)}


def job(name, **changes):
    made = Job(
        case={"name": name, "batch": 1},
        operation="forward",
        flops=4 * 10**9,
        bytes=6 * 10**6,
        inputs=lambda: "tensors",
        factories=FACTORIES,
    )
    return replace(made, **changes)


def read():
    return Sample(0.0, 1980.0, 3201.0, 500.0, 60.0, 0)


INSTRUMENTS = Instruments(fake_timer, lambda x: x, lambda: Sampler(read), lambda: None)


@pytest.fixture
def run(tmp_path, origin):
    path = tmp_path / "records.jsonl"

    def run(
        *jobs, timer=fake_timer, origin=origin, path=path, resume=False, journal=NO_JOURNAL,
        deadline=math.inf, **changes,
    ):  # fmt: skip
        console = Console(file=io.StringIO(), width=200)
        instruments = INSTRUMENTS._replace(time=timer, **changes)
        code = run_suite(jobs, origin, instruments, console, path, resume, journal, deadline)
        records = load(path) if path is not None and path.exists() else []
        return code, records, console.file.getvalue()

    return run


def statuses(records):
    return [(r.case["name"], r.implementation, r.status) for r in records]


def test_a_record_holds_what_was_measured(run, origin):
    code, records, printed = run(job("a", reads=4, writes=2))
    assert code == 0
    assert statuses(records) == [("a", "torch triton", "ok"), ("a", "FA2", "ok")]
    ours = records[0]
    assert (ours.times, ours.span, ours.host) == (TIMING.busy, TIMING.span, TIMING.host)
    assert (ours.events, ours.memory) == (2.6, 1024)
    assert ours.kernels == ("torch triton of tensors",)
    assert (ours.tflops, ours.bytes_per_second) == (2.0, 3e9)
    assert (ours.reads, ours.writes, ours.error) == (4, 2, None)
    assert ours.gpu["sm_mhz"] == 1980.0
    assert {name: getattr(ours, name) for name in origin} == origin
    assert "2.00" in printed


def test_a_job_may_bring_a_timer_no_rates_and_what_its_compiler_plans(run):
    def timer(calls):
        changes = {"busy": Times(0.5, 0.5, 0.5), "memory": None}
        return {s: replace(t, **changes) for s, t in fake_timer(calls).items()}

    planned = {OURS: lambda tensors: Call(lambda: "out", None, saved=7, planned=lambda: 9)}
    _, records, _ = run(job("a", time=timer, flops=0, bytes=0, factories=planned), job("b"))
    assert [r.times.median for r in records] == [0.5, 2.0, 2.0]
    first = records[0]
    assert (first.tflops, first.bytes_per_second, first.held, first.memory) == (None, None, 7, 9)


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


@pytest.mark.parametrize(("error", "status"), [(1.0, "ok"), (1.1, "refused by parity"),
                                               (float("nan"), "refused by parity")])  # fmt: skip
def test_only_what_is_right_is_timed(run, error, status):
    made, timed = [], []

    def check(tensors):
        made.append(tensors)
        return lambda arrays: error if arrays == ("torch triton of tensors",) else 0.1

    def timer(calls):
        timed.extend(calls)
        return fake_timer(calls)

    unchecked = Entry("no result")
    factories = FACTORIES | {unchecked: factory("no result", result=None)}
    _, records, printed = run(job("a", check=check, factories=factories), timer=timer)
    found = {r.implementation: (r.status, r.error) for r in records}
    assert found["torch triton"] == (status, pytest.approx(error, nan_ok=True))
    assert found["FA2"] == ("ok", 0.1)
    assert found["no result"] == ("ok", None)
    assert timed == [*([OURS] if status == "ok" else []), PEER, unchecked]
    assert made == ["tensors"]  # the oracle runs once a job
    if status != "ok":
        assert f"torch triton sm90: refused by parity: its error is {error:.3g} times" in printed


def test_resume_measures_what_is_missing_and_shows_all(run, origin):
    run(job("a", factories={OURS: FACTORIES[OURS]}))
    timed = []

    def timer(calls):
        timed.append(list(calls))
        return fake_timer(calls)

    code, records, printed = run(job("a"), job("b"), timer=timer, resume=True)
    assert code == 0
    assert timed == [[PEER], [OURS, PEER]]
    assert [r.case["name"] for r in records] == ["a", "a", "b", "b"]
    assert printed.count("torch triton sm90") == 2
    assert printed.count("1.00") == 4  # ratios to the peer, also of what was there
    _, again, _ = run(job("a"), resume=True, origin=origin | {"commit": "ba9876543210"})
    assert len(again) == 6


@pytest.mark.parametrize(
    ("error", "again"),
    [(RuntimeError("the card fell off"), 1), (MemoryError("out of memory"), 0), (Absent("no"), 0)],
)
def test_resume_tries_again_what_failed_and_nothing_else(run, error, again):
    run(job("a", factories=FACTORIES | {OURS: raises(error)}))
    _, records, _ = run(job("a"), resume=True)
    assert [r.status for r in records[2:]] == ["ok"] * again


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("no kernel\nfor this"), "failed"),
        (NotImplementedError("head_dim"), "failed"),
        (MemoryError("CUDA out of memory. Tried to allocate"), "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying"), "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Failed to allocate request"), "out of memory"),
        (RuntimeError("out of resource: shared memory"), "failed"),
        (Absent("no such package"), "absent"),
    ],
)
def test_an_implementation_that_fails_is_a_row_and_the_run_goes_on(run, error, status):
    code, records, printed = run(job("a", factories=FACTORIES | {OURS: raises(error)}), job("b"))
    assert code == 0
    failed, *others = sorted(records, key=lambda r: r.status == "ok")
    assert (failed.case["name"], failed.label) == ("a", "torch triton sm90")
    assert (failed.status, failed.times, failed.tflops) == (status, None, None)
    first_line = str(error).splitlines()[0]
    named = first_line if status == "absent" else f"{type(error).__name__}: {first_line}"
    assert failed.message == named
    assert [r.status for r in others] == ["ok"] * 3
    assert f"torch triton sm90: {status}: {failed.message}" in printed


@pytest.mark.parametrize("stage", ["run", "result", "check", "inputs", "oracle", "timer"])
def test_what_fails_is_a_row_of_each_implementation_and_the_run_goes_on(run, stage):
    error = raises(MemoryError("out of memory"))
    call = Call(error if stage == "run" else str, error if stage == "result" else lambda x: (x,))
    check = error if stage == "check" else lambda arrays: 0.5
    made = {
        "check": lambda tensors: check,
        "factories": dict.fromkeys(FACTORIES, lambda tensors: call),
    }
    of_job = {"inputs": "inputs", "oracle": "check", "timer": "time"}
    made |= {of_job[stage]: error} if stage in of_job else {}
    code, records, _ = run(job("a", **made), job("b"))
    assert code == 0
    assert [r.status for r in records] == ["out of memory"] * 2 + ["ok"] * 2


def test_what_cannot_be_timed_does_not_take_the_others_with_it(run):
    def timer(calls):
        if PEER in calls:
            raise RuntimeError("a trace without kernels")
        return fake_timer(calls)

    _, records, _ = run(job("a"), timer=timer)
    assert {r.label: r.status for r in records} == {"torch triton sm90": "ok", "FA2": "failed"}


class Memory:
    def __init__(self):
        self.held = []

    def take(self):
        taken = Memory()
        self.held.append(weakref.ref(taken))
        return taken

    def call(self, tensors):
        graph = self.take()
        return Call(lambda: graph and "done", lambda result: (result,))

    @property
    def in_use(self):
        return sum(reference() is not None for reference in self.held)


def test_what_does_not_fit_beside_the_others_is_timed_after_them(run):
    memory, timed = Memory(), []

    def heavy(tensors):
        if memory.in_use:
            raise MemoryError("out of memory")
        return factory("heavy")(tensors)

    def timer(calls):
        timed.append([subject.implementation for subject in calls])
        return fake_timer(calls)

    makers = {"light": memory.call, "heavy": heavy, "other": factory("other")}
    factories = {Entry(name): make for name, make in makers.items()}
    _, records, _ = run(job("a", factories=factories), timer=timer)
    assert timed == [["light"], ["heavy", "other"]]
    assert [r.status for r in records] == ["ok"] * 3


def test_memory_is_released_once_nothing_refers_to_it(run):
    memory, in_use = Memory(), []

    def too_large(tensors):
        taken = memory.take()
        raise MemoryError(f"out of memory {taken}")

    broken = job("a", inputs=memory.take, factories={OURS: memory.call, PEER: too_large})
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
        "timer": job("b", time=interrupt),
    }[stage]
    code, records, printed = run(job("a"), second, job("c"))
    assert code == 130
    assert [r.case["name"] for r in records] == ["a", "a"]
    assert "2.00" in printed
    assert "Interrupted; what was measured is kept." in printed


def test_what_would_end_after_the_deadline_is_skipped(run):
    def slow(calls):
        time.sleep(0.2)
        return fake_timer(calls)

    def deadline():
        return time.monotonic() + 0.3

    jobs = [job(name, time=slow) for name in "abc"]
    _, records, printed = run(*jobs, deadline=deadline())
    found = {record.case["name"]: (record.status, record.times is None) for record in records}
    assert found == {"a": ("ok", False), "b": ("skipped", True), "c": ("skipped", True)}
    assert printed.count("b forward: skipped, the time is up") == 1
    _, again, _ = run(*jobs, resume=True)
    assert [record.status for record in again[6:]] == ["ok"] * 4
    assert "skipped" not in printed.split("implementation")[1]
