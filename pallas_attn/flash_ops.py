"""Attention with its reverse-mode derivative: what JAX's transformations see.

From the outside in: `attention` refuses other derivatives (`pallas_attn.derivatives`), and
`_attention` is a custom_vjp that keeps operands, out and lse for the backward. `_forward` and
`_backward` are jitted, so that a call outside `jit` compiles once. In these, `run_on_platform`
takes the family of the platform.
"""

from __future__ import annotations

from functools import partial

import jax

from pallas_attn.derivatives import once
from pallas_attn.dispatch import Backends, Implementation, run_on_platform
from pallas_attn.kernels import reference
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec


def attention(
    operands: AttentionOperands[jax.Array],
    spec: AttentionSpec,
    backends: Backends,
    implementation: Implementation | None,
    return_lse: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention on checked operands, differentiable once, in reverse mode.

    Whether the lse is an output is static, so that a backward without its gradient reads none.

    Args:
        operands: as `pallas_attn.flash_attention`, or `flash_attention_varlen`, takes them.
        spec: the problem; its shapes and dtype are those of the operands.
        backends: what to run where.
        implementation: what the caller asked for, which the backward goes by.
        return_lse: return the log-sum-exp as well.

    Returns:
        out [B, Sq, Hq, Dv] in q's dtype, and with `return_lse` also lse [B, Hq, Sq], float32;
        without B for packed sequences.
    """
    operands = once(operands, spec.function)
    results = _attention(operands, spec, backends, implementation, return_lse)
    return once(results, spec.function)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _attention(operands, spec, backends, implementation, return_lse):
    out, lse = _forward(operands, spec, backends)
    return (out, lse) if return_lse else out


def _attention_fwd(operands, spec, backends, implementation, return_lse):
    out, lse = _forward(operands, spec, backends)
    return (out, lse) if return_lse else out, (operands, out, lse)


def _attention_bwd(spec, backends, implementation, return_lse, residuals, gradients):
    dout, dlse = gradients if return_lse else (gradients, None)
    backends = backends.of_backward(implementation, spec)
    return (_backward(dout, dlse, *residuals, spec, backends),)


_attention.defvjp(_attention_fwd, _attention_bwd)


@partial(jax.jit, static_argnums=(1, 2))
def _forward(operands, spec, backends):
    if spec.is_empty:  # runs no kernel
        return reference.flash_fwd(operands, spec, backends.elsewhere)
    return run_on_platform(backends, "flash_fwd", spec, operands)


@partial(jax.jit, static_argnums=(5, 6))
def _backward(dout, dlse, operands, out, lse, spec, backends):
    if spec.is_empty:
        return reference.flash_bwd(dout, dlse, operands, out, lse, spec, backends.elsewhere)
    return run_on_platform(backends, "flash_bwd", spec, dout, dlse, operands, out, lse)
