"""The large model of `draft_tree` in JAX: rotate by depth, append, attend along the tree."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples import draft_tree
from pallas_attn import append_kv, paged_decode
from twin_attention.contract.tree import Tree

Pools = list[tuple[jax.Array, jax.Array]]


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotate heads [..., H, D] by their tokens' positions."""
    half = x.shape[-1] // 2
    frequencies = 100.0 ** (-jnp.arange(half) / half)
    angles = positions[..., None, None] * frequencies
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@partial(jax.jit, static_argnames="implementation", donate_argnames="pools")
def step(
    weights: dict[str, jax.Array],
    tokens: jax.Array,
    tree: Any,
    lengths: jax.Array,
    pools: Pools,
    tables: jax.Array,
    implementation: str | None,
) -> tuple[jax.Array, Pools, Pools]:
    """Return the likeliest next tokens [B, T], the pools, and each layer's new k, v.

    Args:
        tokens: [B, T].
        lengths: [B], keys in the cache that stay.
        pools: k_pages and v_pages of each layer.
        tables: [B, MAX_PAGES].
    """
    ends = jnp.broadcast_to(tree.ends, tokens.shape)
    seq_lens = lengths + tokens.shape[1]
    # A token's position is that on its own path, wherever its key lies.
    positions = lengths[:, None] + tree.depths
    x, written, new = weights["embedding"][tokens], [], []
    for layer, pool in enumerate(pools):
        q, k, v = (jnp.einsum("bti,ihd->bthd", x, weights[f"{y}{layer}"]) for y in "qkv")
        q, k, v = (y.astype(jnp.float16) for y in (rotate(q, positions), rotate(k, positions), v))
        new.append((k, v))
        pool = append_kv(k, v, *pool, tables, seq_lens, implementation=implementation)
        written.append(pool)
        out = paged_decode(
            q, *pool, tables, seq_lens, tree_ends=ends, implementation=implementation
        )
        x = x + jnp.einsum("bthd,hdo->bto", out.astype(jnp.float32), weights[f"out{layer}"])
    return (x @ weights["logits"]).argmax(-1), written, new


@partial(jax.jit, static_argnames="implementation", donate_argnames="pools")
def keep(
    order: jax.Array,
    new: Pools,
    lengths: jax.Array,
    pools: Pools,
    tables: jax.Array,
    implementation: str | None,
) -> Pools:
    """Return the pools with each layer's new k and v reordered [B, T]."""
    seq_lens = lengths + order.shape[1]
    ordered = jax.tree.map(lambda x: jnp.take_along_axis(x, order[:, :, None, None], 1), new)
    return [
        append_kv(*kv, *pool, tables, seq_lens, implementation=implementation)
        for kv, pool in zip(ordered, pools, strict=True)
    ]


class JaxDecoder:
    """A `draft_tree.Decoder` whose pools are replaced at each step."""

    def __init__(self, toy: draft_tree.Toy, implementation: str | None = None) -> None:
        self._implementation = implementation
        self._weights = {name: jnp.asarray(x) for name, x in toy.weights.items()}
        self._tables = jnp.asarray(toy.block_tables)
        shape = draft_tree.NUM_PAGES, draft_tree.PAGE_SIZE, draft_tree.HEADS_KV, draft_tree.HEAD_DIM
        self._pools: Pools = [
            (jnp.zeros(shape, jnp.float16), jnp.zeros(shape, jnp.float16))
            for _ in range(draft_tree.LAYERS)
        ]
        self._new: Pools = []

    def step(self, tokens: np.ndarray, tree: Tree, lengths: np.ndarray) -> np.ndarray:
        likeliest, self._pools, self._new = step(
            self._weights, jnp.asarray(tokens), tree, jnp.asarray(lengths), self._pools,
            self._tables, self._implementation,
        )  # fmt: skip
        return np.array(likeliest, np.int32)

    def keep(self, order: np.ndarray, lengths: np.ndarray) -> None:
        self._pools = keep(
            jnp.asarray(order), self._new, jnp.asarray(lengths), self._pools, self._tables,
            self._implementation,
        )  # fmt: skip
