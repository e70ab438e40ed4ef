"""Products of matrices, and the softmax of rows with its log-sum-exp."""

from __future__ import annotations

from typing import Any

from twin_attention.contract.spec import AttentionSpec

Array = Any


def product(xp: Any, a: Array, b: Array, spec: AttentionSpec) -> Array:
    """Multiply matrices; with `precision` "tf32" float32 operands are rounded to TF32."""
    if takes_tf32(xp, a, spec):
        a, b = (as_tf32(xp, x) for x in (a, b))
    return xp.matmul(a, b)


def takes_tf32(xp: Any, x: Array, spec: AttentionSpec) -> bool:
    return spec.precision == "tf32" and x.dtype == xp.float32


def as_tf32(xp: Any, x: Array) -> Array:
    """Round float32 numbers to 10 bits of mantissa: to nearest, ties away from 0."""
    bits = (x.view(xp.int32) + (1 << 12)) & -(1 << 13)
    return xp.where(xp.isfinite(x), bits.view(xp.float32), x)


def normalize(xp: Any, s: Array, sink: Array | None = None) -> tuple[Array, Array | None, Array]:
    """Compute p, the sink's p and log-sum-exp of rows; a row without any score has p = 0."""
    m = _row_max(xp, s, sink)
    p, p_sink = xp.exp(s - m), None if sink is None else xp.exp(sink - m)
    normalizer = xp.sum(p, axis=-1, keepdims=True)
    if p_sink is not None:
        normalizer = normalizer + p_sink
    lse = xp.log(normalizer) + m
    normalizer = xp.where(normalizer == 0, xp.ones_like(normalizer), normalizer)
    return p / normalizer, None if p_sink is None else p_sink / normalizer, lse


def _row_max(xp: Any, s: Array, sink: Array | None) -> Array:
    """Return the row maximum, 0 where a row has no finite score."""
    m = largest(xp, s)
    if sink is not None:
        m = xp.maximum(m, sink)
    return xp.where(xp.isinf(m), xp.zeros_like(m), m)


def largest(xp: Any, s: Array) -> Array:
    """Return the largest score of each row, [..., 1]; -inf where there is none."""
    if s.shape[-1] == 0:
        return xp.full_like(xp.sum(s, axis=-1, keepdims=True), float("-inf"))
    return xp.max(s, axis=-1, keepdims=True)
