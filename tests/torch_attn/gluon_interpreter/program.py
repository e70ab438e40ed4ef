"""Programs: partitions that run in turn, barriers, and what the hardware does by itself."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from itertools import chain
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from tests.torch_attn.gluon_interpreter.values import Shared

NAMED_BARRIERS = 16  # of a program
MEMORY = 2**20  # bytes of all buffers that a program allocates, more than it has at a time
RESTLESSNESS = 0.02  # how often a partition gets another priority, where they are at random


class Mode(NamedTuple):
    """When things happen that the hardware does by itself, and who goes first; None is at random.

    Attributes:
        loads_early: loads and copies write when they are issued, else loads when nothing but they
            can go on, and copies when they are awaited.
        reads_early: products and stores read when they are issued, else when they are awaited.
        last_first: of the partitions that can run the last one goes first.
    """

    loads_early: bool | None = None
    reads_early: bool | None = None
    last_first: bool | None = None
    seed: int = 0


WRITES_FIRST = Mode(True, False, True)  # finds what is overwritten while it is read
READS_FIRST = Mode(False, True, False)  # finds what is read before it is written


class InterpreterError(RuntimeError):
    """A kernel did what no order of events allows."""


class DeadlockError(InterpreterError):
    """All partitions of a program wait."""


class Barrier:
    """An mbarrier; `met` has the bits of the partitions that arrived in the last phase."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = self.phase = 0
        self.arrived = self.met = 0

    def update(self, arrivals: int, expected: int, by: Partition | None = None) -> None:
        self.missing -= arrivals
        self.bytes += expected
        self.arrived |= by.bit if by else 0
        if self.missing < 0:
            raise InterpreterError(f"more than {self.count} arrivals at an mbarrier in a phase")
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count
            self.met, self.arrived = self.arrived, 0

    def __repr__(self) -> str:
        return f"phase {self.phase}, {self.missing} arrivals and {self.bytes} bytes missing"


class NamedBarrier:
    def __init__(self) -> None:
        self.phase = self.threads = 0
        self.arrived: dict[int, int] = {}
        self.all = self.waiting = 0  # bits of partitions

    def arrive(self, partition: Partition, threads: int, waits: bool) -> tuple[int, int] | None:
        """Return who has arrived and who waits, if it is complete."""
        if self.arrived and threads != self.threads:
            raise InterpreterError(f"a named barrier of {self.threads} and {threads} threads")
        if partition.index in self.arrived:
            raise InterpreterError(f"partition {partition.index} arrives twice in a phase")
        self.threads = threads
        self.arrived[partition.index] = 32 * partition.warps
        self.all |= partition.bit
        self.waiting |= partition.bit * waits
        total = sum(self.arrived.values())
        if total > threads:
            raise InterpreterError(f"{total} threads at a named barrier of {threads}")
        if total < threads:
            return None
        met = self.all, self.waiting
        self.phase, self.arrived, self.all, self.waiting = self.phase + 1, {}, 0, 0
        return met

    def __repr__(self) -> str:
        return f"phase {self.phase}, arrived {self.arrived} of {self.threads}"


class Work:
    """Something that the hardware does by itself; a load ends at the mbarrier `barrier`."""

    def __init__(self, run: Callable[[], None], barrier: Barrier | None = None) -> None:
        self.barrier = barrier
        self._run: Callable[[], None] | None = run
        self.retired = False

    def finish(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run()


class Partition:
    def __init__(self, index: int, warps: int, priority: float) -> None:
        self.index, self.warps, self.priority = index, warps, priority
        self.bit = 1 << index
        self.go = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for: Any = None
        self.done = False
        self.products: deque[Work] = deque()
        self.stores: deque[Work] = deque()
        self.copies: list[Work] = []  # of no group yet
        self.groups: deque[list[Work]] = deque()


class Program:
    def __init__(self, index: tuple[int, ...], grid: Any, mode: Mode, num_warps: int) -> None:
        self.index, self.grid, self.mode, self.num_warps = index, grid, mode, num_warps
        self.random = Random(f"{index} {mode.seed}")
        self.eagerness = self.random.random() / 2  # of what is at random
        self.barriers: dict[int, Barrier] = {}
        self.named = [NamedBarrier() for _ in range(NAMED_BARRIERS)]
        self.loads: list[Work] = []
        self.memory = torch.zeros(2, MEMORY, dtype=torch.uint8)
        self.bits = self.memory[:, :0]  # of all buffers
        self.partitions: list[Partition] = []
        self.error: BaseException | None = None
        self.finished = threading.Event()

    def run(self, parts: list[tuple[Callable[[], None], int]]) -> None:
        before = self.partitions, self.finished
        self.partitions = [
            Partition(i, warps, self._priority(i)) for i, (_, warps) in enumerate(parts)
        ]
        self.finished = threading.Event()
        threads = [
            threading.Thread(target=self._run_partition, args=(partition, function), daemon=True)
            for partition, (function, _) in zip(self.partitions, parts, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._hand_over()
        self.finished.wait()
        for thread in threads:
            thread.join()
        self.partitions, self.finished = before
        if self.error is not None:
            raise self.error
        if self.loads:
            raise InterpreterError("a program ends while TMA loads")

    def _priority(self, index: int) -> float:
        if self.mode.last_first is None:
            return self.random.random()
        return index if self.mode.last_first else -index

    def _run_partition(self, partition: Partition, function: Callable[[], None]) -> None:
        now.program, now.partition = self, partition
        partition.go.acquire()
        try:
            if self.error is None:
                function()
                for kind in ("products", "stores", "copies", "groups"):
                    if getattr(partition, kind):
                        raise InterpreterError(f"a partition ends and has not awaited its {kind}")
        except BaseException as error:
            if self.error is None:
                self.error = error
        partition.done = True
        self._hand_over()

    def _hand_over(self) -> None:
        try:
            chosen = None if self.error is not None else self._choose()
        except BaseException as error:
            self.error, chosen = error, None
        if chosen is not None:
            chosen.go.release()
        elif all(x.done for x in self.partitions):
            self.finished.set()
        else:  # an error: let all others end
            next(x for x in self.partitions if not x.done).go.release()

    def pause(self, ready: Callable[[], bool] = lambda: True, waits_for: Any = None) -> None:
        """Let another partition run, if it is its turn, until this one is ready."""
        own = now.partition
        own.ready, own.waits_for = ready, waits_for
        chosen = self._choose()
        if chosen is not own:
            assert chosen is not None
            chosen.go.release()
            own.go.acquire()
            if self.error is not None:
                raise self.error
        own.waits_for = None

    def _choose(self) -> Partition | None:
        """Return the partition whose turn it is; None at the end."""
        running = [x for x in self.partitions if not x.done]
        if not running:
            return None
        if None in self.mode:
            self._progress()
        while True:
            ready = [x for x in running if x.ready()]
            if ready:
                return max(ready, key=lambda x: x.priority)
            awaited = [x for x in self.loads if any(x.barrier is p.waits_for for p in running)]
            if not awaited:
                raise DeadlockError(f"program {self.index}: all partitions wait\n{self._state()}")
            self._finish_load(awaited)

    def _finish_load(self, loads: list[Work]) -> None:
        work = loads[0] if self.mode.loads_early is not None else self.random.choice(loads)
        self.loads.remove(work)
        work.finish()

    def _progress(self) -> None:
        """At random, let some of what runs by itself be done, and change who goes first."""
        mode, random = self.mode, self.random
        if mode.loads_early is None and self.loads and random.random() < self.eagerness:
            self._finish_load(self.loads)
        for x in self.partitions:
            if mode.reads_early is None and random.random() < self.eagerness:
                for work in [*x.products, *x.stores]:
                    work.finish()
            if mode.loads_early is None and random.random() < self.eagerness:
                for work in [*chain.from_iterable(x.groups), *x.copies]:
                    work.finish()
            if mode.last_first is None and random.random() < RESTLESSNESS:
                x.priority = random.random()

    def load(self, run: Callable[[], None], barrier: Barrier) -> None:
        """Start what ends at an mbarrier."""
        work = Work(run, barrier)
        if self.mode.loads_early:
            work.finish()
        else:
            self.loads.append(work)
        self.pause()

    def copy(self, run: Callable[[], None]) -> None:
        """Start what writes shared memory and ends when its group is awaited."""
        work = Work(run)
        now.partition.copies.append(work)
        if self.mode.loads_early:
            work.finish()
        self.pause()

    def commit(self) -> None:
        """Make a group of a partition's copies since the last one."""
        own = now.partition
        own.groups.append(own.copies)
        own.copies = []

    def wait_group(self, pending: int) -> None:
        """Wait until at most `pending` of a partition's latest groups are in flight."""
        groups = now.partition.groups
        while len(groups) > pending:
            for work in groups.popleft():
                work.finish()
        self.pause()

    def issue(self, queue: deque[Work], run: Callable[[], None]) -> Work:
        work = Work(run)
        queue.append(work)
        if self.mode.reads_early:
            work.finish()
        self.pause()
        return work

    def retire(self, queue: deque[Work], pending: int) -> None:
        """Wait until at most `pending` of a partition's latest reads are in flight."""
        while len(queue) > pending:
            work = queue.popleft()
            work.finish()
            work.retired = True
        self.pause()

    def allocate(self, size: int) -> torch.Tensor:
        """Return the bits of `Shared` for as many bytes."""
        begin = self.bits.shape[1]
        self.bits = self.memory[:, : begin + size]
        return self.bits[:, begin:]

    def barrier(self, place: Shared) -> Barrier:
        found = self.barriers.get(place.values.data_ptr())
        if found is None:
            raise InterpreterError("an mbarrier is used that was not initialised")
        return found

    def _state(self) -> str:
        names = {id(x): f"named barrier {i}" for i, x in enumerate(self.named)}
        names |= {id(x): f"mbarrier {i}" for i, x in enumerate(self.barriers.values())}
        lines = [
            f"partition {x.index}: {names.get(id(x.waits_for), 'done')}" for x in self.partitions
        ]
        used = [x for x in self.named if x.threads]
        lines += [f"{names[id(x)]}: {x}" for x in [*used, *self.barriers.values()]]
        return "\n".join(lines)


class _Now(threading.local):
    program: Program
    partition: Partition


now = _Now()


def pause() -> None:
    now.program.pause()
