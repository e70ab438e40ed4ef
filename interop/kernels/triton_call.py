"""A kernel of `torch_attn`, written in Triton or Gluon, as an operation of JAX.

jaxlib's ``triton_kernel_call_ffi`` passes the operands and then the results to a kernel's
parameters, in order, and encodes their TMA descriptors. So each parameter gets an operand, and a
result shares an operand's memory. If a second parameter takes such a result, it gets the result
itself; the kernel is then recompiled with that parameter last.

This uses jaxlib's private API (`pallas_attn.private`); checked with JAX 0.11.2, whose
``jaxlib/gpu/triton.proto`` has the fields that are written here.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import mlir

from pallas_attn.own_memory import lower_with_own_memory
from pallas_attn.private import gpu_triton
from pallas_attn.targets import cuda_devices
from torch_attn.launch import Launch
from torch_attn.layouts import leaves
from torch_attn.operands import dtype_name
from torch_attn.targets import Card
from twin_attention.contract.validate.errors import fail
from twin_attention.interop.kernels.cubin import (
    Compiled,
    Descriptor,
    Number,
    Parameter,
    Pointer,
    assemble,
    compile_in_thread,
    compile_launch,
    lock_of,
)
from twin_attention.interop.kernels.plan import Kernel

_TARGET = "triton_kernel_call_ffi"

kernel_call_p = core.Primitive("torch_attn_kernel")
kernel_call_p.multiple_results = True


class Buffer(NamedTuple):
    """A buffer: which of the launch's tensors, and the parameter that takes it, or None."""

    operand: int
    parameter: int | None


class Buffers(NamedTuple):
    """The buffers of a call, in jaxlib's order.

    A result among the operands shares that result's memory. Results that a parameter takes come
    first.
    """

    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]


def kernel_call(inputs: Sequence[jax.Array], kernel: Kernel, card: Card) -> list[jax.Array]:
    """Launch a kernel on the operands that it reads; return what it writes, in order.

    What it reads and writes is a result in the memory of an operand.
    """
    if cuda_devices():  # without one, few traced programs are lowered for a GPU
        compile_in_thread(partial(arranged, kernel.code, kernel.written, kernel.zeroed, card))
    return kernel_call_p.bind(*inputs, kernel=kernel._replace(operands=()), card=card)


def result_types(inputs: Sequence[Any], kernel: Kernel) -> list[jax.ShapeDtypeStruct]:
    """Return the types of a launch's results.

    A result that is also read has the input's type, even if the kernel sees only its bits.
    """
    layouts = [x for x in leaves(kernel.code.layouts) if x is not None]
    given = dict(zip(kernel.read, inputs, strict=True))
    return [
        jax.ShapeDtypeStruct(given[i].shape, given[i].dtype)
        if i in given
        else jax.ShapeDtypeStruct(tuple(layouts[i].shape), dtype_name(layouts[i].dtype))
        for i in kernel.written
    ]


@kernel_call_p.def_abstract_eval
def _abstract(*inputs, kernel, card):
    return [ShapedArray(x.shape, x.dtype) for x in result_types(inputs, kernel)]


def _call(*inputs, kernel, card):
    launch, _, read, written, zeroed = kernel
    compiled, buffers = arranged(launch, written, zeroed, card)
    types = dict(zip(written, result_types(inputs, kernel), strict=True))
    values = dict(zip(read, inputs, strict=True))
    for i in {*written} - {*read}:
        values[i] = jax.lax.empty(types[i].shape, types[i].dtype)
    results = [x.operand for x in buffers.results]
    aliases = {
        i: results.index(x.operand) for i, x in enumerate(buffers.operands) if x.operand in written
    }
    call = jax.ffi.ffi_call(
        _TARGET,
        [types[i] for i in results],
        input_output_aliases=aliases,
        custom_call_api_version=4,
    )
    sizes = {i: types[i].size * types[i].dtype.itemsize for i in zeroed}
    opaque = _opaque(launch.name, compiled, card.capability, buffers, sizes)
    found = call(*(values[x.operand] for x in buffers.operands), opaque=opaque)
    return [found[results.index(i)] for i in written]


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


def arranged(
    launch: Launch, written: tuple[int, ...], zeroed: tuple[int, ...], card: Card
) -> tuple[Compiled, Buffers]:
    """Return a launch's kernel, whose parameters are in the order of its buffers, and these."""
    with lock_of(launch, card):
        return _arranged(launch, written, zeroed, card)


@lru_cache(maxsize=1024)
def _arranged(
    launch: Launch, written: tuple[int, ...], zeroed: tuple[int, ...], card: Card
) -> tuple[Compiled, Buffers]:
    compiled = compile_launch(launch, card)
    buffers = arrange_buffers(compiled.parameters, written, zeroed)
    return order_parameters(compiled, buffers), buffers


def order_parameters(compiled: Compiled, buffers: Buffers) -> Compiled:
    """Return a kernel that takes its parameters in the order of the buffers."""
    parameters = compiled.parameters
    last = [x.parameter for x in buffers.results if x.parameter is not None]
    before = [x.parameter for x in buffers.operands if x.parameter is not None]
    if not last or last[0] > max(before):
        return compiled
    order = [*(i for i in range(len(parameters)) if i not in last), *last]
    moved = tuple(parameters[i] for i in order)
    return compiled._replace(cubin=assemble(compiled, order), parameters=moved)


def _opaque(
    name: str, compiled: Compiled, capability: int, buffers: Buffers, sizes: dict[int, int]
) -> bytes:
    """Return what jaxlib launches; `sizes` are the bytes to zero, by result."""
    if not hasattr(gpu_triton, "TritonKernel"):
        plugin = "jaxlib's CUDA plugin (pip install 'jax[cuda13]' or 'jax[cuda12]')"
        fail(NotImplementedError, name, plugin, "none")
    code = compiled.cubin
    given = [_parameter(x) for x in compiled.parameters]
    # More parameters than the kernel has: no code reads them.
    given += [_address(sizes.get(x.operand, 0)) for x in buffers.results if x.parameter is None]
    # The name stands in for PTX, which jaxlib would hash and copy each time a program runs.
    kernel = gpu_triton.TritonKernel(
        compiled.name, compiled.num_warps, 1, compiled.shared, sha256(code).hexdigest(), "",
        capability,
    )  # fmt: skip
    call = gpu_triton.TritonKernelCall(kernel, *compiled.grid, given).to_proto(name, b"")
    # Protocol buffers merge a message that appears twice: this adds TritonKernel.module_image.
    image = _field(1, code) + _field(2, compiled.name.encode()) + _field(3, compiled.shared)
    return zlib.compress(call + _field(1, _field(1, _field(11, image))))


def _field(number: int, value: bytes | int) -> bytes:
    """Return a protocol buffers field."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def _parameter(x: Parameter) -> Any:
    if isinstance(x, Descriptor):
        return _descriptor(x)
    return _address(0) if isinstance(x, Pointer) else gpu_triton.create_scalar_parameter(*x)


def _address(bytes_to_zero: int) -> Any:
    return gpu_triton.create_array_parameter(bytes_to_zero, 16)


def _descriptor(x: Descriptor) -> Any:
    return gpu_triton.create_tma_descriptor_parameter(
        elem_type=x.element, swizzle=x.swizzle, shape=x.shape, strides=x.strides,
        block_shape=x.box, oob_fill=0,
    )  # fmt: skip


def _lower(ctx, *inputs, kernel, card):
    rule = partial(mlir.lower_fun(_call, multiple_results=True), kernel=kernel, card=card)
    in_place = [i for i, x in enumerate(kernel.read) if x in kernel.written]
    return lower_with_own_memory(rule, ctx, inputs, in_place)


mlir.register_lowering(kernel_call_p, _lower, platform="cuda")
