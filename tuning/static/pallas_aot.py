"""Compile the Pallas kernels of one problem for a target, without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import lowering, targets
from tuning.static.operands import operands_of, run_kernels
from twin_attention.contract.paged_spec import AppendSpec, DecodeSpec
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import portable_backend
from twin_attention.targets.kernels import KernelConfig
from twin_attention.targets.target import NUM_SMS


def compile_kernels(
    spec: AttentionSpec | DecodeSpec | AppendSpec,
    target: str,
    limit: Callable[[str], float] = lambda kernel: math.inf,
    sinks: bool = False,
    shared_memory: int | None = None,
    tangents: bool = False,
) -> list[tuple[str, KernelConfig, Any]]:
    """Compile a problem's kernels as `pallas_attn` calls them.

    limit: bytes of shared memory per block, reached with fewer pipeline stages if need be.
    tangents: compile forward mode in place of the backward.
    """
    backend = portable_backend("pallas_attn", target)
    # Its backward is always deterministic.
    function = partial(run_kernels, spec, backend, deterministic=(False,), tangents=tangents)
    operands = operands_of(spec, _empty, sinks)
    with _card(target, shared_memory), lowering.recording(limit) as compiled:
        jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    return compiled


def _card(target: str, shared_memory: int | None) -> AbstractContextManager[Any]:
    """Choose tiles for a card with that much shared memory."""
    if shared_memory is None:
        return nullcontext()
    sizes = {"core_count": NUM_SMS[target], "shared_memory_per_block_optin": shared_memory}
    return targets.described(SimpleNamespace(**sizes))


def _empty(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
