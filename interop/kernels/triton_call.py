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
from functools import partial
from hashlib import sha256
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import mlir

from pallas_attn.own_memory import lower_with_own_memory
from pallas_attn.private import gpu_triton
from pallas_attn.targets import cuda_devices
from twin_attention.contract.validate.errors import fail
from twin_attention.interop.kernels.known import begin, kernel_of
from twin_attention.interop.kernels.machine import Buffers, Compiled, Descriptor, Parameter, Pointer
from twin_attention.interop.kernels.plan import Kernel

_TARGET = "triton_kernel_call_ffi"

kernel_call_p = core.Primitive("torch_attn_kernel")
kernel_call_p.multiple_results = True


def kernel_call(inputs: Sequence[jax.Array], kernel: Kernel) -> list[jax.Array]:
    """Launch a kernel on the operands that it reads; return what it writes, in order.

    What it reads and writes is a result in the memory of an operand.
    """
    if cuda_devices():  # without one, few traced programs are lowered for a GPU
        begin(kernel.code, kernel.written, kernel.zeroed)
    return kernel_call_p.bind(*inputs, kernel=kernel._replace(operands=()))


def result_types(inputs: Sequence[Any], kernel: Kernel) -> list[jax.ShapeDtypeStruct]:
    """Return the types of a launch's results.

    A result that is also read has the input's type, even if the kernel sees only its bits.
    """
    given = dict(zip(kernel.read, inputs, strict=True))
    return [
        jax.ShapeDtypeStruct(given[i].shape, given[i].dtype)
        if i in given
        else jax.ShapeDtypeStruct(*kernel.code.types[i])
        for i in kernel.written
    ]


@kernel_call_p.def_abstract_eval
def _abstract(*inputs, kernel):
    return [ShapedArray(x.shape, x.dtype) for x in result_types(inputs, kernel)]


def _call(*inputs, kernel):
    code, _, read, written, zeroed = kernel
    compiled, buffers = kernel_of(code, written, zeroed)
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
    opaque = _opaque(code.name, compiled, code.question.card.capability, buffers, sizes)
    found = call(*(values[x.operand] for x in buffers.operands), opaque=opaque)
    return [found[results.index(i)] for i in written]


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


def _lower(ctx, *inputs, kernel):
    rule = partial(mlir.lower_fun(_call, multiple_results=True), kernel=kernel)
    in_place = [i for i, x in enumerate(kernel.read) if x in kernel.written]
    return lower_with_own_memory(rule, ctx, inputs, in_place)


mlir.register_lowering(kernel_call_p, _lower, platform="cuda")
