"""Exchanges by copies between GPUs, in any order of the streams."""

import ctypes
import itertools
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import assert_within_budget
from tests.torch_attn.test_context import CASES, attend, problem
from torch_attn.distributed import Transfer, context_plan, copies
from torch_attn.distributed.copies import Arena, arena_bytes
from twin_attention.contract.spec import Window
from twin_attention.contract.transfers import exchange_steps
from twin_attention.interop.parity.ranks import SimulatedPeers, run_ranks

SLOT_BYTES = 2**14


class Streams:
    """Any of the streams may run next."""

    def __init__(self, number):
        self.queues = [[] for _ in range(number)]

    def write(self, stream, address, number):
        self.put(stream, lambda: setattr(ctypes.c_uint32.from_address(address), "value", number))

    def wait(self, stream, address, number):
        self.queues[stream].append(
            lambda: ctypes.c_uint32.from_address(address).value - number >= 0
        )

    def copy(self, stream, target, source, size):
        self.put(stream, lambda: ctypes.memmove(target, source, size))

    def put(self, stream, act):
        self.queues[stream].append(lambda: (act(), True)[1])

    def follow(self, stream, other):
        reached = []
        self.put(other, lambda: reached.append(True))
        self.queues[stream].append(lambda: bool(reached))

    def run(self, choose):
        """Fail if each stream waits for another."""
        while any(self.queues):
            order = choose([n for n, queue in enumerate(self.queues) if queue])
            for stream in order:
                if self.queues[stream][0]():
                    self.queues[stream].pop(0)
                    break
            else:
                raise AssertionError("the ranks wait for each other")


@settings(max_examples=40)
@given(
    st.integers(2, 4),
    st.sampled_from(["zigzag", "contiguous", "stripe", "balanced"]),
    st.sampled_from(["ring", "gather"]),
    st.integers(1, 2),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_what_comes_is_what_was_sent_in_any_order(size, layout, exchange, batch, rounds, random):
    """A rank reads what came while the next exchange goes on."""
    slots = min(2, size - 1)
    shape = arena_bytes(size, SLOT_BYTES, slots)
    memory = [torch.zeros(shape, dtype=torch.uint8) for _ in range(size)]
    arenas = [Arena(rank, memory, SLOT_BYTES, slots) for rank in range(size)]
    plan = context_plan(24 * size, size, layout, cu_seqlens=[0, 7, 50 if size > 2 else 30])
    steps = [exchange_steps(plan, Window(None, 0), exchange, rank) for rank in range(size)]
    streams, kept = Streams(2 * size), []  # of each rank, one that copies and one that reads
    for _ in range(rounds):
        keys = [tuple(torch.randn(2, batch, plan.local_len, 1, 16).half()) for _ in range(size)]
        kept.append(keys)  # until all has run
        for rank, arena in enumerate(arenas):
            copies, main, later = 2 * rank, 2 * rank + 1, None
            for step in steps[rank]:
                if not step.sent and [x.rank for x in step.received] == [rank]:
                    arena.number += 1  # keys are read where they are
                    continue
                program = arena.next(keys[rank], step.sent, step.received)
                streams.follow(copies, main)
                arena.run(program, keys[rank], streams, copies)
                if later is not None:
                    streams.put(main, later)
                streams.follow(main, copies)
                later = partial(check, program.into, step.received, keys)
            if later is not None:
                streams.put(main, later)
    streams.run(lambda ready: random.sample(ready, len(ready)))


def check(into, received, keys):
    for n, x in enumerate(into or ()):
        rows = [keys[x.rank][n][:, x.start : x.end] for x in received]
        assert torch.equal(x, torch.cat(rows, 1))


LEFT = set()  # threads that may query events while others capture graphs


def test_an_only_row_may_have_any_stride():
    """Torch calls it contiguous whatever the stride of an axis of one."""
    memory = [torch.zeros(arena_bytes(2, SLOT_BYTES, 1), dtype=torch.uint8) for _ in range(2)]
    plan, streams = context_plan(2, 2, "contiguous"), Streams(2)
    keys = [
        torch.randn(2, 1, 1, 2, 16).as_strided((2, 1, 1, 2, 16), (32, 9, 7, 16, 1)) for _ in "ab"
    ]
    for rank in range(2):
        arena = Arena(rank, memory, SLOT_BYTES, 1)
        (step,) = exchange_steps(plan, Window(), "gather", rank)
        program = arena.next(tuple(keys[rank]), step.sent, step.received)
        arena.run(program, tuple(keys[rank]), streams, rank)
        streams.put(rank, partial(check, program.into, step.received, keys))
    streams.run(lambda ready: ready)


class AtOnce:
    """A driver that does all at once; a rank that waits lets the others run."""

    def __init__(self, room):
        self.room = room

    def write(self, stream, address, number):
        ctypes.c_uint32.from_address(address).value = number

    def copy(self, stream, target, source, size):
        ctypes.memmove(target, source, size)

    def leave_captures(self):
        LEFT.add(threading.get_ident())

    def wait(self, stream, address, number):
        end = time.monotonic() + 60
        while ctypes.c_uint32.from_address(address).value < number:
            assert time.monotonic() < end, "the ranks wait for each other"
            with self.room.waiting():
                time.sleep(1e-4)


class CopyPeers(SimulatedPeers):
    """Ranks as threads on a CPU that exchange by copies."""

    def prepare(self, device, sizes):
        self.copies = copies.prepare_copies(self, torch.device("cuda", self.rank), CopyPeers.say)
        self.copies.reserve(sizes)

    def say(self, x):
        return self.gather_objects(x)

    def skip(self, device, of_gradients=False):
        self.copies.skip(of_gradients, self.at_once)

    def exchange(self, tensors, sent, received, of_gradients=False):
        tensors = tuple(x.contiguous() for x in tensors)
        into, waiting = self.copies.exchange(tensors, sent, received, of_gradients, self.at_once)
        return Transfer(into, (waiting,), tensors)


@pytest.fixture
def on_cpu(monkeypatch):
    """Every byte of memory is NaN first."""

    def symmetric_memory(group, device, size):
        own = torch.full((size,), 255, dtype=torch.uint8)
        own[:256] = 0  # the numbers
        return None, group.gather_objects(own)

    def query():
        if threading.get_ident() not in LEFT:
            faults.append("a query spoils what other threads capture")
        time.sleep(1e-5)  # lets others in
        return True

    def current_stream(device=None):
        if device is None:
            faults.append("a wait on the stream of any device")
        return stream

    faults = []
    stream = SimpleNamespace(cuda_stream=0, wait_event=lambda event: None)
    event = SimpleNamespace(record=lambda stream: None, query=query)
    group = SimpleNamespace(get_rank=lambda x: x.rank, get_world_size=lambda x: x.size)
    monkeypatch.setattr(copies, "symmetric_memory", symmetric_memory)
    monkeypatch.setattr(copies, "dist", group)
    monkeypatch.setattr(copies.private, "timeout_of", lambda *_: 60.0)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(threading, "excepthook", faults.append)
    for name, value in (("Stream", stream), ("Event", event)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    kept = {}  # ranks that make several calls

    def run(size, function):
        def on_rank(peers):
            monkeypatch.setattr(copies, "driver", lambda: AtOnce(peers.room))
            own = kept.setdefault(peers.rank, CopyPeers(peers.room, peers.rank))
            own.room = peers.room
            return function(own)

        return run_ranks(size, on_rank)

    yield run
    time.sleep(2 * copies._PERIOD)  # until those who watch have looked
    assert not faults


@pytest.mark.parametrize(
    ("size", "layout", "name"),
    [(2, "zigzag", "causal"), (3, "stripe", "window"), (4, "contiguous", "all-options")],
)
def test_calls_of_several_sizes(on_cpu, monkeypatch, size, layout, name):
    """Memory grows with a call; a ring and a gather have their own."""
    monkeypatch.setattr(copies, "_PERIOD", 1e-3)
    monkeypatch.setattr(copies.private, "timeout_of", lambda *_: -1.0)  # what is not done ends it
    calls = (24, "ring"), (40, "gather"), (40, "ring"), (24, "gather"), (24, "ring")
    for tokens, exchange in calls:
        plan = context_plan(tokens * size, size, layout)
        case = replace(CASES[name], seq_q=tokens * size, seq_kv=tokens * size)
        inputs, spec = problem(case, plan, "cpu")
        got = attend(on_cpu, case, plan, inputs, exchange=exchange, implementation="reference")
        assert_within_budget(got, inputs, spec)


def test_a_group_that_says_no_timeout_has_no_copies(monkeypatch):
    """As with backends other than NCCL, or if a private name of torch moved."""
    device = torch.device("cuda", 0)
    for backend in (None, lambda *_: object()):
        monkeypatch.setattr(copies.private, "backend_of", backend)
        assert copies.private.timeout_of("group", device) is None
    group = type("Group", (), {})()
    assert copies.prepare_copies(group, device, lambda _, x: [x, x]) is None
    assert copies.copies_of(group, device) is None
    options = SimpleNamespace(_timeout=timedelta(seconds=9))
    monkeypatch.setattr(copies.private, "backend_of", lambda *_: SimpleNamespace(options=options))
    assert copies.private.timeout_of("group", device) == 9.0


ON_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def run_two(tmp_path, *arguments, **environment):
    command = [sys.executable, "-m", "tests.torch_attn.context_processes"]
    files = [str(tmp_path / str(next(FILES))), "cuda", *arguments]
    started = [
        subprocess.Popen(
            [*command, str(rank), "2", *files], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=os.environ | environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=240)[0] for process in started]
    return [process.returncode for process in started], said


FILES = itertools.count()


@ON_TWO_GPUS
@pytest.mark.parametrize("copies", ["1", "0"])
def test_on_two_gpus(tmp_path, copies):
    codes, said = run_two(tmp_path, TWIN_ATTENTION_COPIES=copies)
    assert codes == [0, 0], said
    assert [f"copies {copies}" in text for text in said] == [True, True], said


@ON_TWO_GPUS
def test_a_rank_that_dies_ends_the_other(tmp_path):
    start = time.monotonic()
    codes, said = run_two(tmp_path, "dies", TWIN_ATTENTION_COPIES="1")
    assert codes[0] != 0, said
    assert "waited 10 s for another rank" in said[0]
    assert time.monotonic() - start < 90
