"""Causal attention of the JAX model; see `torch_attention`, its twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from pallas_attn import append_kv, explain, flash_attention, paged_decode
from twin_attention.contract.validate.errors import fail

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def twin(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Run this project's kernels; on a CPU their reference."""
    return flash_attention(q, k, v, causal=True)


def xla(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Compute ``softmax(q kᵀ / sqrt(D)) v`` with all scores in memory."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


ATTENTIONS: dict[str, Attend] = {"twin": twin, "cudnn": cudnn, "xla": xla}


def choose_attention(name: str, config: ModelConfig, dtype: jnp.dtype) -> Attend:
    """Return the attention of a name, if the device runs it for the model.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: a head dimension, dtype or device that it does not take.
    """
    if name not in ATTENTIONS:
        fail(ValueError, "attention", f"one of {', '.join(ATTENTIONS)}", repr(name))
    if name == "twin":
        shape = (1, 1, config.num_heads, config.head_dim)
        q = jnp.zeros(shape, dtype)
        explain(flash_attention, q, q, q, causal=True)
    if name == "cudnn":
        device = jax.local_devices()[0]
        if device.platform != "gpu":
            fail(NotImplementedError, "attention", f"a CUDA device for {name!r}", device.platform)
        if jnp.dtype(dtype) not in (jnp.float16, jnp.bfloat16):
            got = jnp.dtype(dtype).name
            fail(NotImplementedError, "attention", "float16 or bfloat16 for 'cudnn'", got)
        if float(device.compute_capability) < 8.0:
            expected = "compute capability 8.0 or newer for 'cudnn'"
            fail(NotImplementedError, "attention", expected, device.compute_capability)
    return ATTENTIONS[name]


@jax.tree_util.register_dataclass
@dataclass
class PagedCache:
    """Keys and values of every layer, in pages; see the twin."""

    k_pages: list[jax.Array]
    v_pages: list[jax.Array]
    block_tables: jax.Array
    seq_lens: jax.Array

    def extended(self, num_new_tokens: int) -> PagedCache:
        """Return the cache with longer sequences; each layer's `attend` writes the tokens."""
        return replace(self, seq_lens=self.seq_lens + num_new_tokens)

    def positions(self, num_new_tokens: int) -> jax.Array:
        """Return the positions [B, T] of the last tokens."""
        last = jnp.arange(-num_new_tokens, 0)
        return self.seq_lens[:, None] + last

    def attend(self, layer: int) -> Attend:
        """Return the attention of new tokens over a layer's cache, which it writes first."""

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            pages = self.k_pages[layer], self.v_pages[layer]
            k, v = k.astype(pages[0].dtype), v.astype(pages[1].dtype)
            pages = append_kv(k, v, *pages, self.block_tables, self.seq_lens)
            self.k_pages[layer], self.v_pages[layer] = pages
            out = paged_decode(q.astype(k.dtype), *pages, self.block_tables, self.seq_lens)
            return out.astype(q.dtype)

        return attend
