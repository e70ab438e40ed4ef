"""A decoding loop in JAX: append the token's key and value, attend, sample the next one."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_attn import append_kv, paged_decode


def project(weights: dict[str, jax.Array], tokens: jax.Array) -> tuple[jax.Array, ...]:
    """Return embeddings of tokens, [..., hidden], and q, k, v, [..., heads, head_dim]."""
    x = weights["embedding"][tokens]
    q, k, v = (
        jnp.einsum("...i,ihd->...hd", x, weights[name]).astype(jnp.float16) for name in "qkv"
    )
    return x, q, k, v


@partial(jax.jit, static_argnames="implementation")
def generate(
    weights: dict[str, jax.Array],
    tokens: jax.Array,
    pool: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    noise: jax.Array,
    implementation: str | None = None,
) -> jax.Array:
    """Continue sequences by a token for each row of `noise`; return the new tokens, [B, N].

    XLA copies the given pool once, and the loop writes to the copy in place. The arguments are
    those of the twin.
    """

    def step(carry, gumbel):
        tokens, (k_pages, v_pages), seq_lens = carry
        seq_lens = seq_lens + 1
        x, q, k, v = project(weights, tokens)
        pool = append_kv(
            k, v, k_pages, v_pages, block_tables, seq_lens, implementation=implementation
        )
        attended = paged_decode(q, *pool, block_tables, seq_lens, implementation=implementation)
        x = x + jnp.einsum("bhd,hdo->bo", attended.astype(jnp.float32), weights["out"])
        tokens = (x @ weights["logits"] + gumbel).argmax(-1)
        return (tokens, pool, seq_lens), tokens

    _, sampled = jax.lax.scan(step, (tokens, pool, seq_lens), noise)
    return sampled.T
