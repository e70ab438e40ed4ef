"""Ranks of context parallel attention that are timed: in turn, and in processes."""

import pytest

from bench import ranks
from bench.job import Subject
from bench.records import Times
from bench.suites import context
from bench.timing import Timing

CASE = context.ContextCase("causal-small", 1, 8, 8, 1, 1, 16, causal=True, ranks=2)


def test_times_are_those_of_the_slowest_rank_and_of_a_share_of_the_whole(monkeypatch):
    waited, timed = [], []
    times = Times(4.0, 2.0, 6.0)

    def time_calls(calls, wait):
        timed.extend(calls.values())
        return dict.fromkeys(calls, Timing(times, None, times, ("a",), 8.0, 100))

    clock = iter([0, 1, 0, 1, 0, 1, 0, 3, 0, 2, 0, 4])  # seconds of three calls of each rank
    monkeypatch.setattr(ranks, "time_calls", time_calls)
    monkeypatch.setattr(ranks.time, "perf_counter", lambda: next(clock))
    fast, slow, whole = (lambda: "fast"), (lambda: "slow"), (lambda: "whole")
    subjects = Subject("torch rank", "sm90"), Subject("torch triton dense", "sm90")
    calls = dict(zip(subjects, (ranks.Ranks([fast, slow]), whole), strict=True))
    found = ranks.time_ranks(2, calls, waited.append)
    assert timed == [slow, whole]
    assert waited == ["fast"] * 3 + ["slow"] * 3
    assert found[subjects[0]] == Timing(times, None, times, ("a",), 8.0, 100)
    half = Times(2.0, 1.0, 3.0)
    assert found[subjects[1]] == Timing(half, None, times, ("a",), 4.0, 100)


def test_a_group_of_processes():
    job = context.job(CASE, "forward", "sm90")
    tensors = job.inputs("cpu")
    subjects = Subject("torch ring", "sm90"), Subject("torch gather", "sm90")
    calls = {subject: job.factories[subject](tensors) for subject in subjects}
    for call in calls.values():
        assert job.check(tensors)(call.result(call.run())) <= 1
    found = ranks.time_ranks(2, {subject: call.run for subject, call in calls.items()})
    for timing in found.values():
        assert 0 < timing.busy.fastest <= timing.busy.median

    group = ranks.group_of(2, "cpu")
    assert ranks.group_of(2, "cpu") is group
    with pytest.raises(RuntimeError, match="rank 0: KeyError: 'dance'"):
        calls[subjects[0]].run.ask("dance")
    assert ranks.group_of.cache_info().currsize == 0
    assert not any(process.is_alive() for process in group.processes)
