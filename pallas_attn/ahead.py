"""Compile Mosaic GPU kernels in threads, before XLA does.

JAX's CUDA plugin compiles the lowered module. Checked with JAX 0.11.2;
``tests/pallas_attn_lowering/test_compile_beside.py`` guards it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import jax

from pallas_attn.targets import Device, compiled_for

_TARGET = "mosaic_gpu_v2"


class Lowered(NamedTuple):
    """A kernel that JAX has lowered; by the module's hash the plugin finds what it has compiled."""

    module: bytes
    hash: bytes


def note_lowered(results: Sequence[Any]) -> None:
    """Compile a lowered kernel in a thread, if its device is known."""
    try:
        config = results[0].owner.attributes["mhlo.backend_config"]
        module, hash = (config[name].value_bytes for name in ("module", "kernel_hash"))
    except (AttributeError, KeyError):  # of another JAX; XLA compiles the kernel
        return
    if (device := compiled_for()) is not None:
        compile_beside(Lowered(module, hash), device)


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
