"""Rotary embedding of any tokens, and of new tokens in a cache."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from twin_attention.contract.operands import AppendOperands
from twin_attention.contract.paged_spec import AppendSpec
from twin_attention.contract.reference.cache import positions_of_new
from twin_attention.contract.reference.visibility import clear_padding

Array = Any


def rotate(
    x: Array, position: Array, cos: Array, sin: Array, interleaved: bool, dtype: Any
) -> Array:
    """Rotate pairs of dimensions by the angles of positions (rotary embedding).

    With the angle a of a pair (x, y): ``x cos a - y sin a`` and ``y cos a + x sin a``. If cos and
    sin have no row for a position, the rotated dimensions are NaN. Source: Su et al. 2021
    (RoFormer).

    Args:
        x: [..., H, D].
        position: [...].
        cos, sin: [positions, R / 2]. Dimensions of `x` from R on are not rotated.
        interleaved: pair i is dimensions 2i and 2i + 1, not i and i + R / 2.
    """
    xp = array_namespace(x)
    rows, half = cos.shape
    known = (position >= 0) & (position < rows)
    row = xp.reshape(xp.where(known, position, xp.zeros_like(position)), (-1,))

    def angles(table: Array) -> Array:
        found = xp.take(xp.astype(table, dtype), row, axis=0)
        found = xp.reshape(found, (*position.shape, 1, half))
        return xp.where(known[..., None, None], found, xp.full_like(found, float("nan")))

    x, cos, sin = xp.astype(x, dtype), angles(cos), angles(sin)
    first, second = x[..., :half], x[..., half : 2 * half]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    pair = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        rotated = xp.reshape(xp.stack(pair, axis=-1), (*first.shape[:-1], 2 * half))
    else:
        rotated = xp.concat(pair, axis=-1)
    return xp.concat([rotated, x[..., 2 * half :]], axis=-1)


def rotate_new(
    operands: AppendOperands, spec: AppendSpec, dtype: Any
) -> tuple[Array, Array | None]:
    """Return the new keys and any queries, rotated at their positions; queries of padding are 0."""
    k_new, q = operands.k_new, operands.q
    cos, sin = operands.rotary_cos, operands.rotary_sin
    if cos is None:
        return k_new, None
    xp = array_namespace(k_new)
    position, _, is_token = positions_of_new(operands, spec)
    k_new = rotate(k_new, position, cos, sin, spec.interleaved, dtype)
    if q is not None:
        q = clear_padding(xp, q, is_token) if spec.packed else q
        q = rotate(q, position, cos, sin, spec.interleaved, dtype)
    return k_new, q
