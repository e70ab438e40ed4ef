from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from twin_attention.contract.validate.errors import fail, not_a_tensor
from twin_attention.contract.validate.operands import Operand

ALIGNED = 16  # bytes, for TMA and Triton
_NARROW = (torch.float16, torch.bfloat16)


def check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        not_a_tensor(name, "a torch.Tensor", x)


def operand(name: str, x: Tensor) -> Operand:
    """Describe a tensor to the argument checks."""
    check_tensor(name, x)
    if x.is_nested:
        fail(TypeError, name, "a dense tensor", "a nested tensor")
    if x.is_quantized:
        fail(TypeError, name, "a dense tensor", f"quantized {x.dtype}")
    if x.layout is not torch.strided:
        fail(TypeError, name, "a dense tensor", f"layout {x.layout}")
    return Operand(
        name,
        tuple(x.shape),
        dtype_name(x.dtype),
        _device_name(x.device),
        has_rows(x) or x.numel() == 0,
        x.itemsize > 1 or not any(n % 2 for n in (x.storage_offset(), *strides_in_memory(x)[:-1])),
    )


def strides_in_memory(x: Tensor) -> tuple[int, ...]:
    """Return a tensor's strides; that of an axis of size 1, which means nothing, follows from the
    axis behind it.
    """
    strides, behind = [], 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        strides.append(behind if size == 1 else stride)
        behind = size * strides[-1]
    return tuple(reversed(strides))


def has_rows(x: Tensor) -> bool:
    return x.ndim == 0 or x.stride(-1) == 1 or x.shape[-1] == 1


def with_rows(x: Tensor) -> Tensor:
    """Return the tensor, copied if its last dimension is not contiguous."""
    return x if has_rows(x) else x.contiguous()


def rows_aligned(*tensors: Tensor) -> bool:
    for x in tensors:
        if _start(x) % ALIGNED or any(
            stride * x.itemsize % ALIGNED for stride in strides_in_memory(x)[:-1]
        ):
            return False
    return True


def aligned(x: Tensor) -> Tensor:
    """Return the tensor, copied if its rows are not aligned."""
    return x if rows_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _start(x: Tensor) -> Any:
    try:
        return x.data_ptr()
    except RuntimeError:  # a fake tensor, or one of torch.func, has no address
        return x.storage_offset() * x.itemsize


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_device_name = cache(str)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast casts to on a device, or None."""
    kind = device.type
    # Torch raises for device kinds without autocast, and Dynamo cannot trace the query.
    if kind not in ("cpu", "cuda", "mps", "xpu", "hpu") or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cast_inputs(q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Cast q, k and v as autocast does for `scaled_dot_product_attention`."""
    for name, x in zip("qkv", (q, k, v), strict=True):
        check_tensor(name, x)
    dtype = autocast_dtype(q.device)
    if dtype is None:
        return q, k, v
    q, k, v = (
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v)
    )
    return q, k, v


def in_float32(x: Any) -> Any:
    """Return sinks or slopes in float32; a model may have them in 16 bits."""
    return x.float() if isinstance(x, Tensor) and x.dtype in _NARROW else x


def cast_float32(name: str, x: Any) -> Tensor:
    """Cast a decode's float32 tensor if autocast is on.

    A 16-bit tensor stays, unlike in `flash_attention`: it has to agree with the cache.
    """
    check_tensor(name, x)
    dtype = autocast_dtype(x.device)
    return x if dtype is None or x.dtype != torch.float32 else x.to(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
