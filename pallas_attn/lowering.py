"""Lower a Pallas kernel to code for a target, with the compiler of its Triton twin.

JAX's Triton lowering gives a Triton module, the Python `triton` package compiles that
(`pallas_attn.ttir`), and jaxlib launches the result. XLA's own Triton compiles only for its device:
here a Hopper card can run SM80 code, a machine without a GPU can check a GPU's code, and the twins
differ only in their sources.

Checked with JAX 0.10.2 and 0.11.2 (``tests/pallas_attn_lowering/test_lowering.py``).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax

from pallas_attn import private
from pallas_attn.own_memory import lower_with_own_memory
from pallas_attn.private import gpu_triton, mlir, pallas_core, triton_lowering, without_triton
from twin_attention.contract.validate.errors import fail
from twin_attention.targets.config import compile_to_fit
from twin_attention.targets.kernels import KernelConfig
from twin_attention.targets.target import SHARED_MEMORY_LIMIT

_Recorded = tuple[Callable[[str], float], list[tuple[str, KernelConfig, Any]]]
_recorded: ContextVar[_Recorded | None] = ContextVar("recorded", default=None)


@dataclass(frozen=True)
class TritonCompilerParams:
    """Compiler parameters of a `pallas_call` that the `triton` package compiles."""

    config: KernelConfig
    target: str


@contextmanager
def recording(
    limit: Callable[[str], float] = lambda kernel: math.inf,
) -> Iterator[list[tuple[str, KernelConfig, Any]]]:
    """Compile the kernels that are traced and lowered in the block, without a GPU.

    They are assembled for their target, whatever this machine has, with blocks of at most `limit`
    bytes of shared memory (see `compile_to_fit`). Yields a list that fills with (kernel,
    configuration, Triton's compiled kernel). The lowered program cannot be run.

    Example::

        with recording() as compiled:
            jax.jit(f).trace(q).lower(lowering_platforms=("cuda",))
    """
    compiled: list[tuple[str, KernelConfig, Any]] = []
    token = _recorded.set((limit, compiled))
    try:
        yield compiled
    finally:
        _recorded.reset(token)


def _lower(
    ctx,
    *operands,
    jaxpr,
    grid_mapping,
    compiler_params: TritonCompilerParams,
    input_output_aliases,
    mesh,
    metadata,
    name,
    **_,
):
    for argument, value in (("mesh", mesh), ("metadata", metadata)):
        if value:
            fail(NotImplementedError, argument, "nothing with TritonCompilerParams", value)
    for x in (*ctx.avals_in, *ctx.avals_out):
        # The lowering's offsets are signed 32-bit numbers for up to 2^32 bytes.
        if 2**31 < x.size * x.dtype.itemsize <= 2**32 and x.dtype.itemsize == 1:
            expected = "arrays in 8 bits to have at most 2^31 or more than 2^32 elements"
            fail(NotImplementedError, name, expected, f"shape {x.shape}")
    config, target = compiler_params.config, compiler_params.target
    recorded = _recorded.get()
    device = None if recorded is not None else _device()
    capability = _capability(target, device)
    lowered = triton_lowering.lower_jaxpr_to_triton_module(
        jaxpr, grid_mapping, "cuda", int(target.removeprefix("sm")), ctx.module_context
    )
    text = lowered.module.operation.get_asm(enable_debug_info=False)
    function = mlir.sanitize_name(jaxpr.debug_info.func_name)
    config, compiled = compile_to_fit(
        name,
        lambda config: _ttir().compile_text(function, text, config, target, capability),
        config,
        target,
        recorded[0](name) if recorded is not None else _shared_memory(target, device),
    )
    aliases = dict(input_output_aliases)
    call = jax.ffi.ffi_lowering(
        "triton_kernel_call_ffi", api_version=4, operand_output_aliases=aliases
    )
    if recorded is not None:
        recorded[1].append((name, config, compiled))
        opaque = b""
    else:
        num_arrays = len(ctx.avals_in) + len(ctx.avals_out)
        opaque = _opaque(name, compiled, config, capability, lowered.grid, num_arrays)
    return lower_with_own_memory(partial(call, opaque=opaque), ctx, operands, aliases)


if private.missing("triton") is None:  # otherwise no kernel is lowered
    pallas_core.register_lowering_rule(TritonCompilerParams, _lower, "gpu")


def _opaque(
    name: str,
    compiled: Any,
    config: KernelConfig,
    capability: int,
    grid: tuple[int, ...],
    num_arrays: int,
) -> bytes:
    if not hasattr(gpu_triton, "TritonKernel"):
        plugin = "jaxlib's CUDA plugin (pip install 'jax[cuda13]' or 'jax[cuda12]')"
        fail(NotImplementedError, name, plugin, "none")
    kernel = gpu_triton.TritonKernel(
        compiled.metadata.name,
        config.num_warps,
        1,
        compiled.metadata.shared,
        compiled.asm["ptx"],
        "",  # Triton IR: jaxlib would hash and copy it each time that a program runs
        capability,
    )
    pointers = [gpu_triton.create_array_parameter(0, 16)] * num_arrays
    launch = gpu_triton.TritonKernelCall(kernel, *_grid_of_three(grid), pointers)
    return zlib.compress(launch.to_proto(name, b""))


def _device() -> Any:
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # this process has no CUDA backend
        return None


def _capability(target: str, device: Any) -> int:
    name = target.removeprefix("sm") if device is None else device.compute_capability
    return int(name.replace(".", ""))


def _shared_memory(target: str, device: Any) -> int:
    limit = SHARED_MEMORY_LIMIT[target]
    return limit if device is None else min(limit, device.shared_memory_per_block_optin)


def _grid_of_three(grid: tuple[int, ...]) -> tuple[int, ...]:
    return (*grid, *(1,) * (3 - len(grid)))


def _ttir() -> ModuleType:
    try:
        from pallas_attn import ttir
    except ModuleNotFoundError as error:
        reason = f"implementation 'triton': {without_triton() or error}"
        raise ModuleNotFoundError(reason, name=error.name) from error
    return ttir
