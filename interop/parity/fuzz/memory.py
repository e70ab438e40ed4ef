"""Tensors surrounded by NaN, and what a call reads or writes there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from twin_attention.interop.parity.fuzz.problems import Rows
from twin_attention.interop.parity.inputs import Tensors

# NaN in every float dtype but float8_e5m2, and a negative number in every integer dtype.
POISON = 0xFF
_MARGIN = 4096  # bytes before and behind a guarded tensor
_ALLOCATIONS = {
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided,
}  # fmt: skip


def lay_out(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return a copy of a tensor [..., S, H, D] or [S, H, D] with the layout `rows`."""
    stored = x.transpose(-3, -2) if rows.heads_first else x
    *shape, size = stored.shape
    width = size + rows.gap
    memory = poisoned(rows.offset + prod(shape) * width, x.dtype, x.device)
    view = memory[rows.offset :].view(*shape, width)[..., :size]
    view.copy_(stored)
    return view.transpose(-3, -2) if rows.heads_first else view


def with_odd_strides(x: torch.Tensor) -> torch.Tensor:
    """Return a view whose dimensions of size 1 have odd strides."""
    strides = [3 + 2 * i if n == 1 else stride
               for i, (n, stride) in enumerate(zip(x.shape, x.stride(), strict=True))]  # fmt: skip
    return x.as_strided(x.shape, strides)


def poisoned(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    memory = torch.full((count * dtype.itemsize,), POISON, dtype=torch.uint8, device=device)
    return memory.view(dtype)


def poison_free_memory(device: torch.device) -> None:
    """Poison the memory that PyTorch's allocator returns next, small and large blocks."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    blocks = [poisoned(size, torch.uint8, device) for size in (1 << 16, 1 << 19) for _ in range(64)]
    blocks += [poisoned(1 << 26, torch.uint8, device) for _ in range(4)]


class Guard(TorchDispatchMode):
    """Surround and fill every tensor allocated in the block with poison."""

    def __init__(self) -> None:
        super().__init__()
        self._guarded: list[tuple[torch.Tensor, int]] = []  # memory, and bytes of the tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATIONS and result.numel():
            return self._surround(result)
        return result

    def _surround(self, x: torch.Tensor) -> torch.Tensor:
        size = x.untyped_storage().nbytes()
        memory = poisoned(size + 2 * _MARGIN, torch.uint8, x.device)
        self._guarded.append((memory, size))
        end = _MARGIN + size // x.itemsize * x.itemsize
        return memory[_MARGIN:end].view(x.dtype).as_strided(x.shape, x.stride())

    def check(self) -> None:
        """Raise MemoryError if the poison around a tensor was overwritten."""
        for memory, size in self._guarded:
            around = torch.cat((memory[:_MARGIN], memory[_MARGIN + size :]))
            if not bool((around == POISON).all()):
                raise MemoryError(f"memory around an output or a buffer of {size} bytes written")


@contextmanager
def unchanged(tensors: Tensors) -> Iterator[None]:
    """Raise MemoryError if the block changes tensors or memory between and around rows."""
    before = {name: _bytes(x).clone() for name, x in tensors.items()}
    yield
    for name, x in tensors.items():
        if not torch.equal(_bytes(x), before[name]):
            raise MemoryError(f"{name}: written, or the memory around its rows")


def _bytes(x: torch.Tensor) -> torch.Tensor:
    storage = x.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)  # pyright: ignore


def saved_as(hook: str) -> AbstractContextManager[Any]:
    """Let tensors saved by autograd return in another layout, as offloading does.

    The hook is one of `problems.HOOKS`.
    """
    make: Callable[[torch.Tensor], torch.Tensor] = {
        "contiguous": lambda x: x.contiguous().clone(),
        "unaligned": lambda x: _displaced(x, 1),
        "heads first": lambda x: lay_out(x, Rows(True)) if x.ndim > 2 else x.clone(),
    }[hook]

    def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, x = packed
        return make(x.to(device))

    return torch.autograd.graph.saved_tensors_hooks(lambda x: (x.device, x.to("cpu")), unpack)


def _displaced(x: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a contiguous copy `offset` elements after an aligned address."""
    memory = poisoned(offset + x.numel(), x.dtype, x.device)
    return memory[offset:].view(x.shape).copy_(x)
