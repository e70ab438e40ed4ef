"""Describe the launch of a compiled Triton kernel: machine code, grid, parameters and buffers.

Nothing here needs a framework, so that all of it can be kept for a later process (`known.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from twin_attention.contract.validate.errors import fail


class Pointer(NamedTuple):
    operand: int


class Descriptor(NamedTuple):
    """A TMA descriptor of one of the launch's tensors, by CUDA's numbers; sizes are in elements."""

    operand: int
    element: int
    swizzle: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class Number(NamedTuple):
    """A number as a parameter; `kind` is Triton's, such as "i32"."""

    value: int | float
    kind: str


Parameter = Pointer | Descriptor | Number


class Compiled(NamedTuple):
    """A kernel for JAX to launch.

    Two unused addresses of scratch memory follow `parameters`. `ptx` and Triton's `metadata` serve
    to reorder them.
    """

    name: str
    cubin: bytes
    num_warps: int
    shared: int
    grid: tuple[int, int, int]
    parameters: tuple[Parameter, ...]
    ptx: str = ""
    metadata: Any = None


class Buffer(NamedTuple):
    operand: int
    parameter: int | None


class Buffers(NamedTuple):
    """The buffers of a call, in jaxlib's order.

    A result among the operands shares that result's memory. Results that a parameter takes come
    first.
    """

    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]


def arrange_buffers(
    parameters: Sequence[Parameter], written: tuple[int, ...], zeroed: tuple[int, ...]
) -> Buffers:
    """Return the buffers of a call, from numbers of operands.

    Raise `NotImplementedError` if a result has more parameters than jaxlib can give it.
    """
    operands: list[Buffer] = []
    again: dict[int, list[int]] = {x: [] for x in written}
    for i, x in enumerate(parameters):
        if not isinstance(x, Number):
            if x.operand in written and any(y.operand == x.operand for y in operands):
                again[x.operand].append(i)
            else:
                operands.append(Buffer(x.operand, i))
    # jaxlib can zero a buffer that it passes as an address, but not one behind a descriptor.
    counts = {x: 1 + len(found) + (x in zeroed and bool(found)) for x, found in again.items()}
    if (most := max(counts.values())) > 2:
        expected = "kernels whose results have at most two descriptors, as jaxlib passes them"
        fail(NotImplementedError, "implementation", expected, most)
    results = [Buffer(x, found[0] if found else None) for x, found in again.items()]
    results.sort(key=lambda x: len(parameters) if x.parameter is None else x.parameter)
    return Buffers(tuple(operands), tuple(results))
