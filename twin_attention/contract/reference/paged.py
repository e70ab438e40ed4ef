from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace, device

from twin_attention.contract.operands import DecodeOperands, FlashOperands, PagedOperands
from twin_attention.contract.paged_spec import DecodeSpec, PagedSpec
from twin_attention.contract.reference.arithmetic import normalize
from twin_attention.contract.reference.cache import gather_both
from twin_attention.contract.reference.formulas import forward, sinks_of_rows
from twin_attention.contract.reference.visibility import (
    clear_padding,
    in_ranges,
    sequence_of_tokens,
)
from twin_attention.contract.spec import WINDOW_UNLIMITED, AttentionSpec

Array = Any


def paged_forward(operands: DecodeOperands, spec: DecodeSpec, dtype: Any) -> tuple[Array, Array]:
    """Compute out [B, T, Hq, Dv] of new tokens over a paged cache, and lse [B, Hq, T]."""
    q, seq_lens, sinks, tree_ends = (
        operands.q, operands.seq_lens, operands.sinks, operands.tree_ends
    )  # fmt: skip
    xp = array_namespace(q, operands.k_pages)
    cache, group = spec.cache, spec.group_size
    length = xp.clip(seq_lens, 0, cache.capacity if cache.num_pages else 0)[:, None]
    key = xp.arange(cache.capacity, dtype=length.dtype, device=device(q))[None, :]
    exists = key < length  # [B, keys]
    if spec.window_left is not None:  # keys before all tokens' windows may hold anything
        exists = exists & (key >= length - spec.tokens - min(spec.window_left, cache.capacity))
    k, v = gather_both(xp, operands, exists, cache, dtype)
    rows = (spec.batch, spec.heads_kv, group * spec.tokens)
    q = xp.reshape(xp.permute_dims(xp.astype(q, dtype), (0, 2, 1, 3)), (*rows, spec.head_dim))

    s = xp.matmul(q, xp.matrix_transpose(k)) * spec.scale
    token = xp.arange(spec.tokens, dtype=length.dtype, device=device(q))[None, :]
    position = (length - spec.tokens + token)[:, :, None]
    if operands.alibi_slopes is not None:
        slopes = xp.astype(operands.alibi_slopes, dtype)[..., :, None, None]
        distance = xp.abs(key[:, None, :] - position)[:, None]  # [B, 1, T, keys]
        s = s - xp.reshape(slopes * xp.astype(distance, dtype), s.shape)
    if spec.softcap is not None:
        s = spec.softcap * xp.tanh(s / spec.softcap)
    seen = exists[:, None, :] & (key[:, None, :] <= position)  # [B, T, keys]
    if spec.window_left is not None:
        seen = seen & (key[:, None, :] >= position - min(spec.window_left, cache.capacity))
    if tree_ends is not None:
        new = key - (length - spec.tokens)  # [B, keys], negative before the new tokens
        first = xp.arange(spec.batch, dtype=length.dtype, device=device(q))[:, None] * spec.tokens
        end = _ends_of_keys(xp, tree_ends, first + new, exists & (new >= 0))
        seen = seen & (token[:, :, None] < end[:, None, :])
    shape = (spec.batch, spec.heads_kv, group, spec.tokens, cache.capacity)
    seen = xp.reshape(xp.broadcast_to(seen[:, None, None], shape), s.shape)
    s = xp.where(seen, s, xp.full_like(s, float("-inf")))

    p, _, lse = normalize(xp, s, sinks_of_rows(xp, sinks, spec, spec.tokens, dtype))
    heads = (spec.batch, spec.heads_q, spec.tokens)
    out = xp.reshape(xp.matmul(p, v), (*heads, spec.head_dim_v))
    return xp.permute_dims(out, (0, 2, 1, 3)), xp.reshape(lse, heads)


def ragged_forward(operands: PagedOperands, spec: PagedSpec, dtype: Any) -> tuple[Array, Array]:
    """Compute out [Tq, Hq, Dv] of any number of new tokens per sequence, and lse [Hq, Tq].

    Only values depend on offsets, lengths and tables, so it can be traced. Each token is multiplied
    with the keys of all sequences: memory is O(Tq · B · capacity).
    """
    q, seq_lens, offsets = operands.q, operands.seq_lens, operands.cu_seqlens_q
    tree_ends, ranges = operands.tree_ends, operands.q_ranges
    xp = array_namespace(q, operands.k_pages)
    cache, on = spec.cache, device(q)
    length = xp.clip(seq_lens, 0, cache.capacity if cache.num_pages else 0)
    key = xp.arange(cache.capacity, dtype=length.dtype, device=on)[None, :]
    exists = key < length[:, None]  # [B, capacity]
    sequence = sequence_of_tokens(xp, offsets, spec.tokens)
    is_token = sequence < spec.batch
    # The last token of a sequence stands at its last key.
    own = xp.where(is_token, sequence, xp.zeros_like(sequence))
    token = xp.arange(spec.tokens, dtype=offsets.dtype, device=on)
    position = xp.take(length - offsets[1:], own, axis=0) + token
    seen = is_token[:, None] & (key <= position[:, None])  # [Tq, capacity]
    begins_later = xp.arange(spec.batch, device=on) > 0  # the first offset counts as 0
    first = xp.where(begins_later, offsets[:-1], xp.zeros_like(offsets[:-1]))
    new = key - (length - (offsets[1:] - first))[:, None]  # [B, capacity], negative for older keys
    of_sequence = sequence[:, None] == xp.arange(spec.batch, dtype=sequence.dtype, device=on)
    shown = xp.zeros_like(seen)
    if ranges is not None:
        shown = in_ranges(xp, ranges, key[0, :]) & (key < xp.take(length, own, axis=0)[:, None])
    if spec.window_left is not None:
        left = min(spec.window_left, cache.capacity)
        seen = seen & (key >= position[:, None] - left)
        # Keys before all tokens' windows, and outside their ranges, may hold anything.
        is_shown = xp.any(of_sequence[:, :, None] & shown[:, None, :], axis=0)
        exists = exists & ((new >= -left) | is_shown)
    if tree_ends is not None:
        end = _ends_of_keys(xp, tree_ends, first[:, None] + new, exists & (new >= 0))
        seen = seen & ((token - xp.take(first, own, axis=0))[:, None] < xp.take(end, own, axis=0))
    seen = of_sequence[:, :, None] & (seen | shown)[:, None, :]  # [Tq, B, capacity]

    one = AttentionSpec(
        batch=1,
        seq_q=spec.tokens,
        seq_kv=spec.batch * cache.capacity,
        heads_q=spec.heads_q,
        heads_kv=spec.heads_kv,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        dtype=spec.dtype,
        scale=spec.scale,
        softcap=spec.softcap,
    )

    def joined(x: Array) -> Array:
        x = xp.permute_dims(x, (0, 2, 1, 3))
        return xp.reshape(x, (1, one.seq_kv, cache.heads, x.shape[-1]))

    added = None
    if operands.alibi_slopes is not None:
        slopes = xp.astype(operands.alibi_slopes, dtype)
        slopes = xp.take(slopes, own, axis=0) if slopes.ndim == 2 else slopes[None, :]
        distance = xp.astype(xp.abs(key - position[:, None]), dtype)  # [Tq, capacity]
        added = -xp.permute_dims(slopes, (1, 0))[:, :, None] * distance
        added = xp.broadcast_to(
            added[:, :, None, :], (spec.heads_q, spec.tokens, spec.batch, cache.capacity)
        )
        added = xp.reshape(added, (1, spec.heads_q, spec.tokens, one.seq_kv))
    q = clear_padding(xp, q, is_token)[None, ...]
    k, v = map(joined, gather_both(xp, operands, exists, cache, dtype))
    batch = FlashOperands(q, k, v, operands.sinks)
    out, lse = forward(xp, batch, one, xp.reshape(seen, (one.seq_q, one.seq_kv)), dtype, added)
    return out[0, ...], lse[0, ...]


def _ends_of_keys(xp: Any, tree_ends: Array, token: Array, is_new: Array) -> Array:
    """Return where the tokens that see each key end; for older keys, past all tokens."""
    size = math.prod(tree_ends.shape)
    token = xp.where(is_new & (token >= 0) & (token < size), token, xp.full_like(token, size))
    none = xp.full((1,), WINDOW_UNLIMITED, dtype=tree_ends.dtype, device=device(tree_ends))
    ends = xp.concat([xp.reshape(tree_ends, (-1,)), none])
    return xp.reshape(xp.take(ends, xp.reshape(token, (-1,)), axis=0), token.shape)
