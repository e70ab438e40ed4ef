"""The ranks that share a sequence, and what they send to each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from twin_attention.contract.validate import fail, type_name

# Torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Transfer(NamedTuple):
    """Tensors on their way.

    Attributes:
        received: where they arrive, None if none do.
        works: what to wait for.
        sent: what is sent, kept until then.
    """

    received: tuple[Tensor, ...] | None
    works: Sequence[Any] = ()
    sent: tuple[Tensor, ...] = ()

    def wait(self) -> tuple[Tensor, ...] | None:
        """Return what arrived; on a GPU the current stream waits, and not the host."""
        for work in self.works:
            work.wait()
        return self.received


class Peers(ABC):
    """The ranks that share a sequence, and how tensors go from one to another.

    A subclass for ranks without a process group can be the `mesh` of `context_attention`.

    Attributes:
        rank, size: this one, and how many there are.
        group: stands for all of them, and is kept with the calls that they agreed on.
    """

    rank: int
    size: int
    group: Hashable

    @abstractmethod
    def shift(
        self,
        tensors: tuple[Tensor, ...],
        distance: int,
        sends: bool = True,
        receives: bool = True,
    ) -> Transfer:
        """Begin to send tensors to the rank `distance` after this one, and to receive others.

        Args:
            tensors: the rank as far before this one sends such shapes and dtypes.
            distance: from 1 to size - 1, or negative.
            sends, receives: the other rank receives them, and it sends some.
        """

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, [size, ...] in their order."""

    @abstractmethod
    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of this rank's part of tensors [size, ...]."""

    @abstractmethod
    def all_to_all(self, x: Tensor) -> Tensor:
        """Return part `rank` of every rank's tensor [size, ...], in the order of ranks."""

    @abstractmethod
    def gather_objects(self, x: Any) -> list[Any]:
        """Return an object of each rank; the host waits."""


class GroupPeers(Peers):
    """The ranks of a process group."""

    def __init__(self, mesh: Any) -> None:
        """Take a device mesh of one dimension, or a process group.

        Raises:
            TypeError: it is neither.
            ValueError: a mesh of several dimensions.
        """
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                fail(ValueError, "mesh", "one dimension, such as mesh['context']", mesh.ndim)
            mesh = mesh.get_group()
        if not isinstance(mesh, dist.ProcessGroup):
            fail(TypeError, "mesh", "a DeviceMesh, a process group or Peers", type_name(mesh))
        self.group = self._group = mesh
        self.rank, self.size = dist.get_rank(mesh), dist.get_world_size(mesh)

    def shift(
        self,
        tensors: tuple[Tensor, ...],
        distance: int,
        sends: bool = True,
        receives: bool = True,
    ) -> Transfer:
        after, before = (
            dist.get_global_rank(self._group, (self.rank + d) % self.size)
            for d in (distance, -distance)
        )
        tensors = tuple(x.contiguous() for x in tensors)
        received = tuple(map(torch.empty_like, tensors)) if receives else None
        ops = []
        for tag, x in enumerate(tensors):
            if sends:
                ops.append(dist.P2POp(dist.isend, x, after, self._group, tag))
        for tag, x in enumerate(received or ()):
            ops.append(dist.P2POp(dist.irecv, x, before, self._group, tag))
        works = dist.batch_isend_irecv(ops) if ops else ()
        return Transfer(received, works, tensors)

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        _all_gather(gathered.flatten(0, 1), x.contiguous(), self._group)
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        part = x.new_empty(x.shape[1:])
        _reduce_scatter(part, x.flatten(0, 1), group=self._group)
        return part

    def all_to_all(self, x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=self._group)
        return received

    def gather_objects(self, x: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, x, self._group)
        return found
