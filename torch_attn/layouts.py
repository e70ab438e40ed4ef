"""Operands of a launch, in nested tuples, and the layouts that stand for them.

A kernel takes an optional feature's operands and numbers as one named tuple. The host prepares it
with layouts, and a launch puts tensors or addresses in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

import torch

from torch_attn.operands import strides_in_memory
from torch_attn.tensor_maps import TensorMap


class Layout(NamedTuple):
    """Hold what a launch depends on of an operand: neither its values nor its address.

    `operand` is its number among the tensors; `strides` are `strides_in_memory`; `is_aligned` to 16
    bytes.
    """

    operand: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_aligned: bool


def layouts_of(operands: Any) -> Any:
    operand = count()

    def layout(x: torch.Tensor | None) -> Layout | None:
        if x is None:
            return None
        return Layout(next(operand), x.dtype, x.shape, strides_in_memory(x), x.data_ptr() % 16 == 0)

    return replace_leaves(operands, layout)


class Placeholder:
    """Stands for an operand when a kernel is compiled: Triton asks its dtype and alignment."""

    def __init__(self, layout: Layout) -> None:
        self.dtype, self._is_aligned = layout.dtype, layout.is_aligned

    def data_ptr(self) -> int:
        return 0 if self._is_aligned else 1


def placeholders_of(layouts: Any) -> tuple[Placeholder, ...]:
    return tuple(Placeholder(x) for x in leaves(layouts) if x is not None)


def bind(arguments: Any, tensors: tuple[Any, ...]) -> Any:
    """Put tensors, or anything with a `data_ptr`, in place of their layouts."""

    def bound(x: Any) -> Any:
        if isinstance(x, TensorMap):
            return x.bind(tensors[x.operand])
        return tensors[x.operand] if isinstance(x, Layout) else x

    return replace_leaves(arguments, bound)


def leaves(x: Any) -> Iterator[Any]:
    if _is_leaf(x):
        yield x
    else:
        for item in x:
            yield from leaves(item)


def replace_leaves(x: Any, function: Callable[[Any], Any]) -> Any:
    if _is_leaf(x):
        return function(x)
    items = [replace_leaves(item, function) for item in x]
    return type(x)(*items) if hasattr(x, "_fields") else tuple(items)


def _is_leaf(x: Any) -> bool:
    return not isinstance(x, tuple) or isinstance(x, (Layout, TensorMap))
