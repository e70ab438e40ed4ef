"""Greedy decoding of the JAX model over a paged cache; `torch_decode` is its twin."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import ModelConfig
from models.jax_attention import PagedCache
from models.jax_model import Transformer

MOST_NEW_TOKENS = 16  # of a chunk of the prompts


def make_cache(
    config: ModelConfig,
    batch: int,
    max_tokens: int,
    *,
    page_size: int = 16,
    dtype: jnp.dtype = jnp.bfloat16,
) -> PagedCache:
    """Return an empty cache for `batch` sequences of at most `max_tokens`."""
    max_pages = -(-max_tokens // page_size)
    shape = (batch * max_pages, page_size, config.num_heads_kv, config.head_dim)
    return PagedCache(
        k_pages=[jnp.zeros(shape, dtype) for _ in range(config.num_layers)],
        v_pages=[jnp.zeros(shape, dtype) for _ in range(config.num_layers)],
        block_tables=jnp.arange(shape[0], dtype=jnp.int32).reshape(batch, -1),
        seq_lens=jnp.zeros(batch, jnp.int32),
    )


# The cache is donated, so that its pages are written in place.
@partial(nnx.jit, donate_argnames="cache")
def _decode(model: Transformer, tokens: jax.Array, cache: PagedCache):
    return model.decode(tokens, cache)


def generate(
    model: Transformer, prompts: jax.Array, num_tokens: int, cache: PagedCache
) -> jax.Array:
    """Return the likeliest next tokens [B, num_tokens] of prompts [B, S]; see the twin.

    The cache is not to be used any more.
    """
    for start in range(0, prompts.shape[1], MOST_NEW_TOKENS):
        logits, cache = _decode(model, prompts[:, start : start + MOST_NEW_TOKENS], cache)
    tokens = [logits[:, -1:].argmax(axis=-1)]
    for _ in range(num_tokens - 1):
        logits, cache = _decode(model, tokens[-1], cache)
        tokens.append(logits[:, -1:].argmax(axis=-1))
    return jnp.concatenate(tokens, axis=1)
