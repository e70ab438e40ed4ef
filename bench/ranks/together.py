"""Ranks that run together, each in a process and on a GPU of its own."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench.job import Call, Entry
from bench.ours import for_target
from bench.problems import attention_tensors
from bench.ranks.in_turn import Ranks, assembled, attend, shares
from bench.records import Times
from bench.timing import Run, Timing, Wait, summarize, time_calls, wait_for
from twin_attention.interop.parity.subjects.absent import Absent
from twin_attention.interop.parity.torch_calls import leaves, prepare_torch
from twin_attention.targets.target import use_target

_ROUNDS, _WARMUP, _TURNS, _CALLS = 3, 1, 4, 5  # of ranks that are timed together; calls of a turn
_REST = 0.1  # seconds before a turn: a card at its power cap regains its clock
_FILLS, _FILL_BYTES = 24, 2**28  # before a turn: 2 ms on an H100, while hosts launch the first call
_PREPARED = 2  # problems of a group that are kept: those of a case
_LIMIT = 300.0  # seconds for an answer of a rank, which compiles first


class Group:
    def __init__(self, size: int, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = there, rank, size, store, device
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(here)
            self.processes.append(process)
        self._end = weakref.finalize(self, _end, self._pipes, self.processes)

    def ask(self, question: str, problem: _Problem) -> list[Any]:
        """Return the answer of each rank to "run", "results" or "time".

        RuntimeError: a rank failed, or did not answer in time. That ends the group.
        """
        for pipe in self._pipes:
            pipe.send((question, problem))
        found = []
        for rank, pipe in enumerate(self._pipes):
            answer = pipe.recv() if pipe.poll(_LIMIT) else f"no answer in {_LIMIT:.0f} s"
            if isinstance(answer, str):
                group_of.cache_clear()
                self._end()
                raise RuntimeError(f"rank {rank}: {answer}")
            found.append(answer)
        return found


@cache
def group_of(size: int, device: str) -> Group:
    return Group(size, device)


def _end(pipes: Sequence[Any], processes: Sequence[Any]) -> None:
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(10)
        process.kill()


class _Problem(NamedTuple):
    target: str
    case: Any
    operation: str
    exchange: str

    def prepare(self, rank: int, device: str) -> Run:
        tensors = attention_tensors(self.case.whole, device)
        *inputs, dout = shares(self.case, tensors, rank)
        run = partial(attend, self.case, dist.group.WORLD, self.exchange)
        with use_target(self.target):
            call = Call(prepare_torch(run, self.operation, inputs, dout), None)
        return for_target(call, self.target).run


class Together:
    def __init__(self, group: Group, problem: _Problem) -> None:
        self._group, self._problem = group, problem

    def __call__(self) -> None:
        self.ask("run")

    def ask(self, question: str) -> list[Any]:
        return self._group.ask(question, self._problem)


def _serve(pipe: Any, rank: int, size: int, store: str, device: str) -> None:
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    prepare = lru_cache(maxsize=_PREPARED)(partial(_Problem.prepare, rank=rank, device=device))
    answers: dict[str, Callable[[Run], Any]] = {
        "run": lambda run: len(leaves(run())),
        "results": lambda run: [x.detach().cpu() for x in leaves(run())],
        "time": lambda run: list(_rounds(run, device)),
    }
    while True:
        try:
            question, problem = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(answers[question](prepare(problem)))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def _rounds(run: Run, device: str) -> Iterator[list[float]]:
    """Yield the milliseconds of calls of each round, those of the slowest rank."""
    for _ in range(_ROUNDS):
        found = [_together(run, device) for _ in range(_WARMUP + _TURNS)]
        yield found[_WARMUP:]


def _together(run: Run, device: str) -> float:
    """Return the milliseconds of a call on the slowest rank, of several one after the other.

    All ranks begin together, and the host may run ahead, as in training.
    """
    time.sleep(_REST)
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
        filled = torch.empty(_FILL_BYTES, dtype=torch.int8, device=device)
        for _ in range(_FILLS):
            filled.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
    begin = time.perf_counter()
    for _ in range(_CALLS):
        run()
    milliseconds = 1e3 * (time.perf_counter() - begin)
    if device == "cuda":
        end.record()
        end.synchronize()
        milliseconds = start.elapsed_time(end)
    longest = torch.tensor(milliseconds / _CALLS, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def make_call(
    target: str, case: Any, operation: str, tensors: list[Tensor], exchange: str = "ring"
) -> Call:
    device = tensors[0].device.type
    if device == "cuda" and torch.cuda.device_count() < case.ranks:
        raise Absent(f"needs {case.ranks} GPUs")
    call = Together(group_of(case.ranks, device), _Problem(target, case, operation, exchange))

    def result(_: Any) -> list[Tensor]:
        found = assembled(case, call.ask("results"), tensors[0].ndim == 3)
        return [x.to(tensors[0].device) for x in found]

    return Call(call, result)


def time_ranks(size: int, calls: Mapping[Entry, Run], wait: Wait = wait_for) -> dict[Entry, Timing]:
    """Time the slowest rank, and the whole sequence ("dense", divided by `size`), by ranks."""
    groups = {s: run for s, run in calls.items() if isinstance(run, Together)}
    others = {
        s: run.slowest(wait) if isinstance(run, Ranks) else run
        for s, run in calls.items()
        if s not in groups
    }
    found = time_calls(others, wait) if others else {}
    for subject in found:
        if subject.implementation.endswith("dense"):
            found[subject] = _divided(found[subject], size)
    for subject, group in groups.items():
        times = summarize(group.ask("time")[0])
        found[subject] = Timing(busy=times, span=None, host=times, kernels=())
    return found


def _divided(timing: Timing, size: int) -> Timing:
    def part(x: float | None) -> Any:
        return None if x is None else x / size

    def times(x: Times | None) -> Any:
        return x and Times(*(part(value) for value in vars(x).values()))

    return replace(
        timing, busy=times(timing.busy), span=times(timing.span), events=part(timing.events)
    )
