from __future__ import annotations

from typing import Any

from array_api_compat import device

from twin_attention.contract.operands import FlashOperands, PartialOperands, VarlenOperands
from twin_attention.contract.spec import AttentionSpec, PartialSpec, Window

Array = Any


def visibility(xp: Any, spec: AttentionSpec, on: Any) -> Array | None:
    """Return the mask [Sq, Skv] of the keys each query sees, on device `on`; None for all."""
    if spec.position_window == Window():
        return None
    position = xp.arange(spec.seq_q, device=on) + spec.diagonal
    return in_window(xp, position, spec)


def in_window(xp: Any, position: Array, spec: AttentionSpec) -> Array:
    """Return the mask [Sq, Skv] of the keys in the window of queries at these positions, [Sq]."""
    window = spec.bounded_window  # a wider one sees no more, and may not fit an index dtype
    position, key = position[:, None], xp.arange(spec.seq_kv, device=device(position))[None, :]
    seen = xp.ones((spec.seq_q, spec.seq_kv), dtype=xp.bool, device=device(position))
    if window.left is not None:
        seen = seen & (key >= position - window.left)
    if window.right is not None:
        seen = seen & (key <= position + window.right)
    return seen


def positions(xp: Any, operands: FlashOperands, spec: AttentionSpec) -> Array:
    """Return the key position of each query, [Sq]."""
    return xp.arange(spec.seq_q, device=device(operands.q)) + spec.diagonal


def apply_tree(
    xp: Any, operands: FlashOperands, spec: AttentionSpec, seen: Array | None
) -> Array | None:
    """Return the mask [B, Sq, Skv] of the keys in `seen` that end behind a query."""
    if operands.kv_ends is None:
        return seen
    position = positions(xp, operands, spec)
    return seen & in_branch(xp, operands, spec, position[:, None])


def in_branch(
    xp: Any, operands: FlashOperands | VarlenOperands, spec: AttentionSpec, position: Array
) -> Array:
    """Return the mask [..., Sq, Skv] of the keys on the branches of queries at positions [Sq, 1].

    A query's own key is the last in the window, which counts depths if there are any.
    """
    ends, q_depths, kv_depths = operands.kv_ends, operands.q_depths, operands.kv_depths
    assert ends is not None
    own = position + (spec.window.right or 0)
    seen = own < ends[..., None, :]
    if spec.depth_window is not None:
        assert q_depths is not None
        assert kv_depths is not None
        distance = q_depths[..., :, None] - kv_depths[..., None, :]
        seen = seen & (distance <= spec.depth_window)
    return seen


def apply_ranges(xp: Any, operands: FlashOperands, seen: Array | None) -> Array | None:
    """Show keys in ranges: return the mask [B, Sq, Skv] of these and of those in `seen`."""
    if operands.q_ranges is None or seen is None:
        return seen
    key = xp.arange(operands.k.shape[1], device=device(operands.q))
    return seen | in_ranges(xp, operands.q_ranges, key)


def in_ranges(xp: Any, ranges: Array, key: Array) -> Array:
    """Return which keys [Skv] or [..., Sq, Skv] are in ranges [..., Sq, R, 2], [..., Sq, Skv]."""
    seen = (key[..., None, :] >= ranges[..., :1]) & (key[..., None, :] < ranges[..., 1:])
    return xp.any(seen, axis=-2)


def apply_segments(
    xp: Any, operands: FlashOperands, seen: Array | None
) -> tuple[FlashOperands, Array | None, Array | None]:
    """Hide keys of other segments and padding.

    Return operands without their padding, the mask [B, Sq, Skv] of those in `seen`, and which
    queries are no padding, [B, Sq]; None without segment ids.
    """
    q, k, v, _, q_ids, kv_ids, *_ = operands
    if q_ids is None or kv_ids is None:
        return operands, seen, None
    is_query, is_key = q_ids >= 0, kv_ids >= 0
    same = (q_ids[:, :, None] == kv_ids[:, None, :]) & is_query[:, :, None]
    seen = same if seen is None else same & seen
    q, k, v = (clear_padding(xp, x, kept) for x, kept in ((q, is_query), (k, is_key), (v, is_key)))
    return operands._replace(q=q, k=k, v=v), seen, is_query


def seen_in_intervals(xp: Any, operands: PartialOperands, spec: PartialSpec) -> Array:
    """Return the mask [Sq, Skv] of the keys in each query's interval."""
    key = xp.arange(spec.seq_kv, device=device(operands.q))
    return (key >= operands.key_begins[:, None]) & (key < operands.key_ends[:, None])


def clear_padding(xp: Any, x: Array, kept: Array) -> Array:
    """Return tokens [..., S, H, D] with padding, which may hold NaN, set to 0."""
    return xp.where(kept[..., None, None], x, xp.zeros_like(x))


def sequence_of_tokens(xp: Any, offsets: Array, tokens: int) -> Array:
    """Return the sequence of each token, [T]; the number of sequences for padding."""
    token = xp.arange(tokens, device=device(offsets))
    begun = offsets[None, 1:] <= token[:, None]
    return xp.sum(xp.astype(begun, offsets.dtype), axis=1, dtype=offsets.dtype)
