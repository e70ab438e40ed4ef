"""Launch a Mosaic GPU kernel of `pallas_attn` on one of torch's streams.

JAX's CUDA plugin has a C function that compiles a module for the current CUDA context. It returns
the kernel and a C function that launches it. The latter takes the kernel, a stream and the
addresses of the kernel's buffers, operands before results, and encodes the TMA descriptors. JAX's
own `as_torch_gpu_kernel` calls the same two functions, on torch's default stream. Checked with
jaxlib 0.11.2.

If a launch fails, C ends the process. So addresses are checked here, and a thread gets its CUDA
context before its first launch.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from torch_attn.operands import COMPACT
from torch_attn.replay import Launcher
from twin_attention.contract.validate.errors import fail

LaunchFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_threads = threading.local()


class Compiled(NamedTuple):
    """A kernel on one device, kept for as long as the process runs.

    Attributes:
        kernel: its handle.
        launch: the C function that launches it.
        num_buffers: how many addresses `launch` takes.
        device: the device's number.
    """

    kernel: int
    launch: Any
    num_buffers: int
    device: int


def compile_module(module: bytes, plugin: str, num_buffers: int, device: int) -> Compiled:
    """Compile a module for a device, which must be the current one.

    Args:
        module: what `pallas_attn.ahead.lower_ahead` returned.
        plugin: path of JAX's CUDA plugin.
        num_buffers: number of operands and results of the kernel.
        device: the device's number.

    Raises:
        NotImplementedError: the plugin lacks the function, or compiles nothing.
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
    return Compiled(found[0], LaunchFunction(found[1]), num_buffers, device)


@cache
def _library(path: str) -> Any:
    return ctypes.CDLL(path)


def _bind_context(device: int) -> None:
    """Give this thread the CUDA context of a device, which must be the current one."""
    torch.cuda.mem_get_info(device)  # asks CUDA, not torch's allocator
    _threads.devices = getattr(_threads, "devices", frozenset()) | {device}


def launcher_of(
    compiled: Compiled, buffers: Sequence[int], constants: tuple[torch.Tensor, ...]
) -> Launcher:
    """Return a function that launches a kernel on the current device.

    Args:
        compiled: the kernel.
        buffers: which of the launch's tensors each buffer is; numbers past those are `constants`.
        constants: tensors that are the same in each launch.

    Raises:
        NotImplementedError: the kernel has another number of buffers.
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
