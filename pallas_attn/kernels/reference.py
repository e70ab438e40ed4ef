"""The reference family: the operations in plain JAX, on any device, for any supported problem.

Each function takes and returns what the kernel of the same name does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from twin_attention.contract import reference
from twin_attention.contract.spec import AttentionSpec, DecodeSpec, MergeSpec, PagedCache
from twin_attention.targets.family import Backend


def flash_fwd(
    q: Array, k: Array, v: Array, spec: AttentionSpec, backend: Backend
) -> tuple[Array, Array]:
    """Compute out and lse in float32, with O(Sq · Skv) memory."""
    with jax.default_matmul_precision("highest"):
        out, lse = reference.attention_forward(q, k, v, spec, jnp.float32)
    return out.astype(q.dtype), lse


def flash_bwd(
    dout: Array,
    dlse: Array | None,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    spec: AttentionSpec,
    backend: Backend,
) -> tuple[Array, Array, Array]:
    """Compute dq, dk and dv in float32, with O(Sq · Skv) memory."""
    with jax.default_matmul_precision("highest"):
        dq, dk, dv = reference.attention_backward(dout, dlse, q, k, v, spec, jnp.float32)
    return dq.astype(q.dtype), dk.astype(q.dtype), dv.astype(q.dtype)


def paged_decode(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    seq_lens: Array,
    sinks: Array | None,
    k_scale: Array | None,
    v_scale: Array | None,
    spec: DecodeSpec,
    backend: Backend,
) -> tuple[Array, Array]:
    """Compute out and lse in float32, on keys and values copied out of their pages."""
    operands = (q, k_pages, v_pages, block_tables, seq_lens, sinks, k_scale, v_scale)
    with jax.default_matmul_precision("highest"):
        out, lse = reference.paged_forward(*operands, spec, jnp.float32)
    return out.astype(q.dtype), lse


def append_kv(
    k_new: Array,
    v_new: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    seq_lens: Array,
    k_scale: Array | None,
    v_scale: Array | None,
    cache: PagedCache,
    backend: Backend,
) -> tuple[Array, Array]:
    """Return the pools with new tokens in their pages."""
    slots = _slots(block_tables, seq_lens, k_new.shape[1], cache)
    return (
        _write(k_pages, k_new, slots, k_scale, cache),
        _write(v_pages, v_new, slots, v_scale, cache),
    )


def _slots(block_tables, seq_lens, tokens, cache):
    """Return page and slot of each new token, [B, T] each; the page is past the pool if none is.

    Negative ids would count from the end of the pool, so they become ids past it.
    """
    position = seq_lens[:, None] - tokens + jnp.arange(tokens, dtype=seq_lens.dtype)
    column, slot = position // cache.page_size, position % cache.page_size
    page = jnp.take_along_axis(block_tables, column, axis=1, mode="fill", fill_value=-1)
    return jnp.where((position >= 0) & (page >= 0), page, cache.num_pages), slot


def _write(pages, new, slots, scale, cache):
    if scale is not None:
        new = reference.quantize(new, scale, cache, pages.dtype)
    return pages.at[slots].set(new, mode="drop")


def combine(outs: Array, lses: Array, spec: MergeSpec, backend: Backend) -> tuple[Array, Array]:
    """Merge partial results over disjoint keys."""
    out, lse = reference.merge(outs, lses, jnp.float32)
    return out.astype(outs.dtype), lse
