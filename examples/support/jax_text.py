"""Train the JAX model on text; decode over its paged cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.continuous_batching import Step
from models.config import ModelConfig
from models.jax_attention import PagedCache
from models.jax_decode import make_cache
from models.jax_model import Transformer, next_token_loss


def make_model(config: ModelConfig) -> Transformer:
    return Transformer(config, rngs=nnx.Rngs(0))


def train(model: Transformer, batches: Iterable[np.ndarray], rate: float) -> Iterator[float]:
    """Take a step of AdamW on each batch [B, S + 1]; return the losses before them."""
    optimizer = nnx.Optimizer(model, optax.adamw(rate), wrt=nnx.Param)

    @nnx.jit
    def step(model: Transformer, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(next_token_loss)(model, tokens)
        optimizer.update(model, gradients)
        return loss

    for batch in batches:
        yield step(model, optimizer, jnp.asarray(batch)).item()


@partial(nnx.jit, donate_argnames="cache")
def _decode(model: Transformer, tokens: jax.Array, cache: PagedCache):
    return model.decode(tokens, cache)


def make_step(model: Transformer, slots: int, max_tokens: int) -> Step:
    """Return a function that feeds each slot a token and returns the likeliest next ones."""
    cache = make_cache(model.config, slots, max_tokens, dtype=jnp.float16)

    def step(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        nonlocal cache
        cache = replace(cache, seq_lens=jnp.asarray(lengths))
        logits, cache = _decode(model, jnp.asarray(tokens)[:, None], cache)
        return np.asarray(logits[:, -1].argmax(axis=-1))

    return step
