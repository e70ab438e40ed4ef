"""Values of a kernel: numbers, tensors, pointers, descriptors and shared memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.torch_attn.gluon_interpreter.program import InterpreterError, Work, now, pause


def plain(x: Any) -> Any:
    return x.value if isinstance(x, tl.constexpr) else x


class Int(int):
    """An integer whose division rounds towards zero, as the hardware's does."""

    def to(self, _dtype: Any) -> Int:
        return self

    def __neg__(self) -> Int:
        return Int(-int(self))


def scalar(x: Any) -> Any:
    return Int(x) if isinstance(x, int) and not isinstance(x, bool) else x


def _divide(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_INTEGER = {
    "floordiv": _divide,
    "mod": lambda a, b: a - b * _divide(a, b),
    **{n: getattr(operator, n) for n in ("add", "sub", "mul", "and_", "or_", "xor")},
    **{n: getattr(operator, n) for n in ("lshift", "rshift")},
}
_FLOAT = {
    **_INTEGER,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "mod": torch.fmod,
    "truediv": operator.truediv,
}
_COMPARE = {n: getattr(operator, n) for n in ("lt", "le", "gt", "ge", "eq", "ne")}


def _int_operator(function: Callable[..., Any], swapped: bool) -> Callable[..., Any]:
    def apply(self: int, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        a, b = (int(other), int(self)) if swapped else (int(self), int(other))
        return Int(function(a, b))

    return apply


def _tensor_operator(function: Callable[..., Any], swapped: bool) -> Callable[..., Any]:
    def apply(self: Tensor, other: Any) -> Any:
        if not isinstance(other, Tensor | int | float):
            return NotImplemented
        a, b = self.values, values_of(other)
        is_word = a.dtype == torch.uint32  # with which torch computes nothing
        if is_word:
            a, b = a.long(), b.long() if isinstance(b, torch.Tensor) else b
        result = function(*((b, a) if swapped else (a, b)))
        if is_word and result.dtype == torch.int64:
            result = (result & 0xFFFFFFFF).to(torch.uint32)
        return Tensor(result, self.layout)

    return apply


def torch_dtype(dtype: Any) -> torch.dtype:
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "int1": "bool"}
    return getattr(torch, names.get(dtype.name, dtype.name))


def triton_dtype(dtype: torch.dtype) -> Any:
    return getattr(gl, str(dtype).removeprefix("torch.").replace("bool", "int1"))


class Tensor:
    """A tensor in registers. The result of a product has values only after a wait."""

    def __init__(
        self, values: torch.Tensor, layout: Any = None, product: Work | None = None
    ) -> None:
        self.raw, self.layout, self.product = values, layout, product

    @property
    def values(self) -> torch.Tensor:
        if self.product is not None:
            raise InterpreterError("a product is used before it was waited for")
        return self.raw

    @property
    def shape(self) -> list[int]:
        return list(self.raw.shape)

    @property
    def dtype(self) -> Any:
        return triton_dtype(self.raw.dtype)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=self.layout, shape=self.shape, element_ty=self.dtype)

    def reshape(self, shape: tuple[int, ...]) -> Tensor:
        return Tensor(self.values.reshape(shape))

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.values[index], None)

    def __neg__(self) -> Tensor:
        return Tensor(-self.values, self.layout)

    def __invert__(self) -> Tensor:
        return Tensor(~self.values, self.layout)

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        dtype = torch_dtype(dtype)
        values = self.values
        return Tensor(values.view(dtype) if bitcast else values.to(dtype), self.layout)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


for _name, _function in _FLOAT.items():
    for _swapped in (False, True):
        _method = f"__{'r' if _swapped else ''}{_name.rstrip('_')}__"
        setattr(Tensor, _method, _tensor_operator(_function, _swapped))
        if _name in _INTEGER:
            setattr(Int, _method, _int_operator(_INTEGER[_name], _swapped))
for _name, _function in _COMPARE.items():
    setattr(Tensor, f"__{_name}__", _tensor_operator(_function, False))


def values_of(x: Any) -> Any:
    return x.values if isinstance(x, Tensor) else x


class Pointer:
    def __init__(self, memory: torch.Tensor, offset: Any) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=triton_dtype(memory.dtype))
        self.type = SimpleNamespace(is_ptr=lambda: True)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def to(self, _dtype: Any) -> Pointer:
        return self

    @property
    def shape(self) -> list[int]:
        return self.offset.shape

    def reshape(self, shape: tuple[int, ...]) -> Pointer:
        return Pointer(self.memory, self.offset.reshape(shape))

    def read(self, mask: Any, other: Any) -> torch.Tensor:
        offset, mask = self.select(mask)
        found = self.memory[torch.where(mask, offset, 0)]
        return torch.where(mask, found, torch.as_tensor(other).to(found.dtype))

    def select(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        offset = torch.as_tensor(values_of(self.offset)).long()
        mask = torch.as_tensor(True if mask is None else values_of(mask))
        offset, mask = torch.broadcast_tensors(offset, mask)
        used = offset[mask]
        if used.numel() and (used.min() < 0 or used.max() >= len(self.memory)):
            raise InterpreterError("an address outside its tensor")
        return offset, mask


class Descriptor:
    def __init__(self, descriptor: TensorDescriptor) -> None:
        base = descriptor.base
        self.memory = base.as_strided(descriptor.shape, descriptor.strides)
        self.box = tuple(descriptor.block_shape)
        self.dtype, self.layout = triton_dtype(base.dtype), descriptor.layout

    def views(self, coord: Iterable[int], box: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what exists of a box, in global memory and in the box."""
        if tuple(box.shape) != self.box or box.dtype != self.memory.dtype:
            raise InterpreterError(f"a box of {self.box} for a buffer of {tuple(box.shape)}")
        outside, inside = [], []
        for first, size, end in zip(coord, self.box, self.memory.shape, strict=True):
            begin, stop = (min(max(x, 0), end) for x in (first, first + size))
            outside.append(slice(begin, stop))
            inside.append(slice(begin - first, stop - first))
        return self.memory[tuple(outside)], box[tuple(inside)]


def add_bits(bytes: torch.Tensor, having: int, more: int) -> None:
    """Give bytes that have one of some bits more bits; without an index, which is slow."""
    bytes |= (bytes & having).ne_(0).mul_(more)


class Shared:
    """A buffer in shared memory, or a view of one.

    `bits` has two sets of partitions for each byte. `unfenced` are those of which one has yet to
    fence what is written there: the byte's writers and those that have met them at a named barrier
    since. Writing an element's own value is no change: several may clear the same rows.

    `known` may write there: the last writers and those that have met them since at any barrier. It
    is 0 where all may, because TMA wrote there.
    """

    def __init__(self, values: torch.Tensor, bits: torch.Tensor) -> None:
        self.values, self.bits = values, bits

    unfenced = property(lambda self: self.bits[0])
    known = property(lambda self: self.bits[1])

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    @property
    def dtype(self) -> Any:
        return triton_dtype(self.values.dtype)

    def index(self, i: int) -> Shared:
        if not 0 <= i < len(self.values):
            raise InterpreterError(f"index {i} of {len(self.values)} buffers")
        return Shared(self.values[i], self.bits[:, i])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        bits = self.bits.narrow(dim + 1, start, length)
        return Shared(self.values.narrow(dim, start, length), bits)

    def permute(self, order: Iterable[int]) -> Shared:
        bits = self.bits.permute(0, *(x + 1 for x in order), -1)
        return Shared(self.values.permute(*order), bits)

    def reshape(self, shape: Iterable[int]) -> Shared:
        return Shared(self.values.view(*shape), self.bits.view(2, *shape, -1))

    def reinterpret(self, dtype: Any, shape: Iterable[int], _layout: Any) -> Shared:
        dtype, shape = torch_dtype(dtype), tuple(shape)
        values = self.values.view(-1).view(dtype).view(shape)
        return Shared(values, self.bits.view(2, *shape, dtype.itemsize))

    def load(self, layout: Any = None) -> Tensor:
        pause()
        return Tensor(self.values.clone(), layout)

    def store(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise InterpreterError(f"{value.shape} {value.dtype} into {self.shape} {self.dtype}")
        pause()
        old, new = self.values, value.values
        changes = (old != new) & ((old == old) | (new == new))
        self.values.copy_(new)
        own, bits, known = now.partition.bit, self.bits, self.known
        changes = changes.byte().unsqueeze(-1).expand(known.shape).contiguous()
        if (known & own).eq_(0).mul_(known).mul_(changes).any():
            message = "shared memory is overwritten by a partition that has not met its writer"
            raise InterpreterError(message)
        bits.mul_(1 - changes).bitwise_or_((bits | changes).ne_(0).mul_(own))

    def check_fence(self) -> None:
        """Raise an error if a product or TMA would read what is not fenced."""
        if self.unfenced.any():
            raise InterpreterError("shared memory is read by a product or TMA without a fence")
