"""Lower, compile and launch Mosaic GPU kernels of `pallas_attn` for one of torch's streams.

JAX's CUDA plugin compiles a module for the current CUDA context, and returns the kernel and a C
function that takes the kernel, a stream and the addresses of operands, then of results. Checked
with jaxlib 0.11.2; ``tests/pallas_attn_lowering/test_mosaic_in_torch.py`` guards the lowering.

If a launch fails, C ends the process. So addresses are checked here, and a thread gets its CUDA
context before its first launch.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import torch

from pallas_attn.ahead import lowered_kernels
from torch_attn.operands import COMPACT
from torch_attn.replay import Launcher
from twin_attention.contract.validate.errors import fail

LaunchFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_threads = threading.local()


class CompiledModule(NamedTuple):
    kernel: int
    launch: Any
    num_buffers: int
    device: int


def plugin() -> str | None:
    for name in _PLUGINS:
        found = find_spec(name) if find_spec(name.partition(".")[0]) else None
        if found is not None and found.origin is not None:
            library = Path(found.origin).with_name("xla_cuda_plugin.so")
            if library.exists():
                return str(library)
    return None


def lower(call: Any) -> bytes:
    """Return a kernel's module, from its operation in a trace.

    Raise `NotImplementedError` if JAX passes buffers other than operands and results.
    """
    operands = [x.aval for x in call.invars]

    def function(*arrays: jax.Array) -> Any:
        return call.primitive.bind(*arrays, **call.params)

    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    with lowered_kernels() as found:
        jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",))
    expected = len(operands), len(call.outvars)
    buffers = [(x.num_operands, x.num_results) for x in found]
    if buffers != [expected]:
        wanted = "one kernel with {} operands and {} results".format(*expected)
        fail(NotImplementedError, "implementation", wanted, buffers)
    return found[0].module


def compile_module(module: bytes, plugin: str, num_buffers: int, device: int) -> CompiledModule:
    """Compile a module for the current device.

    Raise `NotImplementedError` if the plugin lacks the function, or compiles nothing.
    """
    _bind_context(device)
    compile = getattr(_library(plugin), "MosaicGpuCompile", None)
    if compile is None:
        expected = "JAX's CUDA plugin to have the function MosaicGpuCompile"
        fail(NotImplementedError, "implementation", expected, plugin)
    compile.argtypes = [ctypes.c_char_p, ctypes.c_int]
    compile.restype = ctypes.POINTER(ctypes.c_void_p)
    found = compile(module, len(module))
    if not found or not found[0] or not found[1]:
        expected = "a kernel that JAX's CUDA plugin compiles for this device"
        fail(NotImplementedError, "implementation", expected, "none")
    return CompiledModule(found[0], LaunchFunction(found[1]), num_buffers, device)


@cache
def _library(path: str) -> Any:
    return ctypes.CDLL(path)


def _bind_context(device: int) -> None:
    torch.cuda.mem_get_info(device)  # asks CUDA, not torch's allocator
    _threads.devices = getattr(_threads, "devices", frozenset()) | {device}


def launcher_of(
    compiled: CompiledModule, buffers: Sequence[int], constants: tuple[torch.Tensor, ...]
) -> Launcher:
    """Return a function that launches a kernel on the current device.

    `buffers` are places among the launch's tensors, then among `constants`. Raise
    `NotImplementedError` if the kernel has another number of buffers.
    """
    if len(buffers) != compiled.num_buffers:
        expected = f"{compiled.num_buffers} buffers of a kernel"
        fail(NotImplementedError, "implementation", expected, len(buffers))
    kernel, launch_kernel, _, device = compiled
    Addresses = ctypes.c_void_p * len(buffers)
    pick = itemgetter(*buffers) if len(buffers) > 1 else lambda x: (x[buffers[0]],)
    of_constants = tuple(x.data_ptr() for x in constants)

    def launch(stream: int, addresses: tuple[int, ...]) -> None:
        if device not in getattr(_threads, "devices", ()):
            _bind_context(device)
        for address in addresses:
            if address % COMPACT:
                expected = f"tensors that begin at multiples of {COMPACT} bytes"
                fail(NotImplementedError, "implementation", expected, hex(address))
        # A new array: other threads may launch the same kernel.
        launch_kernel(kernel, stream, Addresses(*pick(addresses + of_constants)))

    launch.constants = constants  # pyright: ignore[reportFunctionMemberAccess] - keeps the memory
    return launch
