from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from twin_attention.contract.operands import PartialOperands
from twin_attention.contract.reference.arithmetic import product
from twin_attention.contract.reference.formulas import (
    by_kv_head,
    forward,
    rows_of,
    scores,
    to_heads,
)
from twin_attention.contract.reference.merge import merge
from twin_attention.contract.reference.visibility import seen_in_intervals
from twin_attention.contract.spec import PartialSpec

Array = Any


def partial_forward(
    operands: PartialOperands, out: Array, lse: Array, spec: PartialSpec, dtype: Any
) -> tuple[Array, Array]:
    """Compute out and lse over an earlier result's keys and the operands' keys."""
    xp = array_namespace(operands.q)
    part = forward(xp, operands, spec, seen_in_intervals(xp, operands, spec), dtype)
    outs, lses = (xp.stack([xp.astype(x, dtype), y]) for x, y in zip((out, lse), part, strict=True))
    return merge(outs, lses, dtype)


def partial_backward(
    dout: Array, lse: Array, delta: Array, operands: PartialOperands, spec: PartialSpec, dtype: Any
) -> tuple[Array, Array, Array]:
    """Compute the gradients dq, dk and dv through the keys of the operands.

    lse [B, Hq, Sq] and delta, ``rowsum(dout ∘ out) - dlse``, are of the result over all keys.
    """
    xp = array_namespace(operands.q)
    q, k, v = by_kv_head(xp, operands, spec, dtype)
    dout = rows_of(xp, dout, spec, dtype)
    s, dcap = scores(xp, q, k, spec, seen_in_intervals(xp, operands, spec))
    rows = (spec.batch, spec.heads_kv, spec.group_size * spec.seq_q, 1)
    lse, delta = (xp.reshape(xp.astype(x, dtype), rows) for x in (lse, delta))
    p = xp.exp(s - xp.where(lse == -xp.inf, xp.full_like(lse, float("inf")), lse))
    dp = product(xp, dout, xp.matrix_transpose(v), spec)
    ds = p * (dp - delta)
    if dcap is not None:
        ds = ds * dcap
    dq = product(xp, ds, k, spec) * spec.scale
    dk = product(xp, xp.matrix_transpose(ds), q, spec) * spec.scale
    dv = product(xp, xp.matrix_transpose(p), dout, spec)
    return to_heads(xp, dq, spec), *(xp.permute_dims(x, (0, 2, 1, 3)) for x in (dk, dv))
