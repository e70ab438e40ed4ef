"""Context parallel attention on one device: ranks are threads in PyTorch, a `vmap` axis in JAX."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

import pallas_attn.distributed
import torch_attn.distributed
from torch_attn.distributed.peers import Peers, Transfer, room_for
from twin_attention.contract.context import shard_sequence, unshard_sequence
from twin_attention.interop.parity.cases import ContextCase

TIME_LIMIT = 240.0  # of a wait for another rank, which may compile kernels, in seconds
AXIS = "context"


class Room:
    """Hold what the ranks of a group share. One rank runs at a time, until it waits for another.

    Attributes:
        boxes: by receiver, sender and number of the tensor.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.boxes: dict[Any, queue.Queue[Tensor]] = defaultdict(queue.Queue)
        self.turn = threading.Lock()
        self._meeting = threading.Barrier(size)
        self._shown: list[Any] = [None] * size

    def show(self, rank: int, x: Any) -> list[Any]:
        self._shown[rank] = x
        with self.waiting():
            self._meeting.wait(TIME_LIMIT)
        shown = list(self._shown)
        with self.waiting():
            self._meeting.wait(TIME_LIMIT)
        return shown

    @contextmanager
    def waiting(self) -> Iterator[None]:
        held = self.turn.locked()
        if held:
            self.turn.release()
        try:
            yield
        finally:
            if held:
                self.turn.acquire()


class Arrival:
    """Fill tensors with what arrives in mailboxes."""

    def __init__(
        self, room: Room, boxes: list[queue.Queue[Tensor]], tensors: tuple[Tensor, ...]
    ) -> None:
        self._room, self._boxes, self._tensors = room, boxes, tensors

    def wait(self) -> None:
        for box, x in zip(self._boxes, self._tensors, strict=True):
            with self._room.waiting():
                found = box.get(timeout=TIME_LIMIT)
            x.copy_(found)


class SimulatedPeers(Peers):
    """The peers of a thread. It is its own mesh."""

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.size = room, rank, room.size
        self.group = self

    def exchange(self, tensors, sent, received, of_gradients=False) -> Transfer:
        boxes = self.room.boxes
        for rank, start, end, *_ in sent:
            for n, x in enumerate(tensors):
                boxes[rank, self.rank, n].put(x[:, start:end].detach().clone())
        into, places = room_for(tensors, received)
        for x in into:
            x.fill_(torch.nan)
        arrivals = []
        for (rank, start, end, *_), place in zip(received, places, strict=True):
            parts = tuple(x[:, place] for x in into)
            if rank == self.rank:
                for part, x in zip(parts, tensors, strict=True):
                    part.copy_(x[:, start:end])
            else:
                own = [boxes[self.rank, rank, n] for n in range(len(parts))]
                arrivals.append(Arrival(self.room, own, parts))
        return Transfer(into if received else None, arrivals)

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.stack([y[self.rank] for y in self.room.show(self.rank, x.detach())])

    def gather_objects(self, x: Any) -> list[Any]:
        return self.room.show(self.rank, x)


def run_ranks(size: int, function: Callable[[SimulatedPeers], Any]) -> list[Any]:
    """Return a function's result on each rank; raise the first error of any.

    Each backward runs in its rank's thread: autograd's one thread for a GPU would deadlock.
    """
    room = Room(size)

    def on_rank(rank: int) -> Any:
        with room.turn, torch.autograd.set_multithreading_enabled(False):
            return function(SimulatedPeers(room, rank))

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(on_rank, rank) for rank in range(size)]
    return [future.result() for future in futures]


def attend_in_threads(
    case: ContextCase, operands: dict[str, Tensor], gradients: Sequence[Tensor], **options: Any
) -> tuple[Tensor, ...]:
    """Return `torch_attn`'s out and lse of the whole sequence, and any gradients asked for."""
    plan = case.plan

    def on_rank(peers: SimulatedPeers) -> tuple[Tensor, ...]:
        own = {
            name: (x if name == "sinks" else shard_sequence(x, plan, peers.rank)).detach()
            for name, x in operands.items()
        }
        own = {name: x.clone().requires_grad_(bool(gradients)) for name, x in own.items()}
        named = case.options | {"plan": plan, "mesh": peers, "return_lse": True} | options
        found: Any = torch_attn.distributed.context_attention(**own, **named)
        if not gradients:
            return found
        of = [shard_sequence(x, plan, peers.rank, 1 + n) for n, x in enumerate(gradients)]
        return *found, *torch.autograd.grad(found, list(own.values()), of)

    out, lse, *found = zip(*run_ranks(plan.size, on_rank), strict=True)
    whole = [unshard_sequence(list(out), plan), unshard_sequence(list(lse), plan, 2)]
    for name, parts in zip(operands, found, strict=False):
        is_sum = name == "sinks"
        whole.append(torch.stack(parts).sum(0) if is_sum else unshard_sequence(list(parts), plan))
    return tuple(x.detach() for x in whole)


def attend_under_vmap(case: ContextCase, **options: Any) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function of the whole q, k, v and sinks that runs `pallas_attn` on all ranks."""
    plan, named = case.plan, {"axis_name": AXIS, "return_lse": True} | case.options | options
    on_rank = partial(pallas_attn.distributed.context_attention, plan=plan, **named)

    def attend(q, k, v, sinks=None):
        shards = (
            jnp.stack([shard_sequence(x, plan, r) for r in range(plan.size)]) for x in (q, k, v)
        )
        run = jax.vmap(lambda q, k, v: on_rank(q, k, v, sinks=sinks), axis_name=AXIS)
        out, lse = run(*shards)
        return unshard_sequence(list(out), plan), unshard_sequence(list(lse), plan, 2)

    return attend
