"""Lower Mosaic GPU kernels for another framework to launch, and compile kernels before XLA does.

JAX's CUDA plugin compiles the lowered module, at the request of `torch_attn.mosaic_call` or XLA.
Checked with JAX 0.11.2; ``test_mosaic_in_torch.py`` and ``test_compile_beside.py`` in
``tests/pallas_attn_lowering`` guard it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pallas_attn.targets import Device, compiled_for
from twin_attention.contract.validate.errors import fail

_TARGET = "mosaic_gpu_v2"
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


class Lowered(NamedTuple):
    """Describe a kernel that JAX has lowered.

    Attributes:
        module: what it is compiled from.
        hash: the module's hash, by which the plugin finds a kernel that it has compiled.
        num_operands, num_results: numbers of buffers that it is called with.
    """

    module: bytes
    hash: bytes
    num_operands: int
    num_results: int


_collected: ContextVar[list[Lowered] | None] = ContextVar("collected", default=None)


def note_lowered(results: Sequence[Any]) -> None:
    """Hand a lowered kernel to `lower_ahead` if that is running; otherwise compile it in a thread.

    Args:
        results: results of the operation that calls it.
    """
    try:
        call = results[0].owner
        config = call.attributes["mhlo.backend_config"]
        module, hash = (config[name].value_bytes for name in ("module", "kernel_hash"))
    except (AttributeError, KeyError):  # of another JAX; XLA compiles the kernel
        return
    kernel = Lowered(module, hash, len(call.operands), len(call.results))
    if (collected := _collected.get()) is not None:
        collected.append(kernel)
    elif (device := compiled_for()) is not None:
        compile_beside(kernel, device)


def lower_ahead(call: Any) -> bytes:
    """Return the module that a kernel is compiled from.

    Args:
        call: the operation of a trace that calls it.

    Raises:
        NotImplementedError: JAX passes the kernel buffers other than its operands and results.
    """
    operands = [x.aval for x in call.invars]

    def function(*arrays: jax.Array) -> Any:
        return call.primitive.bind(*arrays, **call.params)

    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    found: list[Lowered] = []
    token = _collected.set(found)
    try:
        jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",))
    finally:
        _collected.reset(token)
    expected = len(operands), len(call.outvars)
    buffers = [(x.num_operands, x.num_results) for x in found]
    if buffers != [expected]:
        wanted = "one kernel with {} operands and {} results".format(*expected)
        fail(NotImplementedError, "implementation", wanted, buffers)
    return found[0].module


def compile_beside(kernel: Lowered, device: Device) -> Future[None]:
    """Compile a kernel in a thread while JAX lowers what follows it.

    XLA compiles a program's kernels one after the other, once all are lowered. The thread compiles
    a program of this kernel alone. The plugin keeps what it has compiled, so XLA finds the kernel
    there.

    Args:
        device: a CUDA device with the compute capability to compile for.

    Returns:
        A future to wait for. Errors show when XLA compiles the kernel again.
    """
    return _threads().submit(_compile, kernel, device)


def _compile(kernel: Lowered, device: Device) -> None:
    def kernel_alone() -> jax.Array:
        result = jax.ShapeDtypeStruct((), "float32")  # the program is never run
        return jax.ffi.ffi_call(_TARGET, result)(
            module=kernel.module, kernel_hash=kernel.hash, use_custom_barrier=False
        )

    place = jax.sharding.SingleDeviceSharding(device)
    jax.jit(kernel_alone, out_shardings=place).trace().lower(lowering_platforms=("cuda",)).compile()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "mosaic-compiler")


def plugin() -> str | None:
    """Return the path of JAX's CUDA plugin, None if it is not installed."""
    for name in _PLUGINS:
        found = find_spec(name) if find_spec(name.partition(".")[0]) else None
        if found is not None and found.origin is not None:
            library = Path(found.origin).with_name("xla_cuda_plugin.so")
            if library.exists():
                return str(library)
    return None
