"""Exchanges by copies between GPUs: the protocol, in any order of the streams; two GPUs."""

import ctypes
import itertools
import os
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_attn.distributed import context_plan
from torch_attn.distributed.copies import Arena, arena_bytes
from twin_attention.contract.exchange import exchange_steps
from twin_attention.contract.spec import Window

SLOT_BYTES = 2**14


class Streams:
    """Streams, of which any may run next, and a driver for them."""

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
        """Queue what need not wait."""
        self.queues[stream].append(lambda: (act(), True)[1])

    def follow(self, stream, other):
        """Let a stream wait for all that another has by now, as for an event."""
        reached = []
        self.put(other, lambda: reached.append(True))
        self.queues[stream].append(lambda: bool(reached))

    def run(self, choose):
        """Run all that is queued; fail if each stream waits for another."""
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
    """Hold what arrived to the rows of their senders."""
    for n, x in enumerate(into or ()):
        rows = [keys[x.rank][n][:, x.start : x.end] for x in received]
        assert torch.equal(x, torch.cat(rows, 1))


ON_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def run_two(tmp_path, *arguments, **environment):
    """Return how two processes ended, and what they wrote."""
    command = [sys.executable, "-m", "tests.torch_attn.context_processes"]
    files = [str(tmp_path / str(next(FILES))), "cuda", *arguments]
    started = [
        subprocess.Popen(
            [*command, str(rank), "2", *files], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=os.environ | environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[0] for process in started]
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
