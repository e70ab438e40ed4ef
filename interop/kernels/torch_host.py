"""Describe what a host function of `torch_attn` does, as a plan for JAX.

On tensors of the "meta" device, which have no values, it only describes its steps. A build of torch
for the CPU will do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_attn import private
from torch_attn.families import PACKAGE
from torch_attn.launch import Launch
from torch_attn.layouts import Layout, leaves, replace_leaves
from torch_attn.operands import dtype_name
from torch_attn.replay import Capture, CapturedLaunch, Step
from torch_attn.targets import described
from torch_attn.tensor_maps import TensorMap
from twin_attention.contract.spec import PartialSpec
from twin_attention.interop.kernels.plan import Kernel, Operation, Plan, Type, Value
from twin_attention.targets.family import Backend, own_family
from twin_attention.targets.kernels import Spec
from twin_attention.targets.target import Card

if private.TorchDispatchMode is object:
    raise ImportError(
        "torch.utils._python_dispatch.TorchDispatchMode, which is private, is missing"
    )


def plan_operation(
    folder: str, operation: str, spec: Spec, target: str, card: Card, types: Any
) -> Plan:
    """Describe what the function of an operation does.

    `types` are its operands in tuples, with a `Type` for each tensor. The code of each `Kernel` is
    a pair: its `Launch`, and the types of the launch's operands.
    """
    tensors = _tensors_of(types)
    host_function = partial(run_operation, folder, operation, spec, target, tensors)
    operands = tuple(x for x in leaves(tensors) if x is not None)
    plan = plan_of(host_function, operands, card, _written(operation, tensors, spec))
    return plan._replace(steps=tuple(map(_with_types, plan.steps)))


def run_operation(
    folder: str, operation: str, spec: Spec, target: str | None, operands: Any
) -> Any:
    """Run the function of an operation, without a target in the interpreter; return its results.

    Those of `append_kv` are the pools too, which it writes.
    """
    family = own_family(PACKAGE, folder)
    found = family.function(operation)(*operands, spec, Backend(family, target, target is None))
    if operation != "append_kv":
        return found
    pools = operands[0].k_pages, operands[0].v_pages
    return (*pools, *([] if found is None else [found]))


def operand_of(shape: tuple[int, ...], dtype: str) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _tensors_of(types: Any) -> Any:
    if isinstance(types, Type):
        return operand_of(*types)
    if not isinstance(types, tuple):
        return types
    items = map(_tensors_of, types)
    return type(types)(*items) if hasattr(types, "_fields") else tuple(items)


def _with_types(step: Operation | Kernel) -> Operation | Kernel:
    if isinstance(step, Operation):
        return step
    found = (x for x in leaves(step.code.layouts) if x is not None)
    types = tuple(Type(tuple(x.shape), dtype_name(x.dtype)) for x in found)
    return step._replace(code=(step.code, types))


def _written(operation: str, operands: tuple[Any, ...], spec: Spec) -> tuple[Tensor, ...]:
    """Return the operands that torch writes in place: JAX's results."""
    written: tuple[Any, ...] = ()
    if operation == "append_kv":
        written = (operands[0].k_pages, operands[0].v_pages)
    elif operation == "partial_fwd":
        assert isinstance(spec, PartialSpec)
        _, carry, lse = operands
        written = (lse,) if spec.last else (carry, lse)
    elif operation == "partial_bwd":
        *_, carry = operands
        written = () if carry is None else (carry.dq,)
    return tuple(x for x in written if x is not None)


def plan_of(
    function: Callable[..., Any],
    operands: tuple[Tensor, ...],
    card: Card,
    written: tuple[Tensor, ...] = (),
) -> Plan:
    """Describe what a host function does on operands of `operand_of`; kernels write `written`."""
    with described(card), torch.no_grad(), Capture() as found:
        results = function()
        writer = _TorchWriter(operands, written)
        with found.paused():
            for step in found.steps:
                writer.add(step)
            return Plan(tuple(writer.steps), writer.values_in(results))


class _TorchWriter:
    """Writes a plan from captured steps. Tensors are identified by their id."""

    def __init__(self, operands: tuple[Tensor, ...], written: tuple[Tensor, ...]) -> None:
        self.steps: list[Operation | Kernel] = []
        self._kept: list[Tensor] = []  # keeps tensors alive, so that no other gets their ids
        self._numbers: dict[int, int] = {}
        self._unwritten: dict[int, bool] = {}  # allocated tensors, and whether they are 0
        self._selected: dict[int, tuple[Tensor, int, int]] = {}  # base, axis and index of a view
        for x in operands:
            self._name(x)
        self._writable = {self._numbers[id(x)] for x in written}

    def add(self, step: Step) -> None:
        if isinstance(step, CapturedLaunch):
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
        def value_in(x: Any) -> Any:
            if isinstance(x, Tensor):
                return self._value(x)
            if isinstance(x, torch.dtype):
                return dtype_name(x)
            return tuple(x) if isinstance(x, list) else x

        return replace_leaves(x, value_in)

    def _operate(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        self._name(result)
        self._unwritten.pop(self._numbers[id(result)], None)
        kwargs = {
            name: self.values_in(x)
            for name, x in kwargs.items()
            if not isinstance(x, torch.memory_format)  # all arrays are contiguous
        }
        self.steps.append(Operation(name, self.values_in(args), kwargs, self._value(result)))

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
