"""Compile the Pallas kernels of one problem for a target, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from interop.contract.config import KernelConfig
from interop.contract.spec import AttentionSpec
from pallas_attn import launch, lowering
from pallas_attn.kernels.flash_bwd import flash_bwd
from pallas_attn.kernels.flash_fwd import flash_fwd


def compile_kernels(
    spec: AttentionSpec, target: str, configs: Mapping[str, KernelConfig]
) -> list[tuple[str, KernelConfig, Any]]:
    """Compile forward and backward as `pallas_attn` calls them.

    Args:
        configs: the configuration of each kernel, in place of the shipped one.

    Returns:
        Each kernel's name, its configuration and what Triton compiled.
    """

    def forward_and_backward(q, k, v):
        out, lse = flash_fwd(q, k, v, spec, backend=target)
        return flash_bwd(out, lse, q, k, v, out, lse, spec, backend=target)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype))

    q = array(spec.batch, spec.seq_q, spec.heads_q, spec.head_dim)
    k = array(spec.batch, spec.seq_kv, spec.heads_kv, spec.head_dim)
    v = array(spec.batch, spec.seq_kv, spec.heads_kv, spec.head_dim_v)
    with (
        mock.patch.object(launch, "configs_for", return_value=configs),
        lowering.recording() as compiled,
    ):
        jax.jit(forward_and_backward).trace(q, k, v).lower(lowering_platforms=("cuda",))
    return compiled
