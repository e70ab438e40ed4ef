"""Tensors as the argument checks see them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from twin_attention.contract.validate import Operand, not_a_tensor


def check_tensor(name: str, x: Any) -> None:
    """Refuse what is not a `torch.Tensor`."""
    if not isinstance(x, Tensor):
        not_a_tensor(name, "a torch.Tensor", x)


def operand(name: str, x: Tensor) -> Operand:
    """What a check needs to know of a tensor.

    Raises:
        TypeError: `x` is not a `torch.Tensor`.
    """
    check_tensor(name, x)
    *strides, last = x.stride() or (1,)
    return Operand(
        name,
        tuple(x.shape),
        dtype_name(x.dtype),
        _device_name(x.device),
        last == 1 or x.numel() == 0,
        x.itemsize > 1 or not any(n % 2 for n in (x.storage_offset(), *strides)),
    )


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


_device_name = cache(str)
