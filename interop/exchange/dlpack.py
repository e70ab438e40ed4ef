"""Pass a tensor from one framework to the other through DLPack.

What cannot be shared without a copy is refused first, because the frameworks silently narrow 64-bit
types, drop a negation bit, or copy unaligned memory.

Source: the DLPack protocol, https://dmlc.github.io/dlpack/latest/python_spec.html
"""

from __future__ import annotations

import jax
import torch
from jax.core import Tracer

from twin_attention.contract.validate.errors import fail
from twin_attention.interop.exchange.lifetime import release_after_jax, release_after_torch

DTYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip

# Without jax_enable_x64 JAX halves their width.
WIDE_DTYPES = {"int64", "uint64", "float64", "complex128"}

# Bytes to which XLA expects a foreign buffer to be aligned. Otherwise JAX copies silently on a CPU,
# and the first computation fails on a GPU.
ALIGNMENT = {"cpu": 64, "cuda": 16}


def to_jax(tensor: torch.Tensor, *, copy: bool | None = None) -> jax.Array:
    """Give a torch tensor to JAX, sharing its memory.

    Args:
        tensor: a dense CPU or CUDA tensor of a dtype in `DTYPES`, whose elements fill one block of
            memory in any order of the dimensions.
        copy: True returns an array with its own memory, and takes any strides and alignment. None
            and False share memory or raise.

    Returns:
        An array of the same shape and dtype on the same device, which keeps the memory alive and,
        unless it is a copy, shows later writes to `tensor`. The storage of a shared CPU tensor
        cannot be resized; that of a CUDA tensor must not be.

    Raises:
        TypeError: not a plain dense tensor with its own memory, or a 64-bit dtype while
            `jax_enable_x64` is off (also with `copy=True`).
        ValueError: a tensor that requires grad, or that only a copy could pass on.
        NotImplementedError: a dtype that JAX does not have.

    Example:
        >>> import torch
        >>> from twin_attention.interop.exchange import to_jax
        >>> to_jax(torch.arange(3, dtype=torch.int32))
        Array([0, 1, 2], dtype=int32)
    """
    _check_copy(copy)
    _check_tensor(tensor)
    if copy:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    else:
        _check_shareable(tensor)
    if not tensor.is_cuda:
        _fix_size(tensor)
        return jax.dlpack.from_dlpack(tensor, copy=False)
    # JAX may change this thread's current device; torch restores it.
    with torch.cuda.device(tensor.device):
        jax.local_devices()  # starts JAX, if need be: the last device is current then
        torch.cuda.set_device(tensor.device)
        array = jax.dlpack.from_dlpack(tensor, copy=False)
        release_after_jax(tensor, array)
    return array


def to_torch(array: jax.Array, *, copy: bool | None = None) -> torch.Tensor:
    """Give a JAX array to torch, sharing its memory.

    Args:
        array: an array on one CPU or CUDA device, of a dtype in `DTYPES`.
        copy: True returns a tensor with its own memory. None and False share memory.

    Returns:
        A tensor of the same shape and dtype on the same device, which keeps the memory alive.
        Writing to it in place changes `array` unless it is a copy.

    Raises:
        TypeError: not a JAX array, or a tracer.
        ValueError: an array that is deleted, or spread over several devices.
        NotImplementedError: a dtype that torch does not have.

    Example:
        >>> import jax.numpy as jnp
        >>> from twin_attention.interop.exchange import to_torch
        >>> to_torch(jnp.arange(3))
        tensor([0, 1, 2], dtype=torch.int32)
    """
    _check_copy(copy)
    _check_array(array)
    (device,) = array.devices()
    if device.platform != "gpu":
        tensor = torch.from_dlpack(array)
    else:
        with torch.cuda.device(device.local_hardware_id):  # as in `to_jax`
            tensor = torch.from_dlpack(array)
            if tensor.is_cuda:  # unlike pinned memory
                tensor = release_after_torch(tensor, array)
    return tensor.clone(memory_format=torch.contiguous_format) if copy else tensor


def _check_copy(copy: object) -> None:
    if copy is not None and not isinstance(copy, bool):
        fail(TypeError, "copy", "None or a bool", type(copy).__name__)


def _check_tensor(tensor: torch.Tensor) -> None:
    """Refuse what no copy makes acceptable."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        fail(TypeError, "tensor", "a plain torch.Tensor", type(tensor).__name__)
    if tensor.is_nested:
        fail(TypeError, "tensor", "a dense tensor", "a nested tensor")
    if tensor.is_quantized:
        fail(TypeError, "tensor", "a dense tensor", f"quantized {tensor.dtype}")
    if tensor.layout != torch.strided:
        fail(TypeError, "tensor", "a dense tensor", f"layout {tensor.layout}")
    if tensor.device.type not in ALIGNMENT:
        fail(TypeError, "tensor", "a tensor in CPU or CUDA memory", f"device {tensor.device}")
    if not _has_memory(tensor):
        expected = "a tensor with memory of its own (call to_jax outside torch.func and tracing)"
        fail(TypeError, "tensor", expected, "a wrapper of a torch transformation")
    if tensor.requires_grad:
        expected = "a tensor that does not require grad (use .detach(): JAX sees no graph)"
        fail(ValueError, "tensor", expected, "requires_grad=True")
    dtype = str(tensor.dtype).removeprefix("torch.")
    _check_dtype("tensor", dtype)
    if dtype in WIDE_DTYPES and jax.dtypes.canonicalize_dtype(dtype).name != dtype:
        expected = "a dtype that JAX does not narrow (set jax_enable_x64, or cast it first)"
        fail(TypeError, "tensor", expected, dtype)


def _check_shareable(tensor: torch.Tensor) -> None:
    """Refuse what only a copy can pass on."""
    if tensor.is_conj() or tensor.is_neg():
        bit = "conjugate" if tensor.is_conj() else "negative"
        expected = "a tensor whose memory holds its values (copy=True makes a copy)"
        fail(ValueError, "tensor", expected, f"one with the {bit} bit set")
    if tensor.numel() == 0:
        return
    if not (tensor.is_contiguous() or _is_compact(tensor)):
        expected = "elements that fill one block of memory (copy=True makes a copy)"
        got = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        fail(ValueError, "tensor", expected, got)
    alignment = ALIGNMENT[tensor.device.type]
    if offset := tensor.data_ptr() % alignment:
        expected = f"memory aligned to {alignment} bytes (copy=True makes a copy)"
        fail(ValueError, "tensor", expected, f"an address {offset} bytes past that")


def _fix_size(tensor: torch.Tensor) -> None:
    """Make torch refuse to resize a CPU tensor's memory, which JAX still reads.

    Torch refuses this for memory that NumPy sees. Bytes go to NumPy whatever the dtype.
    """
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


def _check_array(array: jax.Array) -> None:
    if isinstance(array, Tracer):
        expected = "a concrete jax.Array (call to_torch outside jit, grad and vmap)"
        fail(TypeError, "array", expected, type(array).__name__)
    if not isinstance(array, jax.Array):
        fail(TypeError, "array", "a jax.Array", type(array).__name__)
    if array.is_deleted():
        fail(ValueError, "array", "an array with memory", "a deleted or donated array")
    if (count := len(array.sharding.device_set)) != 1 or not array.is_fully_addressable:
        expected = "an array on one device (take one with .addressable_shards[i].data)"
        fail(ValueError, "array", expected, f"a sharding over {count} devices")
    _check_dtype("array", array.dtype.name)


def _check_dtype(name: str, dtype: str) -> None:
    if dtype not in DTYPES:
        fail(NotImplementedError, name, "a dtype that torch, JAX and DLPack share", dtype)


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _is_compact(tensor: torch.Tensor) -> bool:
    """Return True if some order of the dimensions has neither gaps nor repetition."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
