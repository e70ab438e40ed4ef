"""Compile the Pallas kernels of one problem for a target, without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import lowering
from pallas_attn.kernels.portable.append_kv import append_kv
from pallas_attn.kernels.portable.flash_bwd import flash_bwd
from pallas_attn.kernels.portable.flash_fwd import flash_fwd
from pallas_attn.kernels.portable.paged_decode import paged_decode
from twin_attention.contract.spec import AttentionSpec, DecodeSpec
from twin_attention.targets.family import Backend, portable_backend
from twin_attention.targets.kernels import KernelConfig


def compile_kernels(
    spec: AttentionSpec | DecodeSpec,
    target: str,
    limit: Callable[[str], float] = lambda kernel: math.inf,
) -> list[tuple[str, KernelConfig, Any]]:
    """Compile a problem's kernels as `pallas_attn` calls them.

    Args:
        target: instruction set to use, "sm80" or "sm90".
        limit: bytes of shared memory that a block of a kernel may have, with fewer stages of the
            pipeline than configured if need be.

    Returns:
        Each kernel's name, its configuration and what Triton compiled.
    """
    backend = portable_backend("pallas_attn", target)
    if isinstance(spec, AttentionSpec):
        function, operands = _flash(spec, backend)
    else:
        function, operands = _decode(spec, backend)
    with lowering.recording(limit) as compiled:
        jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    return compiled


def _flash(spec: AttentionSpec, backend: Backend):
    def forward_and_backward(q, k, v):
        out, lse = flash_fwd(q, k, v, spec, backend)
        return flash_bwd(out, lse, q, k, v, out, lse, spec, backend)

    return forward_and_backward, (
        _empty(spec.dtype, spec.batch, spec.seq_q, spec.heads_q, spec.head_dim),
        _empty(spec.dtype, spec.batch, spec.seq_kv, spec.heads_kv, spec.head_dim),
        _empty(spec.dtype, spec.batch, spec.seq_kv, spec.heads_kv, spec.head_dim_v),
    )


def _decode(spec: DecodeSpec, backend: Backend):
    cache = spec.cache

    def decode_and_append(q, k_new, v_new, k_pages, v_pages, tables, lengths, sinks, scale):
        pools = append_kv(
            k_new, v_new, k_pages, v_pages, tables, lengths, scale, scale, cache, backend
        )
        results = paged_decode(
            q, k_pages, v_pages, tables, lengths, sinks, scale, scale, spec, backend
        )
        return pools, results

    pages = (cache.num_pages, cache.page_size, cache.heads)
    new = (spec.dtype, spec.batch, spec.tokens, cache.heads)
    return decode_and_append, (
        _empty(spec.dtype, spec.batch, spec.tokens, spec.heads_q, spec.head_dim),
        _empty(*new, cache.head_dim),
        _empty(*new, cache.head_dim_v),
        _empty(cache.dtype, *pages, cache.head_dim),
        _empty(cache.dtype, *pages, cache.head_dim_v),
        _empty("int32", spec.batch, cache.max_pages),
        _empty("int32", spec.batch),
        _empty("float32", spec.heads_q),
        _empty("float32", cache.heads) if cache.is_quantized else None,
    )


def _empty(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
