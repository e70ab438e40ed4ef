"""Group-relative policy optimisation in JAX, over a tree or over separate sequences."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from examples.support.continuations import Batch
from pallas_attn import flash_attention, flash_attention_varlen

Weights = dict[str, jax.Array]
Step = tuple[float, dict[str, jax.Array]]  # loss, and gradients by weight


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, batch: Batch, implementation: str | None
) -> jax.Array:
    """Return attention [T, heads, head_dim] of a batch's sequences."""
    if batch.ends is None:
        offsets = batch.offsets, batch.offsets
        return flash_attention_varlen(q, k, v, *offsets, causal=True, implementation=implementation)
    q, k, v, ends = (x[None] for x in (q, k, v, batch.ends))
    return flash_attention(q, k, v, causal=True, kv_ends=ends, implementation=implementation)[0]


def log_probabilities(weights: Weights, batch: Batch, implementation: str | None) -> jax.Array:
    """Return each token's log-probability given those before it, [T]."""
    x = weights["embedding"][batch.tokens] + batch.positions
    q, k, v = (jnp.einsum("ti,ihd->thd", x, weights[name]) for name in "qkv")
    out = attend(q, k, v, batch, implementation)
    x = x + jnp.einsum("thd,hdo->to", out, weights["out"])
    logits = (x @ weights["logits"])[batch.parents]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), batch.tokens[:, None], axis=1)[:, 0]


def policy_loss(
    weights: Weights, batch: Batch, old: jax.Array, clip: float, implementation: str | None
) -> jax.Array:
    """Return an update's loss (Shao et al. 2024, without the KL term); see the twin."""
    ratio = jnp.exp(log_probabilities(weights, batch, implementation) - old)
    clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
    gain = jnp.minimum(ratio * batch.advantages, clipped * batch.advantages)
    return -(batch.shares * gain).sum()


def train(
    weights: Weights, batch: Batch, steps: int, rate: float, clip: float,
    implementation: str | None = None,
) -> list[Step]:  # fmt: skip
    """Take steps of gradient descent from the weights that sampled; return their losses."""
    loss_of = partial(policy_loss, clip=clip, implementation=implementation)
    gradients_of = jax.jit(jax.value_and_grad(loss_of))
    found = []
    with jax.default_matmul_precision("highest"):  # as torch multiplies float32
        old = log_probabilities(weights, batch, implementation)
        for _ in range(steps):
            loss, gradients = gradients_of(weights, batch, old)
            weights = jax.tree.map(lambda x, dx: x - rate * dx, weights, gradients)
            found.append((float(loss), gradients))
    return found
