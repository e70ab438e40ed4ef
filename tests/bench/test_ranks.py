from types import SimpleNamespace

import pytest
import torch

from bench.job import Entry
from bench.ranks import in_turn, together
from bench.records import Times
from bench.suites import context
from bench.timing import Timing
from twin_attention.contract.transfers import Rows

CASE = context.ContextCase("causal-small", 1, 8, 8, 1, 1, 16, causal=True, ranks=2)


def test_times_are_those_of_the_slowest_rank_and_of_a_share_of_the_whole(monkeypatch):
    waited, timed = [], []
    times = Times(4.0, 2.0, 6.0)

    def time_calls(calls, wait):
        timed.extend(calls.values())
        return dict.fromkeys(calls, Timing(times, None, times, ("a",), 8.0, 100))

    clock = iter([0, 1, 0, 1, 0, 1, 0, 3, 0, 2, 0, 4])  # seconds of three calls of each rank
    monkeypatch.setattr(together, "time_calls", time_calls)
    monkeypatch.setattr(in_turn.time, "perf_counter", lambda: next(clock))
    fast, slow, whole = (lambda: "fast"), (lambda: "slow"), (lambda: "whole")
    subjects = Entry("torch rank", "sm90"), Entry("torch triton dense", "sm90")
    calls = dict(zip(subjects, (in_turn.Ranks([fast, slow]), whole), strict=True))
    found = together.time_ranks(2, calls, waited.append)
    assert timed == [slow, whole]
    assert waited == ["fast"] * 3 + ["slow"] * 3
    assert found[subjects[0]] == Timing(times, None, times, ("a",), 8.0, 100)
    half = Times(2.0, 1.0, 3.0)
    assert found[subjects[1]] == Timing(half, None, times, ("a",), 4.0, 100)


def test_a_group_of_processes():
    job = context.job(CASE, "forward", "sm90")
    tensors = job.inputs("cpu")
    subjects = Entry("torch ring", "sm90"), Entry("torch gather", "sm90")
    calls = {subject: job.factories[subject](tensors) for subject in subjects}
    for call in calls.values():
        assert job.check(tensors)(call.result(call.run())) <= 1
    found = together.time_ranks(2, {subject: call.run for subject, call in calls.items()})
    for timing in found.values():
        assert 0 < timing.busy.fastest <= timing.busy.median

    group = together.group_of(2, "cpu")
    assert together.group_of(2, "cpu") is group
    with pytest.raises(RuntimeError, match="rank 0: KeyError: 'dance'"):
        calls[subjects[0]].run.ask("dance")
    assert together.group_of.cache_info().currsize == 0
    assert not any(process.is_alive() for process in group.processes)


def test_keys_from_the_host_stay_until_the_stream_that_waits_has_read_them(monkeypatch):
    done = []
    stream = SimpleNamespace(wait_event=lambda event: done.append(event))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    keys = [SimpleNamespace(record_stream=lambda x, i=i: done.append((i, x))) for i in range(2)]
    in_turn.Copied("event", keys).wait()
    assert done == ["event", (0, stream), (1, stream)]


def test_gradients_of_each_call_go_to_the_same_memory_of_the_host():
    shards, sent = [tuple(torch.randn(2, 1, 8, 1, 16)) for _ in range(2)], {}
    sender, receiver = (in_turn.FromHost(rank, shards, sent) for rank in range(2))
    places = []
    for _ in range(2):
        gradients = tuple(torch.randn(2, 1, 4, 1, 16))
        sender.exchange(gradients, [Rows(1, 1, 4, 5)], [], of_gradients=True)
        arrived = receiver.exchange(gradients, [], [Rows(0, 1, 4, 5)], of_gradients=True).wait()
        for x, y in zip(arrived, gradients, strict=True):
            torch.testing.assert_close(x, y[:, 1:4], rtol=0, atol=0)
        places.append(sent[1, 0, 5])
    for x, y in zip(*places, strict=True):
        assert x is y
