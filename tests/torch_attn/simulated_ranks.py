"""The ranks of a group as threads of one process, which send each other tensors by mailboxes."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from torch_attn.distributed import context
from torch_attn.distributed.peers import Peers, Transfer, room_for

TIME_LIMIT = 240.0  # of a wait for another rank, which may compile kernels, in seconds


class Arrival:
    """Fill tensors with what arrives in mailboxes."""

    def __init__(self, boxes: list[queue.Queue[Tensor]], tensors: tuple[Tensor, ...]) -> None:
        self._boxes, self._tensors = boxes, tensors

    def wait(self) -> None:
        for box, x in zip(self._boxes, self._tensors, strict=True):
            x.copy_(box.get(timeout=TIME_LIMIT))


class Room:
    """Hold what simulated ranks share.

    Attributes:
        size: ranks.
        boxes: mailboxes by receiver, sender and number of the tensor.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.boxes: dict[Any, queue.Queue[Tensor]] = defaultdict(queue.Queue)
        self._meeting = threading.Barrier(size)
        self._shown: list[Any] = [None] * size

    def show(self, rank: int, x: Any) -> list[Any]:
        """Return what every rank shows."""
        self._shown[rank] = x
        self._meeting.wait(TIME_LIMIT)
        shown = list(self._shown)
        self._meeting.wait(TIME_LIMIT)
        return shown


class SimulatedPeers(Peers):
    """The peers of a thread. It is its own mesh."""

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.size = room, rank, room.size
        self.group = self

    def exchange(self, tensors, sent, received, of_gradients=False) -> Transfer:
        boxes = self.room.boxes
        for rank, start, end, _ in sent:
            for n, x in enumerate(tensors):
                boxes[rank, self.rank, n].put(x[:, start:end].detach().clone())
        into, places = room_for(tensors, received)
        for x in into:
            x.fill_(torch.nan)
        arrivals = []
        for (rank, start, end, _), place in zip(received, places, strict=True):
            parts = tuple(x[:, place] for x in into)
            if rank == self.rank:
                for part, x in zip(parts, tensors, strict=True):
                    part.copy_(x[:, start:end])
            else:
                arrivals.append(Arrival([boxes[self.rank, rank, n] for n in range(len(parts))], parts))
        return Transfer(into if received else None, arrivals)

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.stack([y[self.rank] for y in self.room.show(self.rank, x.detach())])

    def gather_objects(self, x: Any) -> list[Any]:
        return self.room.show(self.rank, x)


one_at_a_time = threading.Lock()  # Triton's interpreter runs in one thread at a time


def run_ranks(size: int, function: Callable[[SimulatedPeers], Any]) -> list[Any]:
    """Return what a function of the peers returns on each rank; raise the first error of any.

    Autograd runs the backwards of all threads one after the other in its one thread for a GPU,
    where a rank would wait in vain for those behind it. So each backward runs in its rank's thread.
    """
    room = Room(size)

    def on_rank(rank: int) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return function(SimulatedPeers(room, rank))

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(on_rank, rank) for rank in range(size)]
    return [future.result() for future in futures]


def simulate(monkeypatch) -> None:
    """Let the kernels of one thread run at a time."""
    run = context.Problem.run

    def run_alone(self, operation, *tensors):
        with one_at_a_time:
            return run(self, operation, *tensors)

    monkeypatch.setattr(context.Problem, "run", run_alone)
