"""Attention with its reverse-mode derivative: what JAX's transformations see.

From the outside in: `attention` is a custom_vjp that keeps q, k, v, out and lse for the backward.
`_forward` and `_backward` are custom_jvps, whose only rule refuses a second derivative, around
jitted functions, so that a call outside `jit` compiles once. In these, `run_on_platform` takes the
family of the platform.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn

import jax
import jax.numpy as jnp

from pallas_attn.dispatch import Backends, run_on_platform
from twin_attention.contract.spec import AttentionSpec
from twin_attention.contract.validate import not_differentiable


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spec: AttentionSpec,
    backends: Backends,
    return_lse: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention on checked operands, differentiable once, in reverse mode.

    Whether the lse is an output is static, so that a backward without its gradient reads none.

    Args:
        q: [B, Sq, Hq, D].
        k: [B, Skv, Hkv, D].
        v: [B, Skv, Hkv, Dv].
        spec: the problem; its shapes and dtype are those of q, k, v.
        backends: what to run where.
        return_lse: return the log-sum-exp as well.

    Returns:
        out [B, Sq, Hq, Dv] in q's dtype, and with `return_lse` also lse [B, Hq, Sq], float32.
    """
    out, lse = _forward(q, k, v, spec, backends)
    return (out, lse) if return_lse else out


def _attention_fwd(q, k, v, spec, backends, return_lse):
    out, lse = _forward(q, k, v, spec, backends)
    return (out, lse) if return_lse else out, (q, k, v, out, lse)


def _attention_bwd(spec, backends, return_lse, residuals, gradients):
    dout, dlse = gradients if return_lse else (gradients, None)
    return _backward(dout, dlse, *residuals, spec, backends)


attention.defvjp(_attention_fwd, _attention_bwd)


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
@partial(jax.jit, static_argnums=(3, 4))
def _forward(q, k, v, spec, backends):
    if spec.is_empty:
        out = jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
        return out, jnp.full((spec.batch, spec.heads_q, spec.seq_q), -jnp.inf, jnp.float32)
    return run_on_platform(backends, "flash_fwd", spec, q, k, v)


@partial(jax.custom_jvp, nondiff_argnums=(7, 8))
@partial(jax.jit, static_argnums=(7, 8))
def _backward(dout, dlse, q, k, v, out, lse, spec, backends):
    if spec.is_empty:
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    return run_on_platform(backends, "flash_bwd", spec, dout, dlse, q, k, v, out, lse)


def _refuse_second_derivative(*_) -> NoReturn:
    not_differentiable(
        "a second derivative", "Compute it with a plain attention in jax.numpy operations."
    )


_forward.defjvp(_refuse_second_derivative)
_backward.defjvp(_refuse_second_derivative)
