"""Gather the tokens that dilated attention keeps, and scatter its results.

A gather is a slice of an array with one more column, and a scatter is its transpose: neither needs
indices, or sums whose order is undefined. XLA fuses each, and each derivative, into one loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.switches import promoting
from twin_attention.contract.spec import Dilation

Pairs = tuple[Dilation, ...]


@partial(jax.jit, static_argnums=(1, 2))
@promoting
def take(x: jax.Array, call: Pairs, heads_kv: int) -> jax.Array:
    """Return the tokens that the heads keep; see the twin. It never returns a view."""
    return jnp.concatenate([_gather(x, pair, heads_kv) for pair in call])


@partial(jax.jit, static_argnums=(1, 2, 3))
@promoting
def place(
    states: Sequence[tuple[jax.Array, jax.Array]],
    calls: tuple[Pairs, ...],
    heads_kv: int,
    rows: tuple[int, int],
) -> tuple[jax.Array, jax.Array]:
    """Put the calls' results at their tokens' places; elsewhere lse is -inf and out is 0."""
    (batch, tokens), heads = rows, states[0][0].shape[2]
    outs, lses = [], []
    for call, (out, lse) in zip(calls, states, strict=True):
        sizes = [batch * (tokens // pair.segment_length) for pair in call]
        parts = (jnp.split(x, np.cumsum(sizes)[:-1]) for x in (out, _as_rows(lse)))
        for pair, out_kept, lse_kept in zip(call, *parts, strict=True):
            outs.append(_scatter(out_kept, pair, heads_kv, rows))
            lse = _scatter(lse_kept, pair, heads_kv, rows)[..., 0]
            kept = _is_kept(pair, heads_kv, tokens, heads)
            lses.append(jnp.where(kept, lse, -jnp.inf).mT)
    return jnp.stack(outs), jnp.stack(lses)


def _gather(x: jax.Array, pair: Dilation, heads_kv: int) -> jax.Array:
    (batch, tokens, heads, size), rate = x.shape, pair.rate
    if rate > 1:
        # Offset o of head h, in rows of one more column than heads, is at column h - o of row o.
        rows, width = (batch, tokens // rate), heads // max(1, heads_kv) * size
        x = x.reshape(*rows, rate * heads_kv, width)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, rate), (0, 0)))
        x = x.reshape(*rows, rate, heads_kv + 1, width)[:, :, :, :heads_kv:rate]
        x = x.swapaxes(2, 3)  # [B, S / rate, round, offset, width]
        x = x.reshape(*rows, x.shape[2] * rate, width)[:, :, :heads_kv]
    segments = tokens // pair.segment_length
    return x.reshape(batch * segments, pair.kept, heads, size)


def _scatter(kept: jax.Array, pair: Dilation, heads_kv: int, rows: tuple[int, int]) -> jax.Array:
    """Return [B, S, H, D] with the tokens that a pair keeps, and 0 elsewhere."""
    full = jax.ShapeDtypeStruct((*rows, *kept.shape[2:]), kept.dtype)
    gather = partial(_gather, pair=pair, heads_kv=heads_kv)
    return jax.linear_transpose(gather, full)(kept)[0]


def _is_kept(pair: Dilation, heads_kv: int, tokens: int, heads: int) -> np.ndarray:
    """Return which tokens each head keeps, [S, H]."""
    head = np.arange(heads) // max(1, heads // max(1, heads_kv))
    return np.arange(tokens)[:, None] % pair.rate == head % pair.rate


def _as_rows(lse: jax.Array) -> jax.Array:
    """Return [..., H, S] as [..., S, H, 1]."""
    return lse.mT[..., None]
