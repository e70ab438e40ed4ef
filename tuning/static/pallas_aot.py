"""Compile the Pallas kernels of one problem for a target, without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import lowering
from pallas_attn.kernels.portable.append_kv import append_kv
from pallas_attn.kernels.portable.flash_bwd import flash_bwd
from pallas_attn.kernels.portable.flash_fwd import flash_fwd
from pallas_attn.kernels.portable.paged_attention import paged_attention
from pallas_attn.kernels.portable.paged_decode import paged_decode
from tuning.static.operands import (
    append_operands,
    append_spec,
    decode_operands,
    flash_operands,
    paged_operands,
)
from twin_attention.contract.spec import AppendSpec, AttentionSpec, DecodeSpec, PagedSpec
from twin_attention.targets.family import Backend, portable_backend
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
    if isinstance(spec, AttentionSpec):
        function, operands = _flash(spec, backend, sinks)
    elif isinstance(spec, AppendSpec):
        function, operands = _append(spec, backend)
    else:
        function, operands = _decode(spec, backend)
    with lowering.recording(limit) as compiled:
        jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    return compiled


def _flash(spec: AttentionSpec, backend: Backend, sinks: bool):
    def forward_and_backward(operands):
        out, lse = flash_fwd(operands, spec, backend)
        return flash_bwd(out, lse, operands, out, lse, spec, backend)

    return forward_and_backward, (flash_operands(spec, _empty, sinks),)


def _decode(spec: DecodeSpec, backend: Backend):
    append, (appended,) = _append(append_spec(spec), backend)

    def append_and_decode(appended, decoded):
        if isinstance(spec, PagedSpec):
            return append(appended), paged_attention(decoded, spec, backend)
        return append(appended), paged_decode(decoded, spec, backend)

    is_packed = isinstance(spec, PagedSpec)
    decoded = paged_operands(spec, _empty) if is_packed else decode_operands(spec, _empty)
    return append_and_decode, (appended, decoded)


def _append(spec: AppendSpec, backend: Backend):
    return partial(append_kv, spec=spec, backend=backend), (append_operands(spec, _empty),)


def _empty(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
