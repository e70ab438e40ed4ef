"""Outline what a host function does, so that another framework can do it instead.

A host function, such as ``kernels.sm90.flash_bwd.flash_bwd``, allocates tensors, computes a little
and launches kernels, all of which follows from its operands' layouts. Called on tensors of the
"meta" device, which hold no values, it only describes these steps. So another framework's program
can hold the same launches, in its own memory.

Torch is asked for shapes alone: its build for the CPU will do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_attn import private
from torch_attn.launch import Launch
from torch_attn.layouts import Layout, leaves, replace_leaves
from torch_attn.operands import dtype_name
from torch_attn.replay import Capture
from torch_attn.targets import Card, described
from torch_attn.tensor_maps import TensorMap

if private.TorchDispatchMode is object:
    raise ImportError(
        "torch.utils._python_dispatch.TorchDispatchMode, which is private, is missing"
    )


class Value(NamedTuple):
    """A tensor of an outline.

    Attributes:
        number: the operands have the first numbers, in order. A tensor's memory viewed in another
            dtype has the same number.
        shape, dtype: the tensor's. What a kernel takes is contiguous.
    """

    number: int
    shape: tuple[int, ...]
    dtype: str


class Operation(NamedTuple):
    """Describe an operation of torch.

    Attributes:
        name: the operator's, such as "exp2"; or "set", which writes a tensor at an index of an
            axis: its arguments are the tensor, the axis, the index, and what to write.
        args: its arguments, with a `Value` for a tensor.
        kwargs: its keyword arguments.
        result: what it returns.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Value


class Kernel(NamedTuple):
    """Describe the launch of a kernel.

    Attributes:
        launch: all but the operands' addresses.
        operands: the launch's operands, in order; None for one that no argument uses.
        read: which operands have values before the launch, by position.
        written: which may have new values after it: what the host function allocated, and operands
            that it writes.
        zeroed: which of the others are 0 before it.
    """

    launch: Launch
    operands: tuple[Value | None, ...]
    read: tuple[int, ...]
    written: tuple[int, ...]
    zeroed: tuple[int, ...]


class Outline(NamedTuple):
    """Describe what a host function does.

    Attributes:
        steps: in order.
        results: what it returns, with a `Value` for a tensor.
    """

    steps: tuple[Operation | Kernel, ...]
    results: Any


def operand_of(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Return an operand for `outline`."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def outline(
    function: Callable[..., Any],
    operands: tuple[Tensor, ...],
    card: Card,
    written: tuple[Tensor, ...] = (),
) -> Outline:
    """Call a host function and describe what it would do.

    Args:
        function: a function without arguments, which calls a host function on the operands.
        operands: those of `operand_of`.
        card: the card it would run on.
        written: operands that the host function's kernels write.
    """
    with described(card), torch.no_grad(), Capture() as found:
        results = function()
        writer = _Writer(operands, written)
        with found.paused():
            for step in found.steps:
                writer.add(step)
            return Outline(tuple(writer.steps), writer.values_in(results))


class _Writer:
    """Writes an outline from captured steps. Tensors are identified by their id."""

    def __init__(self, operands: tuple[Tensor, ...], written: tuple[Tensor, ...]) -> None:
        self.steps: list[Operation | Kernel] = []
        self._kept: list[Tensor] = []  # keeps tensors alive, so that no other gets their ids
        self._numbers: dict[int, int] = {}
        self._unwritten: dict[int, bool] = {}  # allocated tensors, and whether they are 0
        self._selected: dict[int, tuple[Tensor, int, int]] = {}  # base, axis and index of a view
        for x in operands:
            self._name(x)
        self._writable = {self._numbers[id(x)] for x in written}

    def add(self, step: Any) -> None:
        """Add a step of a `Capture`."""
        if not hasattr(step, "function"):
            self._launch(step.launcher, step.operands)
            return
        name = step.function.overloadpacket.__name__
        if step.is_allocation or name == "new_zeros":
            number = self._name(step.result)
            self._writable.add(number)
            self._unwritten[number] = name == "new_zeros"
        elif name == "zero_":
            self._unwritten[self._numbers[id(step.result)]] = True
        elif name == "detach" or step.function is torch.ops.aten.view.dtype:
            self._kept.append(step.result)
            self._numbers[id(step.result)] = self._numbers[id(step.args[0])]
        elif name == "select":
            self._name(step.result)
            self._selected[id(step.result)] = step.args
        elif name == "copy_":
            base, axis, index = self._selected[id(step.args[0])]
            self._operate("set", (base, axis, index, step.args[1]), {}, base)
        else:
            self._operate(name, step.args, step.kwargs, step.result)

    def values_in(self, x: Any) -> Any:
        """Return tuples and lists with values in place of tensors."""
        if isinstance(x, Tensor):
            return self._value(x)
        if not isinstance(x, (tuple, list)):
            return x
        items = [self.values_in(item) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)

    def _operate(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        self._name(result)
        self._unwritten.pop(self._numbers[id(result)], None)
        values = self.values_in(args)
        self.steps.append(Operation(name, values, kwargs, self._value(result)))

    def _launch(self, launch: Launch, tensors: tuple[Tensor, ...]) -> None:
        # A carry that is written and the result in its memory are one operand.
        first: dict[int, int] = {}
        for i, x in enumerate(tensors):
            if self._numbers[id(x)] in self._writable:
                first.setdefault(id(x), i)

        def as_first(x: Layout | None) -> Layout | None:
            if x is None:
                return None
            return x._replace(operand=first.get(id(tensors[x.operand]), x.operand))

        launch = launch._replace(layouts=replace_leaves(launch.layouts, as_first))
        _grid, arguments = launch.prepared(launch.config)
        used = {x.operand for x in leaves(tuple(arguments)) if isinstance(x, (Layout, TensorMap))}
        operands = [self._value(x) if i in used else None for i, x in enumerate(tensors)]
        assert all(tensors[i].is_contiguous() for i in used), "arrays of another framework are"
        read, written, zeroed = [], [], []
        for i, x in enumerate(operands):
            if x is None:
                continue
            if x.number in self._writable:
                written.append(i)
            if x.number not in self._unwritten:
                read.append(i)
            elif self._unwritten.pop(x.number):
                zeroed.append(i)
        self.steps.append(
            Kernel(launch, tuple(operands), tuple(read), tuple(written), tuple(zeroed))
        )

    def _name(self, x: Tensor) -> int:
        self._kept.append(x)
        return self._numbers.setdefault(id(x), len(self._numbers))

    def _value(self, x: Tensor) -> Value:
        assert id(x) not in self._selected, "only copied to"
        return Value(self._numbers[id(x)], tuple(x.shape), dtype_name(x.dtype))
