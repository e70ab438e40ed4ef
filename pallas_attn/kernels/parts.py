"""Partial results over some of the keys, before any kernel runs."""

import jax.numpy as jnp
from jax import Array

from twin_attention.contract.spec import PartialSpec


def result_before(carry: Array | None, lse: Array | None, spec: PartialSpec) -> tuple[Array, Array]:
    """Return the float32 result to which a part's keys are added: 0 and -inf if there is none."""
    if carry is None or lse is None:
        rows = (spec.batch, spec.seq_q, spec.heads_q)
        carry = jnp.zeros((*rows, spec.head_dim_v), jnp.float32)
        lse = jnp.full((spec.batch, spec.heads_q, spec.seq_q), -jnp.inf, jnp.float32)
    return carry, lse
