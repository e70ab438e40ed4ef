"""Exchange rows by copies between the GPUs of one host, which take no SM.

Each rank writes its rows into the memory of the ranks that receive them, with the GPU's copy
engines, and then a number beside them, for which the receiver's stream waits. Attention keeps all
SMs meanwhile, of which NCCL's kernels would take some.

The memory is PyTorch's symmetric memory. Of a few slots an exchange uses the one that was used
longest ago; what came with it then has been read when the exchange begins, and so the receiver
says. Streams write and wait by the driver's stream memory operations.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_attn import private
from twin_attention.contract.exchange import Rows

VARIABLE = "TWIN_ATTENTION_COPIES"  # "0" leaves exchanges to the process group
ALIGNMENT = 16  # rows, of at least 16 bytes each: tensors of a slot begin as slots do
_SLOT_ALIGNMENT = 256  # bytes
_KEYS_SLOTS = 2  # one is read while the next is written
_GRADIENTS_SLOTS = 6  # four are kept to be summed; see `GradientSums`
_PERIOD = 1.0  # seconds between looks at exchanges that may not end
_READY, _FREE = 0, 1  # numbers of the last exchange that a sender wrote, or a receiver waits for


class Sizes(NamedTuple):
    """Bytes that a rank receives at most in one exchange of a call."""

    keys: int
    gradients: int


@cache
def _driver() -> Any:
    """Return the driver's library, with which streams write and wait for numbers."""
    driver = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        getattr(driver, name).argtypes = [
            ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint,
        ]  # fmt: skip
    return driver


def _on_stream(name: str, stream: torch.cuda.Stream, address: int, number: int) -> None:
    """Let a stream write a number, or wait until memory holds it or a later one."""
    error = getattr(_driver(), name)(stream.cuda_stream, address, number & 0xFFFFFFFF, 0)
    if error:
        raise RuntimeError(f"{name}: CUDA error {error}")


class _Arena:
    """Memory into which other ranks write, and theirs, for exchanges of keys or of gradients.

    Attributes:
        slot_bytes: of one exchange.
        number: of the last exchange, the same on all ranks.
        stream: of its copies.
    """

    def __init__(self, group: Any, device: torch.device, slot_bytes: int, slots: int) -> None:
        self.slot_bytes, self._slots, self.number = slot_bytes, slots, 0
        self.stream = torch.cuda.Stream(device)
        self.rank, size = dist.get_rank(group), dist.get_world_size(group)
        end = slots * slot_bytes  # behind it, a number of each kind and rank
        shape = (end + 2 * size * torch.int32.itemsize,)
        with torch.cuda.device(device):
            own = private.symmetric_empty(*shape, dtype=torch.uint8, device=device)
            own[end:].zero_()
            torch.cuda.synchronize()
            self._handle = private.symmetric_rendezvous(own, group)
        self._memory = [
            own if rank == self.rank else self._handle.get_remote_tensor(rank, shape, own.dtype)
            for rank in range(size)
        ]
        self._numbers = [x.data_ptr() + end for x in self._memory]
        self.regions = lru_cache(maxsize=256)(self._regions)

    def _regions(
        self, rank: int, slot: int, shapes: tuple[tuple[int, int, int], ...], dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Return where a rank receives tensors, [B, rows, H, D] each, as many rows as fit.

        Args:
            shapes: (B, H, D) of each tensor.
        """
        bytes_of_row = sum(batch * heads * dim for batch, heads, dim in shapes) * dtype.itemsize
        rows = self.slot_bytes // bytes_of_row // ALIGNMENT * ALIGNMENT
        start, found = slot * self.slot_bytes, []
        for batch, heads, dim in shapes:
            end = start + batch * rows * heads * dim * dtype.itemsize
            part = self._memory[rank][start:end].view(dtype)
            found.append(part.view(batch, rows, heads, dim))
            start = end
        return tuple(found)

    def next_slot(self) -> int:
        """Begin an exchange; return its slot."""
        self.number += 1
        return self.number % self._slots

    def tell(self, rank: int, what: int) -> None:
        """Let the stream write this exchange's number into another rank's memory."""
        self._number("cuStreamWriteValue32_v2", rank, what, self.rank)

    def await_(self, rank: int, what: int) -> None:
        """Let the stream wait until another rank has written this exchange's number."""
        self._number("cuStreamWaitValue32_v2", self.rank, what, rank)

    def _number(self, name: str, holder: int, what: int, writer: int) -> None:
        place = what * len(self._numbers) + writer
        address = self._numbers[holder] + place * torch.int32.itemsize
        _on_stream(name, self.stream, address, self.number)


class Copies:
    """Exchanges between the ranks of a group, each on a GPU of one host."""

    def __init__(self, group: Any, device: torch.device, say: Callable[[Any], list[Any]]) -> None:
        """Take a group.

        Args:
            group: a process group.
            device: of this rank.
            say: gathers an object of each rank.
        """
        self._group, self._device, self._say = group, device, say
        self._limit = private.backend_of(group, device).options._timeout.total_seconds()
        self._sizes = Sizes(0, 0)
        self._arenas: dict[bool, _Arena] = {}
        self._last: torch.cuda.Stream | None = None
        self._open: deque[tuple[float, torch.cuda.Event]] = deque()
        threading.Thread(target=self._watch, daemon=True).start()

    def reserve(self, sizes: Sizes) -> None:
        """Have room for exchanges of so many bytes on any rank. All ranks call it alike."""
        everyone = [*self._say(sizes), self._sizes]
        self._sizes = Sizes(*(_aligned(max(xs)) for xs in zip(*everyone, strict=True)))

    def skip(self, of_gradients: bool) -> None:
        """Count an exchange in which this rank has no part."""
        self._arena(of_gradients).number += 1

    def exchange(
        self,
        tensors: Sequence[Tensor],
        sent: Sequence[Rows],
        received: Sequence[Rows],
        of_gradients: bool,
    ) -> tuple[tuple[Tensor, ...] | None, Waiting]:
        """Begin an exchange as `Peers.exchange` does; return what arrives and what to wait for.

        Args:
            tensors: contiguous.
        """
        arena = self._arena(of_gradients)
        rank, slot, stream = arena.rank, arena.next_slot(), arena.stream
        shapes = tuple((x.shape[0], *x.shape[2:]) for x in tensors)
        into = arena.regions(rank, slot, shapes, tensors[0].dtype)
        # What came with this slot was read by the work that the current stream has by now.
        stream.wait_stream(self._follow())
        senders = list(dict.fromkeys(rows.rank for rows in received if rows.rank != rank))
        receivers = list(dict.fromkeys(rows.rank for rows in sent))
        with torch.cuda.stream(stream):
            for other in senders:
                arena.tell(other, _FREE)
            for rows in received:
                if rows.rank == rank:
                    _copy(tensors, rows, into)
            for other in receivers:
                arena.await_(other, _FREE)
                places = arena.regions(other, slot, shapes, tensors[0].dtype)
                for rows in sent:
                    if rows.rank == other:
                        _copy(tensors, rows, places)
                arena.tell(other, _READY)
            for other in senders:
                arena.await_(other, _READY)
            done = torch.cuda.Event()
            done.record(stream)
        self._note(done)
        count = sum(rows.end - rows.start for rows in received)
        return tuple(_rows(x, count) for x in into) if count else None, Waiting(done)

    def _arena(self, of_gradients: bool) -> _Arena:
        """Return memory that is large enough; all ranks find that it is not at the same time."""
        size = self._sizes[of_gradients]
        arena = self._arenas.get(of_gradients)
        if arena is None or arena.slot_bytes < size:
            torch.cuda.synchronize(self._device)
            self._say(None)  # nobody writes into what goes
            most = _GRADIENTS_SLOTS if of_gradients else _KEYS_SLOTS
            slots = min(most, dist.get_world_size(self._group) - 1)
            arena = self._arenas[of_gradients] = _Arena(self._group, self._device, size, slots)
            self._say(None)  # all numbers are 0
        return arena

    def _follow(self) -> torch.cuda.Stream:
        """Return the current stream, which waits for the one of the exchange before."""
        current = torch.cuda.current_stream(self._device)
        if self._last not in (None, current):
            current.wait_stream(self._last)
        self._last = current
        return current

    def _note(self, done: torch.cuda.Event) -> None:
        while self._open and self._open[0][1].query():
            self._open.popleft()
        self._open.append((time.monotonic() + self._limit, done))

    def _watch(self) -> None:
        """End the process if another rank does not answer in time, as NCCL's watchdog does."""
        while True:
            time.sleep(_PERIOD)
            if not self._open or time.monotonic() < self._open[0][0]:
                continue
            if self._open[0][1].query():
                self._open.popleft()
                continue
            waited = f"waited {self._limit:.0f} s for another rank, and ends the process"
            print(f"rank {dist.get_rank(self._group)}: context_attention", waited, file=sys.stderr)
            os.abort()


def _aligned(count: int) -> int:
    return -(-count // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT


class Waiting:
    """Copies of an exchange."""

    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def wait(self) -> None:
        """Let the current stream wait until all rows have come, and all that were sent are read."""
        torch.cuda.current_stream().wait_event(self._done)


def _copy(tensors: Sequence[Tensor], rows: Rows, into: Sequence[Tensor]) -> None:
    """Copy rows of each batch element, which lie behind each other, to their places."""
    count = rows.end - rows.start
    for x, y in zip(tensors, into, strict=True):
        for source, target in zip(x, y, strict=True):
            target[rows.place : rows.place + count].copy_(source[rows.start : rows.end])


def _rows(region: Tensor, count: int) -> Tensor:
    """Return the first rows; of one batch element with the strides of a tensor of its own."""
    found = region[:, :count]
    return found[0].unsqueeze(0) if region.shape[0] == 1 else found


_found: dict[tuple[Any, torch.device], Copies | None] = {}


def copies_of(group: Any, device: torch.device) -> Copies | None:
    """Return a group's exchange by copies, None before `prepare_copies` or where there is none."""
    return _found.get((group, device))


def prepare_copies(
    group: Any, device: torch.device, say: Callable[[Any], list[Any]]
) -> Copies | None:
    """Return a group's exchange by copies, None if a rank cannot. All ranks call it alike."""
    if device.type != "cuda":
        return None
    key = group, device
    if key not in _found:
        names = private.backend_of, private.symmetric_empty, private.symmetric_rendezvous
        able = os.environ.get(VARIABLE) != "0" and None not in names
        everyone = say((socket.gethostname(), able))
        able = len(everyone) > 1 and set(everyone) == {(socket.gethostname(), True)}
        _found[key] = Copies(group, device, say) if able and all(say(_try(group, device))) else None
    return _found[key]


def _try(group: Any, device: torch.device) -> bool:
    """Return True if the ranks reach each other's memory."""
    try:
        _driver()
        _Arena(group, device, _SLOT_ALIGNMENT, 1)
    except (AttributeError, OSError, RuntimeError):
        return False
    return True
