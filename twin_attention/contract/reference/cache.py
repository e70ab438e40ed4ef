"""Paged caches: the places of new tokens, the stored form of numbers, and the keys."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device

from twin_attention.contract.operands import AppendOperands
from twin_attention.contract.paged_spec import AppendSpec, PagedCache
from twin_attention.contract.reference.visibility import sequence_of_tokens

Array = Any

FLOAT8_MAX = 448.0  # the largest float8_e4m3fn


def positions_of_new(operands: AppendOperands, spec: AppendSpec) -> tuple[Array, Array, Array]:
    """Return position and sequence of new tokens, and which are tokens, [B, T] or [Tq] each."""
    lengths, offsets = operands.seq_lens, operands.cu_seqlens_q
    xp, on = array_namespace(lengths), device(lengths)
    token = xp.arange(spec.tokens, dtype=lengths.dtype, device=on)
    if offsets is None:
        position = lengths[:, None] - spec.tokens + token
        sequence = xp.arange(spec.batch, dtype=lengths.dtype, device=on)[:, None]
        sequence = xp.broadcast_to(sequence, position.shape)
        return position, sequence, xp.ones_like(position, dtype=xp.bool)
    sequence = sequence_of_tokens(xp, offsets, spec.tokens)
    is_token = sequence < spec.batch
    sequence = xp.where(is_token, sequence, xp.zeros_like(sequence))
    if spec.batch == 0:
        return xp.zeros_like(token), sequence, is_token
    position = xp.take(lengths - offsets[1:], sequence, axis=0) + token
    return xp.where(is_token, position, xp.zeros_like(position)), sequence, is_token


def quantize(x: Array, scale: Array, cache: PagedCache, dtype: Any) -> Array:
    """Return `x` [..., Hkv, D] as a quantised cache stores it: ``x / scale``, rounded, clamped.

    A NaN becomes 0 in int8 and stays NaN in float8_e4m3fn. scale: [] or [Hkv] float32.
    """
    xp = array_namespace(x)
    x = xp.astype(x, xp.float32) / _of_heads(xp, scale)
    if cache.dtype == "int8":
        x = xp.where(xp.isnan(x), xp.zeros_like(x), x)
        return xp.astype(xp.clip(xp.round(x), -127, 127), dtype)
    return xp.astype(xp.clip(x, -FLOAT8_MAX, FLOAT8_MAX), dtype)


def _of_heads(xp: Any, scale: Array) -> Array:
    return xp.reshape(scale, (*scale.shape, 1)) if scale.shape else scale


def gather(
    xp: Any,
    pages: Array,
    block_tables: Array,
    exists: Array,
    scale: Array | None,
    cache: PagedCache,
    dtype: Any,
) -> Array:
    """Return the keys of each sequence, [B, Hkv, capacity, D]; 0 where there is none."""
    batch, size = block_tables.shape[0], pages.shape[-1]
    if cache.num_pages == 0:
        shape = (batch, cache.heads, cache.capacity, size)
        return xp.zeros(shape, dtype=dtype, device=device(pages))
    of_pages = xp.reshape(exists, (batch, cache.max_pages, cache.page_size))
    ids = xp.where(xp.any(of_pages, axis=2), block_tables, xp.zeros_like(block_tables))
    ids = xp.clip(ids, 0, cache.num_pages - 1)
    x = xp.take(pages, xp.reshape(ids, (-1,)), axis=0)
    x = xp.reshape(x, (batch, cache.capacity, cache.heads, size))
    x = xp.astype(x, dtype)
    x = xp.where(exists[:, :, None, None], x, xp.zeros_like(x))
    if scale is not None:
        x = x * xp.astype(_of_heads(xp, scale), dtype)
    return xp.permute_dims(x, (0, 2, 1, 3))


def gather_both(
    xp: Any, operands: Any, exists: Array, cache: PagedCache, dtype: Any
) -> tuple[Array, Array]:
    """Return keys and values of each sequence, as `gather` does."""
    where = operands.block_tables, exists
    k = gather(xp, operands.k_pages, *where, operands.k_scale, cache, dtype)
    if cache.latent:
        return k, k[..., : cache.head_dim_v]
    return k, gather(xp, operands.v_pages, *where, operands.v_scale, cache, dtype)
