"""Partial results over some of the keys, before any kernel runs."""

import jax.numpy as jnp
from jax import Array

from twin_attention.contract.spec import PartialSpec


def result_before(carry: Array | None, lse: Array | None, spec: PartialSpec) -> tuple[Array, Array]:
    """Return the result that a part's keys are added to: over other keys, or 0 and -inf for none.

    Args:
        carry, lse: the result over other keys, [B, Sq, Hq, Dv] and [B, Hq, Sq] float32; None if
            there is none.
        spec: the problem.
    """
    if carry is None or lse is None:
        rows = (spec.batch, spec.seq_q, spec.heads_q)
        carry = jnp.zeros((*rows, spec.head_dim_v), jnp.float32)
        lse = jnp.full((spec.batch, spec.heads_q, spec.seq_q), -jnp.inf, jnp.float32)
    return carry, lse
