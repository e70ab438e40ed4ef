"""Paged attention on checked operands: what JAX's transformations see.

As in `pallas_attn.decode_ops`: a custom_jvp, whose only rule refuses a gradient, around a jitted
function.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_attn.dispatch import Backends, run_on_platform
from twin_attention.contract.operands import PagedOperands
from twin_attention.contract.spec import PagedSpec
from twin_attention.contract.validate import no_gradient


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
@partial(jax.jit, static_argnums=(1, 2))
def attend(
    operands: PagedOperands[jax.Array], spec: PagedSpec, backends: Backends
) -> tuple[jax.Array, jax.Array]:
    """Compute attention of any number of new tokens a sequence over a paged cache.

    Args:
        operands: as `pallas_attn.paged_attention` takes them.
        spec: the problem; its shapes and dtypes are those of the operands.
        backends: what to run where.

    Returns:
        out [Tq, Hq, Dv] in q's dtype, and lse [Hq, Tq], float32.
    """
    if spec.is_empty:
        sinks = operands.sinks
        out = jnp.zeros((spec.tokens, spec.heads_q, spec.head_dim_v), operands.q.dtype)
        lse = jnp.float32(-jnp.inf) if sinks is None else sinks[:, None]
        return out, jnp.broadcast_to(lse, (spec.heads_q, spec.tokens))
    return run_on_platform(backends, "paged_attention", spec, operands)


attend.defjvp(lambda *_: no_gradient("paged_attention"))
