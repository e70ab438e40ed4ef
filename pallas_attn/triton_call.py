"""A kernel of `torch_attn`, written in Triton or Gluon, as an operation of JAX.

`kernel_call` is a primitive. It is lowered to jaxlib's ``triton_kernel_call_ffi``, which takes PTX
and launches it on the stream of the program, without the host waiting. jaxlib gives a kernel its
operands and then its results, each to one parameter, and encodes TMA descriptors of them. So two
things are arranged here:

- The parameters are declared in that order. PTX refers to them by name, so that no code changes.
- An operand that has several parameters is passed several times. A result is passed twice at most:
  once more as an operand that shares its memory.

This uses jaxlib's private API (`pallas_attn.private`); checked with JAX 0.11.2.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import mlir

from pallas_attn.private import gpu_triton
from twin_attention.contract.validate import fail

_TARGET = "triton_kernel_call_ffi"

kernel_call_p = core.Primitive("torch_attn_kernel")
kernel_call_p.multiple_results = True


class Buffer(NamedTuple):
    """A buffer that jaxlib passes, and the parameter that takes it.

    Attributes:
        operand: which of the launch's tensors it is.
        parameter: which of the kernel's parameters; None for none: jaxlib's are more then than the
            kernel's, and the last go unread.
    """

    operand: int
    parameter: int | None


class Buffers(NamedTuple):
    """The buffers of a call, in the order in which jaxlib passes them.

    Attributes:
        inputs: operands that are read.
        shared: operands whose memory is that of the result of the same number.
        results: all results.
    """

    inputs: tuple[Buffer, ...]
    shared: tuple[Buffer, ...]
    results: tuple[Buffer, ...]


def kernel_call(
    inputs: Sequence[jax.Array],
    *,
    launch: Any,
    card: Any,
    read: tuple[int, ...],
    written: tuple[int, ...],
    zeroed: tuple[int, ...],
) -> list[jax.Array]:
    """Launch a kernel.

    Args:
        inputs: those of its operands that it reads, in the order of `read`.
        launch: a `torch_attn.launch.Launch`.
        card: the `torch_attn.targets.Card` to compile for.
        read, written: which of the launch's tensors have values before, and which may have others
            after it. Those of both are results in the memory of operands.
        zeroed: which of the results are 0 before.

    Returns:
        The results, in the order of `written`.
    """
    return kernel_call_p.bind(
        *inputs, launch=launch, card=card, read=read, written=written, zeroed=zeroed
    )


def result_types(launch: Any, written: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    """Return the types of a launch's results; arguments as `kernel_call` has them."""
    layouts = [x for x in _leaves(launch.layouts) if x is not None]
    dtype_name = import_module("torch_attn.operands").dtype_name
    return [
        jax.ShapeDtypeStruct(tuple(layouts[i].shape), dtype_name(layouts[i].dtype)) for i in written
    ]


def _leaves(layouts: Any) -> Any:
    return import_module("torch_attn.layouts").leaves(layouts)


@kernel_call_p.def_abstract_eval
def _abstract(*inputs, launch, card, read, written, zeroed):
    return [ShapedArray(x.shape, x.dtype) for x in result_types(launch, written)]


def _call(*inputs, launch, card, read, written, zeroed):
    compiled = import_module("torch_attn.ahead").compile_ahead(launch, card)
    buffers = arrange_buffers(compiled.parameters, read, written, zeroed)
    types = dict(zip(written, result_types(launch, written), strict=True))
    given = dict(zip(read, inputs, strict=True))
    operands = [given[x.operand] for x in buffers.inputs]
    aliases = {}
    results = [x.operand for x in buffers.results]
    for x in buffers.shared:
        aliases[len(operands)] = results.index(x.operand)
        operand = types[x.operand]
        before = given.get(x.operand)
        operands.append(jax.lax.empty(operand.shape, operand.dtype) if before is None else before)
    opaque = _opaque(launch.name, compiled, card.capability, buffers, types, zeroed)
    call = jax.ffi.ffi_call(
        _TARGET,
        [types[i] for i in results],
        input_output_aliases=aliases,
        custom_call_api_version=4,
    )
    found = dict(zip(results, call(*operands, opaque=opaque), strict=True))
    return [found[i] for i in written]


def arrange_buffers(
    parameters: Sequence[Any],
    read: tuple[int, ...],
    written: tuple[int, ...],
    zeroed: tuple[int, ...],
) -> Buffers:
    """Return the buffers of a call; arguments as `kernel_call` has them.

    Raises:
        NotImplementedError: a result has more parameters than jaxlib can give it.
    """
    takers: dict[int, list[int | None]] = {}
    mapped = set()
    for i, x in enumerate(parameters):
        if hasattr(x, "operand"):
            takers.setdefault(x.operand, []).append(i)
            if _is_descriptor(x):
                mapped.add(x.operand)
    for operand in written:
        has_values = operand in read and len(takers[operand]) == 1
        # jaxlib sets to 0 what is no descriptor's.
        if has_values or operand in mapped.intersection(zeroed):
            takers[operand].append(None)
    most = max(len(takers[x]) for x in written)
    if most > 2:
        expected = "kernels whose results have at most two descriptors, as jaxlib passes them"
        fail(NotImplementedError, "implementation", expected, most)
    inputs = [Buffer(x, i) for x, found in takers.items() if x not in written for i in found]
    shared = [Buffer(x, takers[x][0]) for x in written if len(takers[x]) == 2]
    results = [Buffer(x, takers[x][-1]) for x in written]
    results.sort(key=lambda x: x.parameter is None)  # what no parameter takes is last
    return Buffers(tuple(inputs), tuple(shared), tuple(results))


def _is_descriptor(parameter: Any) -> bool:
    return hasattr(parameter, "box")


def _opaque(
    name: str,
    compiled: Any,
    capability: int,
    buffers: Buffers,
    types: dict[int, jax.ShapeDtypeStruct],
    zeroed: tuple[int, ...],
) -> bytes:
    """Return what jaxlib launches."""
    if not hasattr(gpu_triton, "TritonKernel"):
        plugin = "jaxlib's CUDA plugin (pip install 'jax[cuda13]' or 'jax[cuda12]')"
        fail(NotImplementedError, name, plugin, "none")
    sizes = {i: types[i].size * types[i].dtype.itemsize for i in zeroed}
    taken = [*buffers.inputs, *buffers.shared, *buffers.results]
    numbers = [i for i, x in enumerate(compiled.parameters) if not hasattr(x, "operand")]
    order, given, unread = [], [], []
    for x in taken:
        if x.parameter is not None and _is_descriptor(compiled.parameters[x.parameter]):
            given.append(_descriptor(compiled.parameters[x.parameter]))
        else:
            # A result that is passed twice is set to 0 twice, before the launch.
            pointer = gpu_triton.create_array_parameter(sizes.get(x.operand, 0), 16)
            (unread if x.parameter is None else given).append(pointer)
        order += [x.parameter] * (x.parameter is not None)
    for i in numbers:
        value, kind = compiled.parameters[i]
        given.append(gpu_triton.create_scalar_parameter(value, kind))
    kernel = gpu_triton.TritonKernel(
        compiled.name, compiled.num_warps, 1, compiled.shared,
        reorder_parameters(compiled.ptx, compiled.name, [*order, *numbers]), "", capability,
    )  # fmt: skip
    call = gpu_triton.TritonKernelCall(kernel, *compiled.grid, [*given, *unread])
    return zlib.compress(call.to_proto(name, b""), 9)


def _descriptor(x: Any) -> Any:
    return gpu_triton.create_tma_descriptor_parameter(
        elem_type=x.element, swizzle=x.swizzle, shape=x.shape, strides=x.strides,
        block_shape=x.box, oob_fill=0,
    )  # fmt: skip


def reorder_parameters(ptx: str, name: str, order: Sequence[int]) -> str:
    """Return a kernel whose function declares its parameters in another order.

    Args:
        ptx: the code, which refers to parameters by their names.
        name: the function's.
        order: the old numbers of the first parameters; others follow.
    """
    found = re.search(rf"\.entry {re.escape(name)}\(([^)]*)\)", ptx)
    assert found is not None, "a kernel without its function"
    declared = [x.strip() for x in found[1].split(",")]
    others = [i for i in range(len(declared)) if i not in order]
    text = ",\n\t".join(declared[i] for i in (*order, *others))
    return f"{ptx[: found.start(1)]}\n\t{text}\n{ptx[found.end(1) :]}"


mlir.register_lowering(kernel_call_p, mlir.lower_fun(_call, multiple_results=True), platform="cuda")
