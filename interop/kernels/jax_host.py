"""Describe what a host function of `pallas_attn` does, as a plan for torch.

It is traced once on types. The trace has Mosaic GPU kernels; between them are the functions that
XLA fuses, kept whole (`pallas_attn.fusions`), and a few that move nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.extend import core

from pallas_attn.fusions import Operand, whole_fusions
from pallas_attn.targets import described
from twin_attention.contract.validate.errors import fail
from twin_attention.interop.kernels.plan import Kernel, Operation, Plan, Value


def plan_of(function: Callable[..., Any], operands: Sequence[Any], card: Any) -> Plan:
    """Trace a host function on types of operands, and describe what it does.

    Raise `NotImplementedError` if it does something else, or a kernel writes into an array that is
    not made for it.
    """
    device = SimpleNamespace(
        compute_capability=f"{card.capability // 10}.{card.capability % 10}",
        core_count=card.num_sms,
        shared_memory_per_block_optin=card.shared_memory,
    )
    with described(device), whole_fusions():
        traced, results = jax.make_jaxpr(function, return_shape=True)(*operands)
    writer = _JaxWriter()
    given = [writer.value_of(x) for x in jax.tree.leaves(operands)]
    found = writer.add(traced.jaxpr, traced.consts, given)
    return writer.plan(jax.tree.structure(results).unflatten(found))


class _JaxWriter:
    def __init__(self) -> None:
        self._steps: list[Operation | Kernel] = []
        self._count = 0
        self._made: set[int] = set()  # arrays in memory that a step allocates
        self._overwritten: dict[int, Any] = {}  # by the array that a kernel writes in its memory

    def value_of(self, x: Any) -> Value:
        self._count += 1
        return Value(self._count - 1, tuple(x.shape), x.dtype.name)

    def add(self, jaxpr: Any, constants: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        values = dict(zip(jaxpr.constvars, map(np.asarray, constants), strict=True))
        values |= dict(zip(jaxpr.invars, operands, strict=True))

        def value(x: Any) -> Any:
            return x.val if isinstance(x, core.Literal) else values[x]

        for call in jaxpr.eqns:
            results = self._call(call, [value(x) for x in call.invars])
            values.update(zip(call.outvars, results, strict=True))
        return [value(x) for x in jaxpr.outvars]

    def plan(self, results: Any) -> Plan:
        used: list[Any] = [results]
        for step in self._steps:
            if isinstance(step, Kernel):
                used.append([step.operands[i] for i in step.read])
            else:
                used.append(step.args)
        uses = Counter(x.number for x in jax.tree.leaves(used) if isinstance(x, Value))
        for x in self._overwritten.values():
            if not (isinstance(x, Value) and x.number in self._made and uses[x.number] == 1):
                expected = "kernels that write into memory that is made for them"
                fail(NotImplementedError, "implementation", expected, "into another array's")

        def in_memory(x: Any) -> Any:
            while isinstance(x, Value) and x.number in self._overwritten:
                x = replace(x, number=self._overwritten[x.number].number)
            return x

        steps = [
            step._replace(operands=tuple(map(in_memory, step.operands)))
            if isinstance(step, Kernel)
            else step._replace(
                args=jax.tree.map(in_memory, step.args), results=tuple(map(in_memory, step.results))
            )
            for step in self._steps
        ]
        found = jax.tree.map(in_memory, results)
        return Plan(tuple(steps), tuple(found) if isinstance(found, list) else found)

    def _call(self, call: Any, operands: list[Any]) -> Sequence[Any]:
        name, parameters = call.primitive.name, call.params
        inner = parameters.get("jaxpr", parameters.get("call"))
        if name in ("jit", "pjit", "custom_vmap_call"):
            return self.add(inner.jaxpr, inner.consts, operands)
        results = tuple(self.value_of(x.aval) for x in call.outvars)
        if name == "mpmd_map":
            num_aliased = getattr(parameters["compiler_params"], "num_aliased", 0)
            for i in range(-num_aliased, 0):
                self._overwritten[results[i].number] = operands[i]
            self._made |= {x.number for x in results}
            numbers = range(len(operands) + len(results))
            read, written = tuple(numbers[: len(operands)]), tuple(numbers[len(operands) :])
            self._steps.append(Kernel(call, (*operands, *results), read, written))
        elif name == "fusion":
            args = _with_operands(parameters["arguments"], operands)
            self._steps.append(Operation(parameters["name"], args, {}, results))
        elif name == "broadcast_in_dim" and np.ndim(operands[0]) == 0 and not _is_value(operands):
            self._made |= {x.number for x in results}
            self._steps.append(Operation("full", (operands[0],), {}, results))
        elif _is_value(operands) and _keeps_order(name, operands[0], results[0]):
            self._steps.append(Operation("reshape", tuple(operands), {}, results))
        elif name == "bitcast_convert_type" and _is_value(operands):
            self._steps.append(Operation("bitcast", tuple(operands), {}, results))
        else:
            expected = "kernels, functions that are a fusion, zeros, reshapes and bitcasts"
            fail(NotImplementedError, "implementation", expected, f"{name} of JAX")
        return results


def _is_value(operands: list[Any]) -> bool:
    return isinstance(operands[0], Value)


def _keeps_order(name: str, before: Value, after: Value) -> bool:
    moves_none = name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")
    return moves_none and math.prod(before.shape) == math.prod(after.shape)


def _with_operands(arguments: Any, operands: list[Any]) -> Any:
    return jax.tree.map(lambda x: operands[x.number] if isinstance(x, Operand) else x, arguments)
