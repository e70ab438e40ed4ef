"""Ranks that run in turn on one GPU, as if the others' keys were there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from bench.job import Call
from bench.ours import for_target
from bench.timing import Run, Wait
from torch_attn.distributed import (
    Peers,
    Transfer,
    context_attention,
    shard_sequence,
    unshard_sequence,
)
from twin_attention.contract.transfers import Rows
from twin_attention.interop.parity.torch_calls import leaves, prepare_torch
from twin_attention.targets.target import use_target

_TRIES = 3  # calls of each rank, to find the slowest


class Alone(Peers):
    """A rank that runs by itself: what the others would send it is there."""

    def __init__(
        self,
        rank: int,
        shards: Sequence[tuple[Tensor, ...]],
        sent: dict[tuple[int, int, int], tuple[Tensor, ...]],
    ) -> None:
        """sent: the gradients that the ranks sent last, by receiver, sender and token."""
        self.rank, self.size, self.group = rank, len(shards), type(self)
        self._shards, self._sent = shards, sent

    def exchange(
        self,
        tensors: tuple[Tensor, ...],
        sent: Sequence[Rows],
        received: Sequence[Rows],
        of_gradients: bool = False,
    ) -> Transfer:
        if not of_gradients:
            return Transfer(self._keys(tuple(received)))
        for rank, start, end, token, _ in sent:
            self._send((rank, self.rank, token), tuple(x[:, start:end] for x in tensors))
        parts = []
        for rank, start, end, token, _ in received:
            place = self.rank, rank, token
            if place in self._sent:
                parts.append(self._arrived(place))
            else:
                rows = (x.new_zeros(x.shape[0], end - start, *x.shape[2:]) for x in tensors)
                parts.append(tuple(rows))
        return Transfer(_joined(parts))

    def _send(self, place: tuple[int, int, int], rows: tuple[Tensor, ...]) -> None:
        self._sent[place] = rows

    def _arrived(self, place: tuple[int, int, int]) -> tuple[Tensor, ...]:
        return self._sent[place]

    @cache  # noqa: B019 (as many as steps)
    def _keys(self, received: tuple[Rows, ...]) -> tuple[Tensor, ...] | None:
        """Return the keys of a step, which are there before they are asked for."""
        return _joined(
            [tuple(x[:, a:b] for x in self._shards[rank]) for rank, a, b, *_ in received]
        )

    def all_to_all(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def gather_objects(self, x: Any) -> list[Any]:
        return [x] * self.size


class FromHost(Alone):
    """A rank that runs by itself: the others' keys, and gradients of them, are in host memory."""

    def __init__(
        self,
        rank: int,
        shards: Sequence[tuple[Tensor, ...]],
        sent: dict[tuple[int, int, int], tuple[Tensor, ...]],
    ) -> None:
        super().__init__(rank, shards, sent)
        self._device = shards[0][0].device
        self._held = [tuple(map(_on_host, shard)) for shard in shards]
        self._copies = torch.cuda.Stream() if self._device.type == "cuda" else None

    def exchange(
        self,
        tensors: tuple[Tensor, ...],
        sent: Sequence[Rows],
        received: Sequence[Rows],
        of_gradients: bool = False,
    ) -> Transfer:
        if of_gradients or self._copies is None:
            return super().exchange(tensors, sent, received, of_gradients)
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._copies):
            found = self._keys(tuple(received))
            arrived.record()
        return Transfer(found, (Copied(arrived, found or ()),))

    def _send(self, place: tuple[int, int, int], rows: tuple[Tensor, ...]) -> None:
        """Copy gradients to memory of the place, which is pinned once; the host does not wait."""
        if place not in self._sent:
            self._sent[place] = tuple(
                torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda) for x in rows
            )
        for held, x in zip(self._sent[place], rows, strict=True):
            held.copy_(x, non_blocking=True)

    def _arrived(self, place: tuple[int, int, int]) -> tuple[Tensor, ...]:
        return tuple(x.to(self._device, non_blocking=True) for x in self._sent[place])

    def _keys(self, received: tuple[Rows, ...]) -> tuple[Tensor, ...] | None:
        parts = [
            tuple(x[:, start:end].to(self._device, non_blocking=True) for x in self._held[rank])
            for rank, start, end, *_ in received
        ]
        return _joined(parts)


class Copied:
    """Wait on the card for copies to it, whose memory no other copy takes before it was read."""

    def __init__(self, event: torch.cuda.Event, tensors: Sequence[Tensor]) -> None:
        self._event, self._tensors = event, tensors

    def wait(self) -> None:
        stream = torch.cuda.current_stream()
        stream.wait_event(self._event)
        for x in self._tensors:
            x.record_stream(stream)


def _on_host(x: Tensor) -> Tensor:
    """Copy to host memory, from which copies to a card do not wait."""
    return x.cpu().pin_memory() if x.is_cuda else x.clone()


def _joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...] | None:
    """Join rows of several ranks; one rank's without a copy."""
    if len(parts) < 2:
        return tuple(x.contiguous() for x in parts[0]) if parts else None
    return tuple(torch.cat(xs, 1) for xs in zip(*parts, strict=True))


class Ranks:
    """The calls of ranks that run in turn; `time_ranks` times the slowest one."""

    def __init__(self, calls: Sequence[Run]) -> None:
        self._calls = calls

    def __call__(self) -> list[Any]:
        return [call() for call in self._calls]

    def slowest(self, wait: Wait) -> Run:

        def seconds(call: Run) -> float:
            start = time.perf_counter()
            wait(call())
            return time.perf_counter() - start

        return max(self._calls, key=lambda call: min(seconds(call) for _ in range(_TRIES)))


def shares(case: Any, tensors: Sequence[Tensor], rank: int) -> list[Tensor]:
    batches = [x if x.ndim == 4 else x[None] for x in tensors]
    return [shard_sequence(x, case.plan, rank).contiguous() for x in batches]


def assembled(case: Any, results: Sequence[Sequence[Tensor]], is_packed: bool) -> list[Tensor]:
    whole = [unshard_sequence(list(xs), case.plan) for xs in zip(*results, strict=True)]
    return [x[0] if is_packed else x for x in whole]


def make_call(
    target: str,
    case: Any,
    operation: str,
    tensors: list[Tensor],
    exchange: str = "ring",
    from_host: bool = False,
) -> Call:
    peers = FromHost if from_host else Alone
    shards = [tuple(shares(case, tensors[1:3], rank)) for rank in range(case.ranks)]
    sent: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}

    def of_rank(rank: int) -> Run:
        *inputs, dout = shares(case, tensors, rank)
        run = partial(attend, case, peers(rank, shards, sent), exchange)
        call = Call(prepare_torch(run, operation, inputs, dout), None)
        return for_target(call, target).run

    with use_target(target):
        run = Ranks([of_rank(rank) for rank in range(case.ranks)])

    def result(_: Any) -> list[Tensor]:
        # Only now have all ranks sent their gradients.
        return assembled(case, [leaves(x) for x in run()], tensors[0].ndim == 3)

    return Call(run, result)


def attend(case: Any, mesh: Any, exchange: str, q: Tensor, k: Tensor, v: Tensor) -> Any:
    options = case.options | {"plan": case.plan, "mesh": mesh, "exchange": exchange}
    return context_attention(q, k, v, **options)
