"""Capture what a host function does, and replay it with other operands of the same layouts.

A host function, such as ``kernels.portable.flash_bwd.flash_bwd``, allocates tensors and launches
kernels. Which ones follows from its operands' layouts alone. So a `Replay` does the same again
without it: it allocates and launches, with arguments that are prepared but for the addresses.

A capture is a dispatch mode: it sees what torch does for the function, and `torch_attn.launch`
tells it the launches. A view that only kernels read is the address of its base. Buffers that only
kernels read and write are parts of one allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

# Launches a kernel on a stream, with the operands' addresses; None for one that is left out.
Launcher = Callable[[int, "tuple[int | None, ...]"], None]

_ALIGNMENT = 256  # bytes, of each part of an allocation
_ALLOCATIONS = {
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
}  # fmt: skip


class _Launch(NamedTuple):
    launcher: Launcher
    operands: tuple[Tensor | None, ...]


class _Operation(NamedTuple):
    """An operation of torch with one result."""

    function: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor

    @property
    def is_allocation(self) -> bool:
        return self.function.overloadpacket in _ALLOCATIONS

    @property
    def is_address_of_base(self) -> bool:
        """True for a view that begins where its base does."""
        return self.function.is_view and self.result.data_ptr() == self.args[0].data_ptr()


class Capture(TorchDispatchMode):
    """A block whose operations and launches are captured, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Launch | _Operation] = []
        self._is_paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._is_paused:
            assert isinstance(result, Tensor), f"{func} has other results than a tensor"
            assert not any(isinstance(x, Tensor) for x in kwargs.values())
            self.steps.append(_Operation(func, args, kwargs, result))
        return result

    def add(self, launcher: Launcher, operands: tuple[Tensor | None, ...]) -> None:
        """Add a launch."""
        self.steps.append(_Launch(launcher, operands))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Capture nothing in the block."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False


def current_capture() -> Capture | None:
    """Return the capture that the caller is in."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Capture) else None


def capture(function: Callable[..., Any], operands: Sequence[Tensor | None]) -> tuple[Any, Replay]:
    """Call a host function on operands of a CUDA device, and capture what it does.

    Returns:
        Its results, a tuple of tensors and None, or None; and what replays it.
    """
    # One tensor may be several operands here, and not the next time.
    own = [None if x is None else x.detach() for x in operands]
    with Capture() as found:
        results = function(*own)
    return results, Replay(own, found.steps, results)


class Replay:
    """Does again what a host function did, for operands of the same layouts.

    Every tensor has a slot: None, the operands, what is allocated, what lies in the scratch memory,
    and then the results of operations.
    """

    def __init__(
        self,
        operands: Sequence[Tensor | None],
        steps: Sequence[_Launch | _Operation],
        results: Sequence[Tensor | None] | None,
    ) -> None:
        device = next(x.device for x in operands if x is not None)
        self._device = torch.cuda.current_device() if device.index is None else device.index
        remaining, tensors, scratch, bases = _reduce(steps, results or ())
        self._allocations = [(tuple(x.shape), x.stride(), x.dtype) for x in tensors.values()]
        self._offsets, size = [], 0
        for x in scratch.values():
            self._offsets.append(size)
            size += -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._scratch_size = size
        known = [id(None), *map(id, operands), *tensors, *scratch]
        slots = {key: i for i, key in enumerate(known) if i == 0 or key != id(None)}

        def slot(x: Tensor | None) -> int:
            found = slots.get(bases.get(id(x), id(x)))
            assert found is not None, "a tensor that is neither an operand nor made by the function"
            return found

        self._steps: list[tuple[Callable[..., Any], Any]] = []
        count = len(known)
        for step in remaining:
            if isinstance(step, _Launch):
                self._steps.append((step.launcher, itemgetter(*map(slot, step.operands))))
            else:
                self._steps.append((_again(step, slot), None))
                slots.setdefault(id(step.result), count)  # an operation in place gives an argument
                count += 1
        self._results = None if results is None else [*map(slot, results)]

    def __call__(self, *operands: Any) -> Any:
        """Launch the kernels on the current stream of the operands' device."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self(*operands)
        made = [_empty_strided_cuda(*layout) for layout in self._allocations]
        tensors = [None, *operands, *made]
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        if self._scratch_size:
            scratch = _empty_strided_cuda((self._scratch_size,), (1,), torch.uint8)
            start = scratch.data_ptr()
            addresses += [start + offset for offset in self._offsets]
            tensors += [None for _ in self._offsets]
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        for run, pick in self._steps:
            if pick is not None:
                run(stream, pick(addresses))
            else:
                result = run(tensors)
                tensors.append(result)
                addresses.append(result.data_ptr())
        return None if self._results is None else tuple([tensors[i] for i in self._results])


def _reduce(
    steps: Sequence[_Launch | _Operation], results: Sequence[Tensor | None]
) -> tuple[list[_Launch | _Operation], dict[int, Tensor], dict[int, Tensor], dict[int, int]]:
    """Find what can be done without a tensor.

    Tensors are keyed by their id.

    Returns:
        The steps but for allocations and views that are not needed; the tensors to allocate,
        or views with the layout that they are to have; those in scratch memory; and for each view
        that is left out what stands for it.
    """
    allocated = {
        id(step.result): step.result
        for step in steps
        if isinstance(step, _Operation) and step.is_allocation
    }
    computed = {
        id(x)
        for step in steps
        if isinstance(step, _Operation) and not (step.is_allocation or step.function.is_view)
        for x in step.args
    }
    returned = {id(x) for x in results if x is not None}
    read, remaining, bases = computed | returned, [], {}
    for step in reversed(steps):
        if isinstance(step, _Launch):
            remaining.append(step)
        elif not step.is_allocation:
            view, base = id(step.result), id(step.args[0])
            only_launched = step.is_address_of_base and view not in read
            # What is returned as a view alone is allocated as the view.
            stands_for = step.is_address_of_base and view not in computed and base in allocated
            if only_launched or (stands_for and base not in read):
                bases[view] = base
                if not only_launched:
                    allocated[base] = step.result
                    read.add(base)
            else:
                remaining.append(step)
                read |= {id(x) for x in step.args}
    for view in bases:
        while bases[view] in bases:
            bases[view] = bases[bases[view]]
    tensors = {key: x for key, x in allocated.items() if key in read}
    scratch = {key: x for key, x in allocated.items() if key not in read}
    return remaining[::-1], tensors, scratch, bases


def _again(step: _Operation, slot: Callable[[Tensor], int]) -> Callable[[list[Any]], Tensor]:
    """Return a function that repeats an operation on the tensors of the slots."""
    function, kwargs = step.function, step.kwargs
    places = [(i, slot(x)) for i, x in enumerate(step.args) if isinstance(x, Tensor)]
    others = [None if isinstance(x, Tensor) else x for x in step.args]

    def run(tensors: list[Any]) -> Tensor:
        values = others.copy()
        for i, place in places:
            values[i] = tensors[place]
        return function(*values, **kwargs)

    return run
