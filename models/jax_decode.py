"""Greedy decoding of the JAX model over a paged cache; `torch_decode` is its twin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import ModelConfig
from models.jax_attention import Attend
from pallas_attn import append_kv, paged_decode

if TYPE_CHECKING:
    from models.jax_model import Transformer

MOST_NEW_TOKENS = 16  # of one `append_kv`


@jax.tree_util.register_dataclass
@dataclass
class PagedCache:
    """Keys and values of every layer, in pages.

    Attributes:
        k_pages, v_pages: a pool [P, page_size, Hkv, D] for each layer.
        block_tables: [B, max_pages] int32, the pages of each sequence, in every layer the same.
        seq_lens: [B] int32, tokens of each sequence in the cache.
    """

    k_pages: list[jax.Array]
    v_pages: list[jax.Array]
    block_tables: jax.Array
    seq_lens: jax.Array

    def extended(self, num_new_tokens: int) -> PagedCache:
        """Return the cache with the new tokens counted in; each layer's `attend` writes them."""
        return replace(self, seq_lens=self.seq_lens + num_new_tokens)

    def positions(self, num_new_tokens: int) -> jax.Array:
        """Return the positions [B, T] of the last tokens."""
        last = jnp.arange(-num_new_tokens, 0)
        return self.seq_lens[:, None] + last

    def attend(self, layer: int) -> Attend:
        """Return the attention of new tokens over the cache of a layer, which it writes first."""

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            pages = self.k_pages[layer], self.v_pages[layer]
            k, v = k.astype(pages[0].dtype), v.astype(pages[1].dtype)
            pages = append_kv(k, v, *pages, self.block_tables, self.seq_lens)
            self.k_pages[layer], self.v_pages[layer] = pages
            out = paged_decode(q.astype(k.dtype), *pages, self.block_tables, self.seq_lens)
            return out.astype(q.dtype)

        return attend


def make_cache(
    config: ModelConfig,
    batch: int,
    max_tokens: int,
    *,
    page_size: int = 16,
    dtype: jnp.dtype = jnp.bfloat16,
) -> PagedCache:
    """Return an empty cache for `batch` sequences of at most `max_tokens`, float16 or bfloat16."""
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
    """Return the likeliest next tokens [B, num_tokens] of prompts [B, S], one after the other.

    Args:
        model: the model.
        prompts: [B, S] int32, of one length, S at least 1.
        num_tokens: how many to add, at least 1.
        cache: an empty one with room for S + num_tokens - 1; not to be used any more.
    """
    for start in range(0, prompts.shape[1], MOST_NEW_TOKENS):
        logits, cache = _decode(model, prompts[:, start : start + MOST_NEW_TOKENS], cache)
    tokens = [logits[:, -1:].argmax(axis=-1)]
    for _ in range(num_tokens - 1):
        logits, cache = _decode(model, tokens[-1], cache)
        tokens.append(logits[:, -1:].argmax(axis=-1))
    return jnp.concatenate(tokens, axis=1)
