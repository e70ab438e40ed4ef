"""Outline what a host function does, so that another framework can do it instead.

A host function, such as ``kernels.sm90.flash_bwd.flash_bwd``, is traced once on operands that have
types but no values. Mosaic GPU kernels are operations of the trace. Between them are the functions
that XLA fuses, kept whole (`pallas_attn.fusions`), and a few operations that move nothing. So
another framework's program can hold the same launches, in its own memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_attn.fusions import Operand, whole_fusions
from pallas_attn.targets import described
from twin_attention.contract.validate.errors import fail


@dataclass(frozen=True)
class Value:
    """An array of an outline.

    Attributes:
        number: the operands have the first numbers, in order.
        shape, dtype: the array's.
    """

    number: int
    shape: tuple[int, ...]
    dtype: str


class Operation(NamedTuple):
    """Describe an operation.

    Attributes:
        name: name of a `fusion`; "full", an array filled with a number; "reshape"; or "bitcast",
            the same memory in another dtype.
        args: its arguments, with a `Value` for an array.
        results: what it returns.
    """

    name: str
    args: tuple[Any, ...]
    results: tuple[Value, ...]


class Kernel(NamedTuple):
    """Describe the launch of a kernel.

    Attributes:
        call: the operation of the trace, which `pallas_attn.ahead` lowers.
        operands: of the kernel, in order; a NumPy array for a constant.
        results: of the kernel, in order. The last ones lie in the memory of the last operands.
        num_aliased: how many results do.
    """

    call: Any
    operands: tuple[Value | np.ndarray, ...]
    results: tuple[Value, ...]
    num_aliased: int


class Outline(NamedTuple):
    """Describe what a host function does.

    Attributes:
        steps: in order.
        results: what it returns, with a `Value` for an array.
    """

    steps: tuple[Operation | Kernel, ...]
    results: Any


def outline(function: Callable[..., Any], operands: Sequence[Any], card: Any) -> Outline:
    """Trace a host function, and describe what it does.

    Args:
        function: takes the operands.
        operands: tuples of objects with a shape and a dtype's name, or None.
        card: the card it runs on: `capability` such as 90, `num_sms`, and `shared_memory`, the
            bytes that a block may have.

    Raises:
        NotImplementedError: the function does something else.
    """
    device = SimpleNamespace(
        compute_capability=f"{card.capability // 10}.{card.capability % 10}",
        core_count=card.num_sms,
        shared_memory_per_block_optin=card.shared_memory,
    )
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tuple(operands))
    with described(device), whole_fusions():
        traced, results = jax.make_jaxpr(function, return_shape=True)(*types)
    writer = _Writer()
    given = [writer.value_of(x) for x in jax.tree.leaves(types)]
    found = writer.add(traced.jaxpr, traced.consts, given)
    return Outline(tuple(writer.steps), jax.tree.structure(results).unflatten(found))


class _Writer:
    """Writes an outline from a trace."""

    def __init__(self) -> None:
        self.steps: list[Operation | Kernel] = []
        self._count = 0

    def value_of(self, x: Any) -> Value:
        """Return a new value, of an array's type."""
        self._count += 1
        return Value(self._count - 1, tuple(x.shape), x.dtype.name)

    def add(self, jaxpr: Any, constants: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Add the operations of a trace and return its results."""
        values = dict(zip(jaxpr.constvars, map(np.asarray, constants), strict=True))
        values |= dict(zip(jaxpr.invars, operands, strict=True))

        def value(x: Any) -> Any:
            return x.val if hasattr(x, "val") else values[x]

        for call in jaxpr.eqns:
            results = self._call(call, [value(x) for x in call.invars])
            values.update(zip(call.outvars, results, strict=True))
        return [value(x) for x in jaxpr.outvars]

    def _call(self, call: Any, operands: list[Any]) -> Sequence[Any]:
        name, parameters = call.primitive.name, call.params
        inner = parameters.get("jaxpr", parameters.get("call"))
        if name in ("jit", "pjit", "custom_vmap_call"):
            return self.add(inner.jaxpr, inner.consts, operands)
        results = tuple(self.value_of(x.aval) for x in call.outvars)
        if name == "mpmd_map":
            num_aliased = getattr(parameters["compiler_params"], "num_aliased", 0)
            self.steps.append(Kernel(call, tuple(operands), results, num_aliased))
        elif name == "fusion":
            args = _with_operands(parameters["arguments"], operands)
            self.steps.append(Operation(parameters["name"], args, results))
        elif name == "broadcast_in_dim" and np.ndim(operands[0]) == 0 and not _is_value(operands):
            self.steps.append(Operation("full", (operands[0],), results))
        elif _is_value(operands) and _keeps_order(name, operands[0], results[0]):
            self.steps.append(Operation("reshape", tuple(operands), results))
        elif name == "bitcast_convert_type" and _is_value(operands):
            self.steps.append(Operation("bitcast", tuple(operands), results))
        else:
            expected = "kernels, functions that are a fusion, zeros, reshapes and bitcasts"
            fail(NotImplementedError, "implementation", expected, f"{name} of JAX")
        return results


def _is_value(operands: list[Any]) -> bool:
    return isinstance(operands[0], Value)


def _keeps_order(name: str, before: Value, after: Value) -> bool:
    """Return True for an operation that leaves elements where they are."""
    moves_none = name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")
    return moves_none and math.prod(before.shape) == math.prod(after.shape)


def _with_operands(arguments: Any, operands: list[Any]) -> Any:
    return jax.tree.map(lambda x: operands[x.number] if isinstance(x, Operand) else x, arguments)
