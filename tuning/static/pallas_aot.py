"""Compile the Pallas kernels of one problem for a target, without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import lowering
from tuning.static.operands import operands_of, run_kernels
from twin_attention.contract.spec import AppendSpec, AttentionSpec, DecodeSpec
from twin_attention.targets.family import portable_backend
from twin_attention.targets.kernels import KernelConfig


def compile_kernels(
    spec: AttentionSpec | DecodeSpec | AppendSpec,
    target: str,
    limit: Callable[[str], float] = lambda kernel: math.inf,
    sinks: bool = False,
) -> list[tuple[str, KernelConfig, Any]]:
    """Compile a problem's kernels as `pallas_attn` calls them.

    Args:
        target: instruction set to use, "sm80" or "sm90".
        limit: bytes of shared memory that a block of a kernel may have, with fewer stages of the
            pipeline than configured if need be.
        sinks: give sinks to `flash_attention`; a decode has them always.

    Returns:
        Each kernel's name, its configuration and what Triton compiled.
    """
    backend = portable_backend("pallas_attn", target)
    # Its backward is the same whether it is to be deterministic or not.
    function = partial(run_kernels, spec, backend, deterministic=(False,))
    operands = operands_of(spec, _empty, sinks)
    with lowering.recording(limit) as compiled:
        jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    return compiled


def _empty(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
