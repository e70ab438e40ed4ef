"""Exchange rows between the GPUs of one host by copies, which occupy no SM, unlike NCCL's kernels.

Each rank's copy engines write its rows into the receivers' symmetric memory, then a number, for
which the receiver's stream waits (the driver's stream memory operations). A few slots are used in
turn; a receiver says when one has been read.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_attn import private
from torch_attn.calls import Kept
from twin_attention.contract.transfers import Rows

VARIABLE = "TWIN_ATTENTION_COPIES"  # "0" leaves exchanges to the process group
ALIGNMENT = 16  # rows of at least 16 bytes each: a slot's tensors are aligned as slots are
_SLOT_ALIGNMENT = 256  # bytes
_KEYS_SLOTS = 2  # one is read while the next is written
_GRADIENTS_SLOTS = 6  # four are kept to be summed; see `GradientSums`
_PERIOD = 1.0  # seconds between checks for exchanges that do not end
_PROGRAMS_MAX = 1024
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_READY, _FREE = 0, 1  # numbers of the exchanges that a sender wrote and that a receiver awaits


class Sizes(NamedTuple):
    """The most bytes that a rank receives in one exchange, of keys or of gradients.

    `at_once`: a call has one exchange of each ("gather"), not one per rank.
    """

    keys: int
    gradients: int
    at_once: bool


class _Driver:
    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        stream, address, number, flags = (
            ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint,
        )  # fmt: skip
        self._write, self._wait = library.cuStreamWriteValue32_v2, library.cuStreamWaitValue32_v2
        self._copy = library.cuMemcpyAsync
        self._exchange_mode = library.cuThreadExchangeStreamCaptureMode
        for function in (self._write, self._wait):
            function.argtypes = [stream, address, number, flags]
        self._copy.argtypes = [address, address, ctypes.c_size_t, stream]

    def write(self, stream: int, address: int, number: int) -> None:
        _check("cuStreamWriteValue32", self._write(stream, address, number, 0))

    def wait(self, stream: int, address: int, number: int) -> None:
        """Wait until memory holds a number or a later one; numbers begin again after 2**32."""
        _check("cuStreamWaitValue32", self._wait(stream, address, number, 0))

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        _check("cuMemcpyAsync", self._copy(target, source, size, stream))

    def leave_captures(self) -> None:
        """Let this thread query events while other threads capture graphs."""
        mode = ctypes.byref(ctypes.c_int(_THREAD_LOCAL))
        _check("cuThreadExchangeStreamCaptureMode", self._exchange_mode(mode))


def _check(name: str, error: int) -> None:
    if error:
        raise RuntimeError(f"{name}: CUDA error {error}")


@cache
def driver() -> _Driver:
    return _Driver()


class _Block(NamedTuple):
    """Consecutive rows: where they go, of which tensor, and where they begin."""

    target: int
    tensor: int
    offset: int
    size: int


class _Program(NamedTuple):
    """Hold what a rank's stream does in an exchange, by address.

    Attributes:
        free: where the rank says that its slot may be overwritten.
        own: the rank's own rows that it reads itself.
        writes: for each receiver, where it says that its slot is free, the rows, and where it
            waits.
        ready: where the others say that their rows are there.
        into: what arrives, [B, rows, H, D] each; None for nothing.
        of: the exchange, kept alive because it is found by its identity.
    """

    free: tuple[int, ...]
    own: tuple[_Block, ...]
    writes: tuple[tuple[int, tuple[_Block, ...], int], ...]
    ready: tuple[int, ...]
    into: tuple[Tensor, ...] | None
    of: tuple[Sequence[Rows], Sequence[Rows]]


class Arena:
    """Memory of all ranks, into which they write, for exchanges of keys or of gradients.

    `number` is that of the last exchange, the same on all ranks.
    """

    def __init__(self, rank: int, memory: Sequence[Tensor], slot_bytes: int, slots: int) -> None:
        """Take each rank's `arena_bytes` bytes, whose numbers at the beginning are 0."""
        self.slot_bytes, self._slots, self.number = slot_bytes, slots, 0
        self._rank, self._memory = rank, memory
        self._programs = Kept(_PROGRAMS_MAX)

    def next(
        self, tensors: Sequence[Tensor], sent: Sequence[Rows], received: Sequence[Rows]
    ) -> _Program:
        """Begin an exchange; return what to do."""
        self.number += 1
        slot = self.number % self._slots
        key = slot, tensors[0].dtype, *(x.shape for x in tensors), id(sent), id(received)
        found = self._programs.get(key)
        if found is None:
            found = self._programs[key] = self._program(slot, tensors, sent, received)
        return found

    def _program(
        self, slot: int, tensors: Sequence[Tensor], sent: Sequence[Rows], received: Sequence[Rows]
    ) -> _Program:
        places = {rank: self._regions(rank, slot, tensors) for rank in range(len(self._memory))}

        def blocks(rank: int, of_rank: Iterable[Rows]) -> tuple[_Block, ...]:
            return tuple(
                _Block(
                    y[b, rows.place].data_ptr(), n, x[b, rows.start].data_ptr() - x.data_ptr(),
                    (rows.end - rows.start) * _bytes_of_row(x),
                )
                for rows in of_rank
                for n, (x, y) in enumerate(zip(tensors, places[rank], strict=True))
                for b in range(x.shape[0])
            )  # fmt: skip

        senders = list(dict.fromkeys(x.rank for x in received if x.rank != self._rank))
        receivers = list(dict.fromkeys(x.rank for x in sent))
        count = sum(x.end - x.start for x in received)
        return _Program(
            tuple(self._number(rank, _FREE, self._rank) for rank in senders),
            blocks(self._rank, (x for x in received if x.rank == self._rank)),
            tuple(
                (
                    self._number(self._rank, _FREE, rank),
                    blocks(rank, (x for x in sent if x.rank == rank)),
                    self._number(rank, _READY, self._rank),
                )
                for rank in receivers
            ),
            tuple(self._number(self._rank, _READY, rank) for rank in senders),
            tuple(_rows(x, count) for x in places[self._rank]) if count else None,
            (sent, received),
        )

    def _regions(self, rank: int, slot: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return where a rank receives tensors, [B, rows, H, D] each, with as many rows as fit."""
        bytes_of_row = sum(x.shape[0] * _bytes_of_row(x) for x in tensors)
        rows = self.slot_bytes // bytes_of_row // ALIGNMENT * ALIGNMENT
        start, found = _bytes_of_numbers(len(self._memory)) + slot * self.slot_bytes, []
        for x in tensors:
            batch, _, heads, dim = x.shape
            end = start + batch * rows * heads * dim * x.itemsize
            part = self._memory[rank][start:end].view(x.dtype)
            found.append(part.view(batch, rows, heads, dim))
            start = end
        return found

    def _number(self, holder: int, what: int, writer: int) -> int:
        """Return the address of a number that one rank holds and another writes."""
        place = what * len(self._memory) + writer
        return self._memory[holder].data_ptr() + place * torch.int32.itemsize

    def run(self, program: _Program, tensors: Sequence[Tensor], driver: Any, stream: int) -> None:
        """Let a stream do what `next` returned for tensors."""
        number = self.number & 0xFFFFFFFF
        begins = [x.data_ptr() for x in tensors]
        for address in program.free:
            driver.write(stream, address, number)
        for target, tensor, offset, size in program.own:
            driver.copy(stream, target, begins[tensor] + offset, size)
        for is_free, blocks, there in program.writes:
            driver.wait(stream, is_free, number)
            for target, tensor, offset, size in blocks:
                driver.copy(stream, target, begins[tensor] + offset, size)
            driver.write(stream, there, number)
        for address in program.ready:
            driver.wait(stream, address, number)


def _bytes_of_row(x: Tensor) -> int:
    """Return the bytes of a row of a contiguous tensor [B, S, H, D]; an only row has any stride."""
    return x.shape[2] * x.shape[3] * x.itemsize


def arena_bytes(size: int, slot_bytes: int, slots: int) -> int:
    return _bytes_of_numbers(size) + slots * slot_bytes


def _bytes_of_numbers(size: int) -> int:
    return _aligned(2 * size * torch.int32.itemsize)


def symmetric_memory(group: Any, device: torch.device, size: int) -> tuple[Any, list[Tensor]]:
    """Return what keeps the memory, and each rank's bytes of 0, which all ranks can write."""
    rank, shape = dist.get_rank(group), (size,)
    with torch.cuda.device(device):
        own = private.symmetric_empty(*shape, dtype=torch.uint8, device=device)
        own.zero_()
        torch.cuda.synchronize()
        handle = private.symmetric_rendezvous(own, group)
    return handle, [
        own if other == rank else handle.get_remote_tensor(other, shape, own.dtype)
        for other in range(dist.get_world_size(group))
    ]


class _Lane(NamedTuple):
    """An arena on a GPU; copies may begin after the event `begin`, `handle` keeps the memory."""

    arena: Arena
    stream: torch.cuda.Stream
    begin: torch.cuda.Event
    handle: Any


class _Kind(NamedTuple):
    """Exchanges that take turns in the same memory."""

    of_gradients: bool
    at_once: bool


class Copies:
    """Exchanges between the ranks of a group, each on a GPU of one host.

    Neither they nor the thread that watches them keep the group or each other alive.
    """

    def __init__(self, group: Any, device: torch.device, say: Say, limit: float) -> None:
        """`limit` is how many seconds a rank waits for another."""
        self._group, self._device, self._gather = weakref.ref(group), device, say
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._limit = limit
        self._slot_bytes: dict[_Kind, int] = {}
        self._lanes: dict[_Kind, _Lane] = {}
        self._last: torch.cuda.Stream | None = None
        # The main thread adds exchanges; only the watching one takes them away.
        self._open: deque[tuple[float, torch.cuda.Event]] = deque()
        threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True).start()

    def _say(self, x: Any) -> list[Any]:
        return self._gather(self._group(), x)

    def reserve(self, sizes: Sizes) -> None:
        """Make room for a call's exchanges on any rank. All ranks must call it alike."""
        everyone: list[Sizes] = self._say(sizes)
        for of_gradients in (False, True):
            most = _aligned(max(x[of_gradients] for x in everyone))
            kind = _Kind(of_gradients, sizes.at_once)
            self._slot_bytes[kind] = max(most, self._slot_bytes.get(kind, 0))

    def skip(self, of_gradients: bool, at_once: bool) -> None:
        """Count an exchange that this rank takes no part in."""
        self._lane(_Kind(of_gradients, at_once)).arena.number += 1

    def exchange(
        self,
        tensors: Sequence[Tensor],
        sent: Sequence[Rows],
        received: Sequence[Rows],
        of_gradients: bool,
        at_once: bool,
    ) -> tuple[tuple[Tensor, ...] | None, Waiting]:
        """Begin to exchange contiguous tensors; return what arrives and what to wait for."""
        arena, stream, begin, _ = self._lane(_Kind(of_gradients, at_once))
        program = arena.next(tensors, sent, received)
        # Work already queued on the current stream has read this slot's previous contents.
        begin.record(self._follow())
        stream.wait_event(begin)
        arena.run(program, tensors, driver(), stream.cuda_stream)
        done = torch.cuda.Event()
        done.record(stream)
        self._open.append((time.monotonic() + self._limit, done))
        return program.into, Waiting(done, self._device)

    def _lane(self, kind: _Kind) -> _Lane:
        """Return memory that is large enough; all ranks grow it at the same time."""
        lane, slot_bytes = self._lanes.get(kind), self._slot_bytes[kind]
        if lane is None or lane.arena.slot_bytes < slot_bytes:
            torch.cuda.synchronize(self._device)
            self._say(None)  # nobody writes into the old memory
            size = self._size
            slots = 1 if kind.at_once else _GRADIENTS_SLOTS if kind.of_gradients else _KEYS_SLOTS
            slots = min(slots, size - 1)
            bytes_ = arena_bytes(size, slot_bytes, slots)
            handle, memory = symmetric_memory(self._group(), self._device, bytes_)
            arena = Arena(self._rank, memory, slot_bytes, slots)
            stream = torch.cuda.Stream(self._device)
            lane = self._lanes[kind] = _Lane(arena, stream, torch.cuda.Event(), handle)
            self._say(None)  # all numbers are 0
        return lane

    def _follow(self) -> torch.cuda.Stream:
        """Return the current stream, made to wait for the previous exchange's stream."""
        current = torch.cuda.current_stream(self._device)
        if self._last not in (None, current):
            current.wait_stream(self._last)
        self._last = current
        return current

    def check(self) -> None:
        """End the process if another rank does not answer in time, as NCCL's watchdog does."""
        while self._open and self._open[0][1].query():
            self._open.popleft()
        if self._open and time.monotonic() >= self._open[0][0]:
            waited = f"waited {self._limit:.0f} s for another rank, and ends the process"
            print(f"rank {self._rank}: context_attention", waited, file=sys.stderr)
            os.abort()


def _watch(copies: weakref.ref[Copies]) -> None:
    driver().leave_captures()
    while (found := copies()) is not None:
        found.check()
        del found
        time.sleep(_PERIOD)


def _aligned(count: int) -> int:
    return -(-count // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT


class Waiting:
    def __init__(self, done: torch.cuda.Event, device: torch.device) -> None:
        self._done, self._device = done, device

    def wait(self) -> None:
        """Let the current stream wait until all rows arrived and sent rows are read."""
        torch.cuda.current_stream(self._device).wait_event(self._done)


def _rows(region: Tensor, count: int) -> Tensor:
    """Return the first rows; for one batch element, with the strides of a separate tensor."""
    found = region[:, :count]
    return found[0].unsqueeze(0) if region.shape[0] == 1 else found


# Gathers an object from each rank of a group.
Say = Callable[[Any, Any], list[Any]]
# What `prepare_copies` found for each group still in use.
_found: weakref.WeakKeyDictionary[Any, dict[torch.device, Copies | None]]
_found = weakref.WeakKeyDictionary()


def copies_of(group: Any, device: torch.device) -> Copies | None:
    """Return a group's exchange by copies; None if there is none or before `prepare_copies`."""
    return _found.get(group, {}).get(device)


def prepare_copies(group: Any, device: torch.device, say: Say) -> Copies | None:
    """Return a group's exchange by copies; None if a rank cannot. All ranks must call it alike."""
    if device.type != "cuda":
        return None
    found = _found.setdefault(group, {})
    if device not in found:
        limit = private.timeout_of(group, device)
        needed = limit, private.symmetric_empty, private.symmetric_rendezvous
        able = os.environ.get(VARIABLE) != "0" and None not in needed
        everyone = say(group, (socket.gethostname(), able))
        able = len(everyone) > 1 and set(everyone) == {(socket.gethostname(), True)}
        found[device] = None
        if able and _reach_each_other(group, device, say):
            assert limit is not None
            found[device] = Copies(group, device, say, limit)
    return found[device]


def _reach_each_other(group: Any, device: torch.device, say: Say) -> bool:
    """Return True if each rank's stream can write into all memory. All ranks must call it alike."""
    rank, size, kept = dist.get_rank(group), dist.get_world_size(group), None
    try:
        kept = symmetric_memory(group, device, _bytes_of_numbers(size))
        stream = torch.cuda.current_stream(device)
        for memory in kept[1]:
            address = memory.data_ptr() + rank * torch.int32.itemsize
            driver().write(stream.cuda_stream, address, rank + 1)
        torch.cuda.synchronize(device)
    except (AttributeError, OSError, RuntimeError):
        kept = None
    if not all(say(group, kept is not None)):
        return False
    assert kept is not None
    numbers = kept[1][rank].view(torch.int32)[:size].tolist()
    return all(say(group, numbers == [other + 1 for other in range(size)]))
