import doctest
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import torch

from bench import peaks, sampling, timing
from bench.records import Times
from bench.timing import Kernel, Plan, device_times, split, summarize, time_calls, time_host

FLUSH = "vectorized_elementwise_kernel<4, FillFunctor<signed char>, array>"


def trace(*calls):
    """Kernels of calls, each given as (name, start, end) after two fills."""
    kernels = []
    for i, call in enumerate(calls):
        kernels.append(Kernel(FLUSH, 1000 * i, 1000 * i + 50))
        kernels.append(Kernel(FLUSH, 1000 * i + 50, 1000 * i + 100))
        kernels += [Kernel(name, 1000 * i + start, 1000 * i + end) for name, start, end in call]
    return kernels


COPY_AND_KERNEL = [("copy", 200, 240), ("flash", 250, 310)]


def test_times_are_medians_of_rounds_and_percentiles_of_all_calls():
    times = summarize([[1.0, 2.0, 3.0], [50.0, 60.0, 70.0], [1.0, 2.0, 4.0]])
    assert (times.median, times.fastest, times.slowest) == (2.0, 2.0, 60.0)
    times = summarize([[float(i) for i in range(6)], [float(i) for i in range(6, 11)]])
    assert (times.p20, times.p80) == (2.0, 8.0)
    assert Times(2.0, 1.9, 2.2).spread == pytest.approx(0.15)


@pytest.mark.parametrize("rounds", [[], [[]], [[1.0], []]])
def test_a_round_without_calls_is_refused(rounds):
    with pytest.raises(ValueError, match="rounds: expected a call or more in each"):
        summarize(rounds)


@pytest.mark.parametrize(("module", "examples"), [(timing, 1), (peaks, 1), (sampling, 2)])
def test_the_examples_run(module, examples):
    assert doctest.testmod(module) == doctest.TestResults(failed=0, attempted=examples)


def test_a_trace_is_split_at_the_fills():
    first, second = [("a", 200, 210)], [("b", 200, 210), ("c", 220, 230)]
    turns = split(reversed(trace(first, second, second)), [1, 2])
    names = [[[kernel.name for kernel in call] for call in calls] for calls in turns]
    assert names == [[["a"]], [["b", "c"], ["b", "c"]]]
    stray = Kernel("stray", -10, -5)  # before the first fill
    assert split([stray, *trace([("a", 200, 210)])], [1])[0][0][0].name == "a"


@pytest.mark.parametrize("calls", [[COPY_AND_KERNEL], [COPY_AND_KERNEL, []], [[], COPY_AND_KERNEL]])
def test_a_trace_that_lacks_something_is_refused(calls):
    with pytest.raises(RuntimeError, match="trace: expected kernels of 2 calls, got 1"):
        split(trace(*calls), [2])


@pytest.mark.parametrize(
    ("kernels", "busy", "span"),
    [
        (COPY_AND_KERNEL, 0.100, 0.110),  # a gap
        ([("a", 200, 300), ("b", 250, 280), ("c", 290, 310)], 0.110, 0.110),  # side by side
    ],
)
def test_busy_leaves_gaps_out_and_span_counts_them(kernels, busy, span):
    (calls,) = split(trace(kernels, kernels), [2])
    found = [times.median for times in device_times([calls, calls])]
    assert found == pytest.approx([busy, span])


@pytest.fixture
def device(monkeypatch):
    asked = SimpleNamespace(turns=[], plans={})
    microseconds = {"short": 40, "long": 600, "longest": 30_000, "jax": 600}
    events = {"long": iter([0.61])}

    def call(name):
        return lambda: jnp.zeros(1) if name == "jax" else SimpleNamespace(name=name)

    calls = {name: call(name) for name in microseconds}
    names = {id(call): name for name, call in calls.items()}

    def traced(turns, wait):
        kernels = []
        for call, plan in turns:
            name = names[id(call)]
            asked.turns.append(name)
            asked.plans[name] = plan
            kernels += [[("cold_kernel", 200, 999)]] * plan.warmup
            kernels += [[(f"{name}_kernel", 200, 200 + microseconds[name])]] * plan.repeats
        return trace(*kernels)

    def by_events(call, round_ms):
        return next(events[names[id(call)]])

    monkeypatch.setattr(timing, "_trace", traced)
    monkeypatch.setattr(timing, "_peak_memory", lambda call: 4096)
    monkeypatch.setattr(timing, "_by_events", by_events)
    asked.calls = calls
    return asked


def test_calls_are_interleaved_and_the_order_turns_around(device):
    found = time_calls(device.calls, lambda result: None, rounds=3)
    order = ["short", "long", "longest", "jax"]
    assert device.turns == [*order, *reversed(order), *order]
    assert {name: t.busy.median for name, t in found.items()} == pytest.approx(
        {"short": 0.04, "long": 0.6, "longest": 30.0, "jax": 0.6}
    )
    assert {name: t.kernels for name, t in found.items()} == {
        name: (f"{name}_kernel",) for name in order
    }
    assert all(0 < t.host.median < 100 for t in found.values())


def test_torch_is_queued_and_events_are_of_calls_that_are_neither_short_nor_long(device):
    found = time_calls(device.calls, lambda result: None)
    queued = {name: plan.queued for name, plan in device.plans.items()}
    assert queued == {"short": True, "long": True, "longest": True, "jax": False}
    assert {name: (t.events, t.memory) for name, t in found.items()} == {
        "short": (None, 4096), "long": (0.61, 4096), "longest": (None, 4096), "jax": (None, None),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("host", "total", "plan"),
    [  # milliseconds until a call returns, and until it is done
        (0.1, 100.0, Plan(warmup=1, repeats=3, fills=1, queued=True, rest=0.1)),
        (0.1, 2.5, Plan(warmup=8, repeats=12, fills=1, queued=True, rest=0.1)),
        (1.0, 1.2, Plan(warmup=10, repeats=20, fills=4, queued=True, rest=0.1)),
        (0.005, 0.01, Plan(warmup=20, repeats=20, fills=4, queued=True, rest=0)),
    ],
)
def test_a_plan_fills_a_round_hides_launches_and_lets_the_card_rest(monkeypatch, host, total, plan):
    clock = iter([1.0, 1.0 + host / 1e3, 1.0 + total / 1e3])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert timing._plan(lambda: None, lambda result: None, round_ms=30.0) == plan


def test_a_call_of_jax_waits_for_one_fill():
    plan = timing._plan(lambda: jnp.zeros(1), lambda result: None, round_ms=30.0)
    assert (plan.fills, plan.queued) == (1, False)


@pytest.fixture
def host(monkeypatch):
    asked = SimpleNamespace(now=0.0, done=[])

    def call(name, *turns):
        costs = (cost for turn in turns for cost in turn)

        def run():
            asked.done.append(name)
            asked.now += next(costs) / 1e3
            return name

        return run

    def wait(result):
        asked.done.append(f"wait {result}")
        asked.now += 5.0  # seconds that nothing may count

    monkeypatch.setattr(timing.time, "perf_counter", lambda: asked.now)
    monkeypatch.setattr(timing, "_HOST_WARMUP", 2)
    asked.call, asked.wait = call, wait
    return asked


def test_the_host_does_not_wait_between_calls_and_the_order_turns_around(host):
    turns = [[1.0] * 2] + [[1.0] * 3] * 3
    calls = {name: host.call(name, *turns) for name in "ab"}
    time_host(calls, host.wait, rounds=3, repeats=3)
    warm = ["a", "a", "wait a", "b", "b", "wait b"]
    a, b = ["a"] * 3 + ["wait a"], ["b"] * 3 + ["wait b"]
    assert host.done == [*warm, *a, *b, *b, *a, *a, *b]


def test_the_hosts_time_is_the_median_of_turns_without_warm_up_and_waits(host):
    call = host.call("a", [900.0, 900.0], [0.1, 0.3], [0.4, 0.4], [0.9, 0.9])
    (found,) = time_host({"a": call}, host.wait, rounds=3, repeats=2).values()
    assert found.host == found.busy
    assert (found.host.median, found.host.fastest, found.host.slowest) == pytest.approx(
        (0.4, 0.2, 0.9)
    )
    assert (found.host.p20, found.span, found.kernels) == (None, None, ())


def test_an_error_shows_up_while_waiting():
    class Broken:
        def block_until_ready(self):
            raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        timing.wait_for([torch.zeros(1), Broken()])
