"""Capture what a host function does, and replay it with other operands of the same layouts.

What a host function, such as ``kernels.portable.flash_bwd.flash_bwd``, allocates and launches
follows from its operands' layouts. A `Replay` does it with other addresses. It is generated Python
source, faster than a loop over the steps.

A capture is a dispatch mode: it sees torch operations, and `torch_attn.launch` reports the
launches. A view that only kernels read becomes the address of its base. Buffers that only
kernels read and write are parts of one allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_attn import private

# Launches a kernel on a stream, with the operands' addresses.
Launcher = Callable[[int, "tuple[int, ...]"], None]

Replay = Callable[..., Any]  # takes the operands, returns the results

_ALIGNMENT = 256  # bytes, of each part of an allocation
_ALLOCATIONS = {
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
}  # fmt: skip


class CapturedLaunch(NamedTuple):
    launcher: Any
    operands: tuple[Tensor, ...]


class CapturedOperation(NamedTuple):
    """A torch operation with one result."""

    function: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor

    @property
    def is_allocation(self) -> bool:
        return self.function.overloadpacket in _ALLOCATIONS

    @property
    def is_address_of_base(self) -> bool:
        return self.function.is_view and self.result.data_ptr() == self.args[0].data_ptr()


Step = CapturedLaunch | CapturedOperation


class Capture(private.DispatchMode):
    """A context whose operations and launches are captured, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._is_paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._is_paused:
            assert isinstance(result, Tensor), f"{func} has other results than a tensor"
            lists = [x for x in (*args, *kwargs.values()) if isinstance(x, list | tuple)]
            others = (*kwargs.values(), *chain.from_iterable(lists))
            assert not any(isinstance(x, Tensor) for x in others), f"{func} takes lists of tensors"
            self.steps.append(CapturedOperation(func, args, kwargs, result))
        return result

    def add(self, launcher: Any, operands: tuple[Tensor, ...]) -> None:
        """Add a launch; for "meta" tensors a `torch_attn.launch.Launch`."""
        self.steps.append(CapturedLaunch(launcher, operands))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False


def current_capture() -> Capture | None:
    mode = private.current_mode()
    return mode if isinstance(mode, Capture) else None


def capture(function: Callable[..., Any], operands: Sequence[Tensor | None]) -> tuple[Any, Replay]:
    """Call a host function on CUDA operands; return its results and the `Replay`."""
    # One tensor may be several operands here but not the next time.
    own = [None if x is None else x.detach() for x in operands]
    with Capture() as found:
        results = function(*own)
    return results, _ReplayWriter(own, found.steps, results).replay()


class _ReplayWriter:
    """Writes the function that replays a capture.

    Parameters are x0, x1, ...; it allocates y0, y1, ...; operations return z0, z1, .... Their
    addresses end in "_at".
    """

    def __init__(
        self,
        operands: Sequence[Tensor | None],
        steps: Sequence[Step],
        results: Sequence[Tensor | None] | None,
    ) -> None:
        remaining, allocated, scratch, self._bases = _reduce(steps, results or ())
        parameters = [f"x{i}" for i in range(len(operands))]
        self._signature = ", ".join(parameters)
        device = next(x.device for x in operands if x is not None)
        self._device = torch.cuda.current_device() if device.index is None else device.index
        # Global names of the function.
        self._values: dict[str, Any] = {
            "torch": torch,
            "empty": private.empty_strided_cuda,
            "device": private.get_device,
            "stream_of": private.get_stream,
        }
        self._names = dict(zip(map(id, operands), parameters, strict=True)) | {id(None): "None"}
        self._offsets: dict[int, int] = {}  # in the scratch memory, in bytes
        self._lines: list[str] = []
        for i, (key, x) in enumerate(allocated.items()):
            self._names[key] = f"y{i}"
            layout = self._value(f"layout{i}", (tuple(x.shape), x.stride(), x.dtype))
            self._lines.append(f"y{i} = empty(*{layout})")
        self._allocate_scratch(scratch)
        known = [x for x in self._names.values() if x != "None"]
        self._lines += [f"{name}_at = {name}.data_ptr()" for name in known]
        self._lines.append(f"stream = stream_of({self._device})")
        for i, step in enumerate(remaining):
            if isinstance(step, CapturedLaunch):
                addresses = ", ".join(map(self._address, step.operands))
                launch = self._value(f"launch{i}", step.launcher)
                self._lines.append(f"{launch}(stream, ({addresses},))")
            else:
                self._operate(i, step)
        values = [] if results is None else [f"{self._tensor(x)}, " for x in results]
        self._lines.append("return None" if results is None else f"return ({''.join(values)})")

    def replay(self) -> Replay:
        lines = [
            f"if device() != {self._device}:",
            f"    with torch.cuda.device({self._device}):",
            f"        return replay({self._signature})",
            *self._lines,
        ]
        source = "\n    ".join([f"def replay({self._signature}):", *lines])
        exec(compile(source, "<replay>", "exec"), self._values)
        return self._values["replay"]

    def _allocate_scratch(self, tensors: dict[int, Tensor]) -> None:
        size = 0
        for key, x in tensors.items():
            self._offsets[key] = size
            size += -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size:
            self._lines.append(f"scratch = empty(({size},), (1,), torch.uint8)")
            self._lines.append("scratch_at = scratch.data_ptr()")

    def _operate(self, i: int, step: CapturedOperation) -> None:
        """Write an operation; an in-place operation's result has a name already."""
        arguments = [
            self._tensor(x) if isinstance(x, Tensor) else self._value(f"argument{i}_{n}", x)
            for n, x in enumerate(step.args)
        ]
        options = self._value(f"options{i}", step.kwargs)
        function = self._value(f"operation{i}", step.function)
        self._lines.append(f"z{i} = {function}({', '.join(arguments)}, **{options})")
        if id(step.result) not in self._names:
            self._names[id(step.result)] = f"z{i}"
            self._lines.append(f"z{i}_at = z{i}.data_ptr()")

    def _value(self, name: str, value: Any) -> str:
        self._values[name] = value
        return name

    def _tensor(self, x: Tensor | None) -> str:
        found = self._names.get(self._bases.get(id(x), id(x)))
        assert found is not None, "a tensor that is neither an operand nor made by the function"
        return found

    def _address(self, x: Tensor) -> str:
        offset = self._offsets.get(self._bases.get(id(x), id(x)))
        return f"{self._tensor(x)}_at" if offset is None else f"scratch_at + {offset}"


def _reduce(
    steps: Sequence[Step], results: Sequence[Tensor | None]
) -> tuple[list[Step], dict[int, Tensor], dict[int, Tensor], dict[int, int]]:
    """Find the tensors that a replay need not make; they are keyed by id.

    Return the steps, what to allocate, what is scratch memory, and what replaces omitted views.
    """
    allocated = {
        id(step.result): step.result
        for step in steps
        if isinstance(step, CapturedOperation) and step.is_allocation
    }
    computed = {
        id(x)
        for step in steps
        if isinstance(step, CapturedOperation) and not (step.is_allocation or step.function.is_view)
        for x in step.args
    }
    returned = {id(x) for x in results if x is not None}
    read, remaining, bases = computed | returned, [], {}
    for step in reversed(steps):
        if isinstance(step, CapturedLaunch):
            remaining.append(step)
        elif not step.is_allocation:
            view, base = id(step.result), id(step.args[0])
            only_launched = step.is_address_of_base and view not in read
            # A tensor returned only as a view gets the view's layout.
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
