"""Record what a host function of `torch_attn` does, so that JAX can do it instead.

A host function allocates memory, computes a little and launches kernels; these steps follow from
its operands' shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Type(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Value:
    """A contiguous array of a plan, with its memory's number; operands have the first ones."""

    number: int
    shape: tuple[int, ...]
    dtype: str


class Operation(NamedTuple):
    """An operation of torch; arguments have `Value` for arrays.

    `name` is an operator's, or "set", which writes a tensor at an index of an axis (tensor, axis,
    index, what to write).
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Value


class Kernel(NamedTuple):
    """The launch of a kernel.

    code: a `known.Code`.
    operands: its memory, results included; None is unused memory.
    read, written: positions of operands with values before and after it.
    zeroed: which of these are 0 before it.
    """

    code: Any
    operands: tuple[Value | None, ...]
    read: tuple[int, ...]
    written: tuple[int, ...]
    zeroed: tuple[int, ...]


class Plan(NamedTuple):
    steps: tuple[Operation | Kernel, ...]
    results: Any
