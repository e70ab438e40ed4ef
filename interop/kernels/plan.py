"""What a host function does, so that another framework can do it instead.

A host function of a side, such as ``kernels.sm90.flash_bwd.flash_bwd``, allocates memory, computes
a little and launches kernels, all of which follows from its operands' shapes. A plan lists these
steps, so another framework's program can hold the same launches, in its own memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Value:
    """Describe an array of a plan, which is contiguous.

    Attributes:
        number: its memory's. The operands have the first numbers, in order.
        shape, dtype: as the step sees it; `dtype` is a name.
    """

    number: int
    shape: tuple[int, ...]
    dtype: str


class Operation(NamedTuple):
    """Describe an operation of the host function's framework.

    Attributes:
        name: the name by which the other framework finds it. Of torch: an operator's, or "set",
            which writes a tensor at an index of an axis (its arguments are the tensor, the axis,
            the index, and what to write). Of JAX: the name of a `pallas_attn.fusions.fusion`;
            "full", an array filled with a number; "reshape"; or "bitcast", the same memory in
            another dtype.
        args: its arguments, with a `Value` for an array.
        kwargs: its keyword arguments.
        results: what it returns.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Value, ...]


class Kernel(NamedTuple):
    """Describe the launch of a kernel.

    Attributes:
        code: a `torch_attn.launch.Launch`, or the operation of a JAX trace.
        operands: the memory it is given, results included, in order. A NumPy array is a constant;
            None is memory that no argument uses.
        read: which operands have values before the launch, by position.
        written: which may have new values after it.
        zeroed: which of the written operands are 0 before it.
    """

    code: Any
    operands: tuple[Any, ...]
    read: tuple[int, ...]
    written: tuple[int, ...]
    zeroed: tuple[int, ...] = ()


class Plan(NamedTuple):
    """Describe what a host function does.

    Attributes:
        steps: in order.
        results: what it returns, with a `Value` for an array.
    """

    steps: tuple[Operation | Kernel, ...]
    results: Any
