"""The ranks that share a sequence, and what they send to each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torch_attn import private
from torch_attn.distributed.copies import Copies, Sizes, copies_of, prepare_copies
from twin_attention.contract.transfers import Rows
from twin_attention.contract.validate.errors import fail, type_name


class Transfer(NamedTuple):
    """Tensors on their way: `sent` is kept until `works` are done; `received` is None if none
    arrive.
    """

    received: tuple[Tensor, ...] | None
    works: Sequence[Any] = ()
    sent: tuple[Tensor, ...] = ()

    def wait(self) -> tuple[Tensor, ...] | None:
        """Return what arrived; on a GPU only the current stream waits."""
        for work in self.works:
            work.wait()
        return self.received


def room_for(
    tensors: Sequence[Tensor], received: Sequence[Rows]
) -> tuple[tuple[Tensor, ...], list[slice]]:
    """Return memory for incoming rows, and where in it each sender's rows go."""
    ends = list(accumulate(rows.end - rows.start for rows in received))
    total = ends[-1] if ends else 0
    into = tuple(x.new_empty((x.shape[0], total, *x.shape[2:])) for x in tensors)
    return into, [slice(*x) for x in pairwise([0, *ends])]


class Peers(ABC):
    """The ranks that share a sequence, and how tensors go from one to another.

    A subclass for ranks without a process group can be the `mesh` of `context_attention`.

    Attributes:
        rank, size: this rank, and the number of ranks.
        group: identifies all of them. It can be a key of a `WeakKeyDictionary`: what the ranks
            agreed on is kept as long as it is.
        at_once: a call has one exchange of keys ("gather") and one of their gradients.
    """

    rank: int
    size: int
    group: Hashable
    at_once: bool = False

    @abstractmethod
    def exchange(
        self,
        tensors: tuple[Tensor, ...],
        sent: Sequence[Rows],
        received: Sequence[Rows],
        of_gradients: bool = False,
    ) -> Transfer:
        """Begin to send rows of tensors to other ranks, and to receive theirs, in order.

        Args:
            tensors: [B, S, H, D] each: keys and values, or their gradients.
            sent: which rows go to whom.
            received: whose rows arrive, joined along S in this order; perhaps this rank's own.
            of_gradients: the tensors are gradients, of the tokens from `Rows.token` on.
        """

    def prepare(self, device: torch.device, sizes: Sizes) -> None:  # noqa: B027 (optional)
        """Prepare for a call's exchanges; all ranks do so alike, before the first one."""

    def skip(  # noqa: B027 (optional)
        self, device: torch.device, of_gradients: bool = False
    ) -> None:
        """Take no part in an exchange that other ranks may have among themselves."""

    @abstractmethod
    def all_to_all(self, x: Tensor) -> Tensor:
        """Return part `rank` of every rank's tensor [size, ...], in the order of ranks."""

    @abstractmethod
    def gather_objects(self, x: Any) -> list[Any]:
        """Return an object from each rank; the host waits."""


_Message = tuple[int, Sequence[Tensor]]  # a rank, and rows [B, ...] to send or receive


def _coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if one call begins all transfers of an exchange, as with NCCL."""
    if None in (private.backend_of, private.start_coalescing, private.end_coalescing):
        return False
    return private.backend_of(group, device).supports_coalescing


class GroupPeers(Peers):
    def __init__(self, mesh: Any) -> None:
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                fail(ValueError, "mesh", "one dimension, such as mesh['context']", mesh.ndim)
            mesh = mesh.get_group()
        if not isinstance(mesh, dist.ProcessGroup):
            fail(TypeError, "mesh", "a DeviceMesh, a process group or Peers", type_name(mesh))
        self.group = self._group = mesh
        self.rank, self.size = dist.get_rank(mesh), dist.get_world_size(mesh)

    def exchange(
        self,
        tensors: tuple[Tensor, ...],
        sent: Sequence[Rows],
        received: Sequence[Rows],
        of_gradients: bool = False,
    ) -> Transfer:
        tensors = tuple(x.contiguous() for x in tensors)
        copies = self._copies(tensors[0].device)
        if copies is not None:
            arriving, waiting = copies.exchange(tensors, sent, received, of_gradients, self.at_once)
            return Transfer(arriving, (waiting,), tensors)
        into, places = room_for(tensors, received)
        sends = [(rows.rank, [x[:, rows.start : rows.end] for x in tensors]) for rows in sent]
        receives = []
        for (rank, start, end, *_), place in zip(received, places, strict=True):
            parts = [x[:, place] for x in into]
            if rank == self.rank:
                for part, x in zip(parts, tensors, strict=True):
                    part.copy_(x[:, start:end])
            else:
                receives.append((rank, parts))
        works = self._begin(sends, receives) if sends or receives else ()
        return Transfer(into if received else None, works, tensors)

    def prepare(self, device: torch.device, sizes: Sizes) -> None:
        copies = prepare_copies(self._group, device, _gather_objects)
        if copies is not None:
            copies.reserve(sizes)

    def skip(self, device: torch.device, of_gradients: bool = False) -> None:
        copies = self._copies(device)
        if copies is not None:
            copies.skip(of_gradients, self.at_once)

    def _copies(self, device: torch.device) -> Copies | None:
        """Return how to exchange without the process group; None in a CUDA graph."""
        copies = copies_of(self._group, device)
        if copies is None or torch.cuda.is_current_stream_capturing():
            return None
        return copies

    def _begin(self, sends: Sequence[_Message], receives: Sequence[_Message]) -> Sequence[Any]:
        """Begin to send and receive; return what to wait for."""
        group, device = self._group, [*sends, *receives][0][1][0].device
        if not _coalesces(group, device):
            ops = [*self._operations(dist.isend, sends), *self._operations(dist.irecv, receives)]
            return dist.batch_isend_irecv(ops)
        # Like `batch_isend_irecv`, without a check of each tensor.
        private.start_coalescing(group, device)
        for begin, messages in ((group.send, sends), (group.recv, receives)):
            for rank, parts in messages:
                for x in chain.from_iterable(parts):
                    begin([x], rank, 0)
        return (private.end_coalescing(group, device),)

    def _operations(self, operation: Any, messages: Sequence[_Message]) -> Iterator[dist.P2POp]:
        """Yield an operation for each batch element's rows, which are contiguous."""
        # Gloo tells messages between two ranks apart by tags: both sides count alike.
        tags: Counter[int] = Counter()
        for rank, parts in messages:
            peer = dist.get_global_rank(self._group, rank)
            for part in parts:
                for x in part:
                    yield dist.P2POp(operation, x, peer, self._group, tags[rank])
                    tags[rank] += 1

    def all_to_all(self, x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=self._group)
        return received

    def gather_objects(self, x: Any) -> list[Any]:
        return _gather_objects(self._group, x)


def _gather_objects(group: dist.ProcessGroup, x: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, x, group)
    return found
