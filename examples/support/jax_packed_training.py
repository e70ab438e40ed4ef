"""Training on documents in JAX, packed and one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from examples.support.packed_documents import NO_TARGET, Packed
from pallas_attn import flash_attention, flash_attention_varlen

Weights = dict[str, jax.Array]
Loss = Callable[[Weights, Packed], jax.Array]


def logits_of(weights: Weights, tokens: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
    """Return logits [T, vocabulary]; `attend` takes q, k, v [T, heads, head_dim]."""
    x = weights["embedding"][tokens]
    q, k, v = (jnp.einsum("ti,ihd->thd", x, weights[name]) for name in "qkv")
    x = x + jnp.einsum("thd,hdo->to", attend(q, k, v), weights["out"])
    return x @ weights["logits"]


def sum_of_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the sum of the cross entropies of tokens with a target."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    return -jnp.where(targets == NO_TARGET, 0, chosen).sum()


def packed_loss(weights: Weights, packed: Packed, implementation: str | None = None) -> jax.Array:
    """Return the mean loss of tokens with a target, with one call of attention.

    Under `jit` one trace serves all batches with as many tokens and documents.
    """
    attend = partial(
        flash_attention_varlen,
        cu_seqlens_q=packed.offsets,
        cu_seqlens_kv=packed.offsets,
        causal=True,
        implementation=implementation,
    )
    logits = logits_of(weights, packed.tokens, attend)
    return sum_of_losses(logits, packed.targets) / (packed.targets != NO_TARGET).sum()


def loss_one_by_one(weights: Weights, packed: Packed, offsets: tuple[int, ...]) -> jax.Array:
    """Return the same loss with a call of attention per document, each compiled."""

    def attend(*qkv: jax.Array) -> jax.Array:
        return flash_attention(*(x[None] for x in qkv), causal=True)[0]

    total = jnp.zeros(())
    for begin, end in pairwise(offsets):
        logits = logits_of(weights, packed.tokens[begin:end], attend)
        total = total + sum_of_losses(logits, packed.targets[begin:end])
    return total / (packed.targets != NO_TARGET).sum()


def train(weights: Weights, packed: Packed, loss: Loss, steps: int, rate: float) -> list[float]:
    """Take steps of gradient descent; return the loss before each."""

    @jax.jit
    def step(weights: Weights, packed: Packed) -> tuple[Weights, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, packed)
        return jax.tree.map(lambda x, dx: x - rate * dx, weights, gradients), value

    losses = []
    with jax.default_matmul_precision("highest"):  # as torch multiplies float32
        for _ in range(steps):
            weights, value = step(weights, packed)
            losses.append(float(np.asarray(value)))
    return losses
