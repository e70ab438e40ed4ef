"""The terms added to scores, and their gradients.

A query's position is the key position that it stands at, [Sq]; a distance is a key's position minus
a query's.
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import device

from twin_attention.contract.operands import FlashOperands, VarlenOperands

Array = Any


def added_scores(
    xp: Any,
    operands: FlashOperands | VarlenOperands,
    position: Array,
    sequence: Array | None,
    dtype: Any,
) -> Array | None:
    """Return what is added to scaled scores, as [B, Hq, Sq, Skv] broadcasts; or None."""
    table, slopes = operands.relative_bias, operands.alibi_slopes
    bias = operands.bias if isinstance(operands, FlashOperands) else None
    added = None if bias is None else xp.astype(bias, dtype)
    if table is None and slopes is None:
        return added
    distance = _distances(xp, position, operands.k.shape[-3])
    if table is not None:
        radius = table.shape[1] // 2
        place = xp.reshape(xp.clip(distance, -radius, radius) + radius, (-1,))
        values = xp.take(xp.astype(table, dtype), place, axis=1)
        values = xp.reshape(values, (1, table.shape[0], *distance.shape))
        added = values if added is None else added + values
    if slopes is not None and math.prod(slopes.shape):
        slopes = xp.astype(slopes, dtype)[..., None]
        if sequence is not None and slopes.ndim == 3:
            slopes = xp.permute_dims(xp.take(slopes[..., 0], sequence, axis=0), (1, 0))
        penalty = slopes[..., None] * xp.astype(xp.abs(distance), dtype)
        penalty = penalty if penalty.ndim == 4 else penalty[None, ...]
        added = -penalty if added is None else added - penalty
    return added


def gradients_of_terms(
    xp: Any,
    operands: FlashOperands | VarlenOperands,
    position: Array,
    ds: Array,
    summed: Array,
    frozen: tuple[str, ...],
) -> dict[str, Array]:
    """Return the terms' gradients by name; `alibi_slopes` and `frozen` terms have none.

    ds: gradient of what is added, [B, Hq, Sq, Skv]. summed: the same, for gradients that sum it
    over keys.
    """
    found = {}
    operands = operands._replace(**dict.fromkeys(frozen))
    if isinstance(operands, FlashOperands) and operands.bias is not None:
        shape = operands.bias.shape
        shared = tuple(i for i in range(4) if shape[i] == 1 and ds.shape[i] != 1)
        of_pairs = summed if shape[3] == 1 else ds
        found["bias"] = xp.sum(of_pairs, axis=shared, keepdims=True) if shared else of_pairs
    if operands.relative_bias is not None:
        size = operands.relative_bias.shape[1]
        of_heads = xp.sum(summed, axis=0)
        found["relative_bias"] = _sums_of_distances(xp, of_heads, position, size // 2)
    return found


def _distances(xp: Any, position: Array, seq_kv: int) -> Array:
    """[Sq, Skv]"""
    key = xp.arange(seq_kv, dtype=position.dtype, device=device(position))
    return key[None, :] - position[:, None]


def _sums_of_distances(xp: Any, ds: Array, position: Array, radius: int) -> Array:
    """Return the sums [Hq, 2R + 1] of ds [Hq, Sq, Skv] over each clipped distance."""
    heads, seq_q, seq_kv = ds.shape
    if radius == 0:
        return xp.sum(ds, axis=(1, 2))[:, None]
    if 0 in ds.shape:
        return xp.zeros((heads, 2 * radius + 1), dtype=ds.dtype, device=device(ds))
    distance, zero = _distances(xp, position, seq_kv), xp.zeros_like(ds)
    first, last = (
        xp.sum(xp.where(is_far, ds, zero), axis=(1, 2))[:, None]
        for is_far in (distance <= -radius, distance >= radius)
    )
    near = xp.arange(1 - radius, radius, dtype=position.dtype, device=device(position))
    key = position[:, None] + near
    exists = (key >= 0) & (key < seq_kv)
    row = xp.arange(seq_q, dtype=position.dtype, device=device(position))[:, None] * seq_kv
    place = xp.reshape(row + xp.clip(key, 0, seq_kv - 1), (-1,))
    found = xp.reshape(xp.take(xp.reshape(ds, (heads, -1)), place, axis=1), (heads, *key.shape))
    between = xp.sum(xp.where(exists, found, xp.zeros_like(found)), axis=1)
    return xp.concat([first, between, last], axis=1)
