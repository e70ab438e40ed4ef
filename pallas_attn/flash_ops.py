"""Attention with its reverse-mode derivative, as JAX's transformations see it.

From the outside in: `attention` refuses other derivatives (`pallas_attn.derivatives`), and
`_attention` is a custom_vjp that keeps operands, out and lse for the backward. `_forward` and
`_backward` are jitted, so that a call outside `jit` compiles once. Inside them,
`run_on_platform` picks the platform's family.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_attn.attention import Attention
from pallas_attn.derivatives import once, together
from pallas_attn.dispatch import Implementation, choose_backends, run_on_platform
from pallas_attn.kernels import reference
from pallas_attn.operands import device_of
from pallas_attn.switches import promoting
from twin_attention.contract.operands import (
    AttentionOperands,
    BlockSparseOperands,
    FlashOperands,
    VarlenOperands,
    frozen_operands,
)
from twin_attention.contract.spec import AttentionSpec
from twin_attention.contract.validate.attention import (
    check_flash_attention,
    check_flash_attention_varlen,
)
from twin_attention.contract.validate.block_mask import check_block_sparse_attention
from twin_attention.contract.validate.options import check_attention_options, check_flash_options


def attention(
    operands: AttentionOperands[jax.Array],
    spec: AttentionSpec,
    implementation: Implementation | None,
    return_lse: bool,
) -> jax.Array | tuple[jax.Array, ...]:
    """Compute attention on checked operands; whether lse is an output is static."""
    backends = choose_backends(implementation, "flash_fwd", device_of(operands.q), spec)
    operands = once(operands, spec.function)
    # Inside `shard_map`, JAX takes no symbolic zeros: all operands get gradients.
    is_shard = bool(jax.sharding.get_abstract_mesh().manual_axes)
    run = _attention_of_shard if is_shard else _attention
    results = run(operands, spec, backends, implementation, return_lse)
    return once(results, spec.function)


def _undifferentiated(operands, spec, backends, implementation, return_lse):
    return _returned(_forward(operands, spec, backends), spec, return_lse)


def _returned(results, spec, return_lse):
    out, lse, *row_max = results
    row_max = row_max[bool(spec.terms) :]  # before it is what lse lacks
    returned = (out, lse, *row_max) if return_lse else (out, *row_max)
    return together(*returned) if len(returned) > 1 else out


def _attention_fwd(operands, spec, backends, implementation, return_lse):
    needed = (x is not None and x.perturbed for x in operands)
    frozen = frozen_operands(operands._fields, operands, needed)
    operands = jax.tree.map(lambda x: x.value, operands)
    return _saving_fwd(operands, spec, backends, implementation, return_lse, frozen)


def _saving_fwd(operands, spec, backends, implementation, return_lse, frozen=()):
    results = _forward(operands, spec, backends)
    rest = results[2] if spec.terms else None
    # Names are a tree without arrays.
    saved = operands, *results[:2], rest, dict.fromkeys(frozen)
    return _returned(results, spec, return_lse), saved


def _attention_bwd(spec, backends, implementation, return_lse, residuals, gradients):
    if spec.row_max:  # it has no gradient
        *gradients, _ = gradients
        gradients = gradients if return_lse else gradients[0]
        spec = replace(spec, row_max=False)
    dout, dlse = gradients if return_lse else (gradients, None)
    *residuals, frozen = residuals
    dout = jnp.zeros_like(residuals[1]) if isinstance(dout, SymbolicZero) else dout
    dlse = None if isinstance(dlse, SymbolicZero) else dlse
    spec = replace(spec, frozen=tuple(frozen))
    backends = backends.of_backward(implementation, spec)
    return (_backward(dout, dlse, *residuals, spec, backends),)


_attention = jax.custom_vjp(_undifferentiated, nondiff_argnums=(1, 2, 3, 4))
_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)
_attention_of_shard = jax.custom_vjp(_undifferentiated, nondiff_argnums=(1, 2, 3, 4))
_attention_of_shard.defvjp(_saving_fwd, _attention_bwd)


@partial(jax.jit, static_argnums=(1, 2))
@promoting
def _forward(operands, spec, backends):
    if spec.is_empty:  # runs no kernel
        return reference.flash_fwd(operands, spec, backends.elsewhere)
    return run_on_platform(backends, "flash_fwd", spec, operands)


@partial(jax.jit, static_argnums=(6, 7))
@promoting
def _backward(dout, dlse, operands, out, lse, rest, spec, backends):
    given = dout, dlse, operands, out, lse, rest
    if spec.is_empty:
        return reference.flash_bwd(*given, spec, backends.elsewhere)
    return run_on_platform(backends, "flash_bwd", spec, *given)


def or_as_xla_says(deterministic: Any) -> Any:
    """Replace None by XLA's own setting."""
    if deterministic is None:
        flags = (flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
        values = {name: value for name, _, value in flags}
        return values.get("--xla_gpu_deterministic_ops") in ("", "true", "1")
    return deterministic


DENSE = Attention(FlashOperands, check_attention_options, check_flash_attention, attention)
PACKED = Attention(VarlenOperands, check_attention_options, check_flash_attention_varlen, attention)
SPARSE = Attention(
    BlockSparseOperands, check_flash_options, check_block_sparse_attention, attention
)
