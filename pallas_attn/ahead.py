"""Compile Mosaic GPU kernels in threads, before XLA does, or hand them to another framework.

JAX's CUDA plugin compiles the lowered module, for XLA or ``interop/kernels/mosaic.py``. Checked
with JAX 0.11.2; ``test_mosaic_in_torch.py`` and ``test_compile_beside.py`` in
``tests/pallas_attn_lowering`` guard it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import jax

from pallas_attn.targets import Device, compiled_for

_TARGET = "mosaic_gpu_v2"


class Lowered(NamedTuple):
    """A kernel that JAX has lowered; by the module's hash the plugin finds what it has compiled."""

    module: bytes
    hash: bytes
    num_operands: int
    num_results: int


_collected: ContextVar[list[Lowered] | None] = ContextVar("collected", default=None)


def note_lowered(results: Sequence[Any]) -> None:
    """Hand a lowered kernel to `lowered_kernels`, or compile it in a thread."""
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


@contextmanager
def lowered_kernels() -> Iterator[list[Lowered]]:
    """Compile no kernel that is lowered in the block; yield a list of them."""
    found: list[Lowered] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def compile_beside(kernel: Lowered, device: Device) -> Future[None]:
    """Compile a kernel in a thread while JAX lowers what follows it; return a future.

    XLA compiles a program's kernels one after the other. The plugin keeps what this thread has
    compiled, so XLA finds it there, and reports its errors.
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
