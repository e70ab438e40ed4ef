"""Attention with its derivatives, as JAX's transformations see it.

`_attention` is a custom_jvp. Its rule returns tangents (`pallas_attn.derivatives`) that forward
mode computes with `_pushforward`, and that reverse mode transposes to `_backward`: it keeps
operands, out and lse. These functions are jitted, so that a call outside `jit` compiles once.
Inside them, `run_on_platform` picks the platform's family.
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
from pallas_attn.derivatives import tangents
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
from twin_attention.contract.validate.errors import not_differentiable
from twin_attention.contract.validate.options import check_attention_options, check_flash_options


def attention(
    operands: AttentionOperands[jax.Array],
    spec: AttentionSpec,
    implementation: Implementation | None,
    return_lse: bool,
) -> jax.Array | tuple[jax.Array, ...]:
    """Compute attention on checked operands; whether lse is an output is static."""
    backends = choose_backends(implementation, "flash_fwd", device_of(operands.q), spec)
    out, lse, *others = _attention(operands, spec, backends, implementation)
    row_max = others[bool(spec.terms) :]  # before it is what lse lacks
    returned = (out, lse, *row_max) if return_lse else (out, *row_max)
    return returned if len(returned) > 1 else out


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _attention(operands, spec, backends, implementation):
    return tuple(_forward(operands, spec, backends))


def _attention_jvp(spec, backends, implementation, primals, tangents_in):
    (operands,), (given,) = primals, tangents_in
    given = given._make(x if _is_given(x) else None for x in given)
    # Not `_forward`: the results may have a derivative of their own.
    out, lse, *others = results = _attention(operands, spec, backends, implementation)
    zeros = tuple(SymbolicZero(jax.typeof(x)) for x in results)
    if not jax.tree.leaves(given):
        return results, zeros
    rest = others[0] if spec.terms else None
    spec, names = replace(spec, row_max=False), given._fields
    is_given = [x is not None for x in given]

    def run(results, others, given):
        if spec.has_lists:
            not_differentiable("forward mode", "Use jax.vjp or jax.grad.", spec.function)
        chosen = backends.of_derivative(implementation, "flash_jvp", spec)
        (operands, rest), (out, lse) = others, results
        return _pushforward(given, operands, out, lse, rest, spec, chosen)

    def transpose(gradients, results, others):
        (dout, dlse), (out, lse), (operands, rest) = gradients, results, others
        dout = jnp.zeros_like(out) if dout is None else dout
        problem = replace(spec, frozen=frozen_operands(names, operands, is_given))
        chosen = backends.of_derivative(implementation, "flash_bwd", problem)
        found = _backward(dout, dlse, operands, out, lse, rest, problem, chosen)
        return [dx for dx, is_needed in zip(found, is_given, strict=True) if is_needed]

    rule = tangents(run, transpose, (out, lse), (operands, rest), given, spec.function)
    return results, (*rule, *zeros[2:])


def _is_given(tangent):
    return not (
        tangent is None or isinstance(tangent, SymbolicZero) or tangent.dtype == jax.dtypes.float0
    )


_attention.defjvp(_attention_jvp, symbolic_zeros=True)


@partial(jax.jit, static_argnums=(1, 2))
@promoting
def _forward(operands, spec, backends):
    if spec.is_empty:  # runs no kernel
        return reference.flash_fwd(operands, spec, backends.elsewhere)
    return run_on_platform(backends, "flash_fwd", spec, operands)


@partial(jax.jit, static_argnums=(5, 6))
@promoting
def _pushforward(given, operands, out, lse, rest, spec, backends):
    arguments = given, operands, out, lse, rest
    if spec.is_empty:
        return reference.flash_jvp(*arguments, spec, backends.elsewhere)
    return run_on_platform(backends, "flash_jvp", spec, *arguments)


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
