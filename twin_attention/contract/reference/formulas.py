"""The formulas that every attention shares: scores, output and gradients of the keys in a mask.

Source: Vaswani et al. 2017, eq. 1; gradients as in Dao et al. 2022 (FlashAttention), appendix B.2.
"""

from __future__ import annotations

from typing import Any

from twin_attention.contract.dropout import dropout_weights
from twin_attention.contract.operands import (
    DIFFERENTIABLE,
    BlockSparseOperands,
    FlashOperands,
    PartialOperands,
    VarlenOperands,
)
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.reference.arithmetic import (
    as_tf32,
    largest,
    normalize,
    product,
    takes_tf32,
)
from twin_attention.contract.spec import AttentionSpec
from twin_attention.contract.terms import gradients_of_terms

Array = Any


def forward(
    xp: Any,
    operands: FlashOperands | BlockSparseOperands | PartialOperands,
    spec: AttentionSpec,
    seen: Array | None,
    dtype: Any,
    added: Array | None = None,
    kept: Array | None = None,
) -> tuple[Array, ...]:
    """Return out, lse and, if the problem asks for it, each row's largest score.

    seen: mask as `scores` takes it; None for all. added: what `added_scores` returns. kept: weights
    of dropout [B, Hq, Sq, Skv].
    """
    q, k, v = by_kv_head(xp, operands, spec, dtype)
    s, _ = scores(xp, q, k, spec, seen, added)
    p, _, lse = normalize(xp, s, sinks_of_rows(xp, operands.sinks, spec, spec.seq_q, dtype))
    if kept is not None:
        p = p * xp.reshape(kept, p.shape)
    out = to_heads(xp, product(xp, p, v, spec), spec)
    of_rows = [lse, largest(xp, s)] if spec.row_max else [lse]
    shape = (spec.batch, spec.heads_q, spec.seq_q)
    return out, *(xp.reshape(x, shape) for x in of_rows)


def backward(
    xp: Any,
    dout: Array,
    dlse: Array | None,
    operands: FlashOperands | BlockSparseOperands,
    spec: AttentionSpec,
    seen: Array | None,
    dtype: Any,
    added: Array | None = None,
    position: Array | None = None,
    kept: Array | None = None,
) -> FlashOperands[Array]:
    """Compute the gradients of `forward`, by the formulas of `attention_backward`."""
    q, k, v = by_kv_head(xp, operands, spec, dtype)
    dout = rows_of(xp, dout, spec, dtype)
    s, dcap = scores(xp, q, k, spec, seen, added)
    sink = sinks_of_rows(xp, operands.sinks, spec, spec.seq_q, dtype)
    p, p_sink, lse = normalize(xp, s, sink)
    dp = product(xp, dout, xp.matrix_transpose(v), spec)
    kept_p = p
    if kept is not None:
        kept = xp.reshape(kept, p.shape)
        kept_p, dp = p * kept, dp * kept
    has_tf32 = takes_tf32(xp, dp, spec)

    def dot_of_out() -> Array:
        multiplied = as_tf32(xp, dout) if has_tf32 else dout
        return xp.sum(multiplied * product(xp, kept_p, v, spec), axis=-1, keepdims=True)

    dot = xp.sum(p * dp, axis=-1, keepdims=True) if kept is None else dot_of_out()
    delta = dot
    if dlse is not None:
        lse, dlse = (xp.reshape(xp.astype(x, dtype), delta.shape) for x in (lse, dlse))
        delta = delta - xp.where(lse == -xp.inf, xp.zeros_like(dlse), dlse)

    def ds_of(delta: Array) -> Array:
        ds = p * (dp - delta)
        return ds if dcap is None else ds * dcap

    ds = ds_of(delta)
    dq = product(xp, ds, k, spec) * spec.scale
    dk = product(xp, xp.matrix_transpose(ds), q, spec) * spec.scale
    dv = product(xp, xp.matrix_transpose(kept_p), dout, spec)
    dsinks = None
    if p_sink is not None and "sinks" not in spec.frozen:
        dsink = xp.reshape(-p_sink * delta, (spec.batch, spec.heads_q, spec.seq_q))
        dsinks = xp.sum(dsink, axis=(0, 2))
    of_terms = {}
    if isinstance(operands, FlashOperands) and spec.terms:
        summed = ds
        if has_tf32:  # p is rounded in out, so no sum over keys cancels
            summed = ds_of(delta + dot_of_out() - dot)
        shape = (spec.batch, spec.heads_q, spec.seq_q, spec.seq_kv)
        of_pairs = (xp.reshape(x, shape) for x in (ds, summed))
        of_terms = gradients_of_terms(xp, operands, position, *of_pairs, frozen=spec.frozen)
    return FlashOperands(
        to_heads(xp, dq, spec),
        xp.permute_dims(dk, (0, 2, 1, 3)),
        xp.permute_dims(dv, (0, 2, 1, 3)),
        dsinks,
        **of_terms,
    )


def jvp(
    xp: Any,
    tangents: FlashOperands,
    operands: FlashOperands,
    spec: AttentionSpec,
    seen: Array | None,
    dtype: Any,
    added: Array | None = None,
    dadded: Array | None = None,
    kept: Array | None = None,
) -> tuple[Array, Array]:
    """Compute the tangents of `forward`'s out and lse, by the formulas of `attention_jvp`.

    tangents: as `with_zeros` returns them. dadded: the tangent of `added`.
    """
    q, k, v = by_kv_head(xp, operands, spec, dtype)
    dq, dk, dv = by_kv_head(xp, tangents, spec, dtype)
    s, dcap = scores(xp, q, k, spec, seen, added)
    sink, dsink = (
        sinks_of_rows(xp, x.sinks, spec, spec.seq_q, dtype) for x in (operands, tangents)
    )
    p, p_sink, _ = normalize(xp, s, sink)
    ds = product(xp, dq, xp.matrix_transpose(k), spec)
    ds = (ds + product(xp, q, xp.matrix_transpose(dk), spec)) * spec.scale
    if dadded is not None:
        shape = (spec.batch, spec.heads_q, spec.seq_q, spec.seq_kv)
        ds = ds + xp.reshape(xp.broadcast_to(dadded, shape), ds.shape)
    if dcap is not None:
        ds = ds * dcap
    ds = xp.where(p == 0, xp.zeros_like(ds), ds)  # what is added to a hidden pair may be NaN
    dlse = xp.sum(p * ds, axis=-1, keepdims=True)
    if p_sink is not None:
        dlse = dlse + p_sink * dsink
    dp = p * (ds - dlse)
    if kept is not None:
        kept = xp.reshape(kept, p.shape)
        p, dp = p * kept, dp * kept
    dout = product(xp, dp, v, spec) + product(xp, p, dv, spec)
    return to_heads(xp, dout, spec), xp.reshape(dlse, (spec.batch, spec.heads_q, spec.seq_q))


def with_zeros(xp: Any, tangents: Any, operands: Any) -> Any:
    """Return operands with their tangents in place of values, 0 where there is none.

    Integers stay, and slopes, which are constants, are left out.
    """
    values = {name: getattr(operands, name, None) for name in DIFFERENTIABLE}
    found = {
        name: xp.zeros_like(x) if getattr(tangents, name) is None else getattr(tangents, name)
        for name, x in values.items()
        if x is not None
    }
    return operands._replace(alibi_slopes=None, **found)


def by_kv_head(
    xp: Any,
    operands: FlashOperands | BlockSparseOperands | PartialOperands,
    spec: AttentionSpec,
    dtype: Any,
):
    """Return q as [B, Hkv, group · Sq, D], so no key is copied; k, v as [B, Hkv, Skv, D]."""
    k, v = (xp.permute_dims(xp.astype(x, dtype), (0, 2, 1, 3)) for x in (operands.k, operands.v))
    return rows_of(xp, operands.q, spec, dtype), k, v


def rows_of(xp: Any, x: Array, spec: AttentionSpec, dtype: Any) -> Array:
    rows = spec.group_size * spec.seq_q
    x = xp.permute_dims(xp.astype(x, dtype), (0, 2, 1, 3))
    return xp.reshape(x, (spec.batch, spec.heads_kv, rows, x.shape[-1]))


def to_heads(xp: Any, rows: Array, spec: AttentionSpec) -> Array:
    x = xp.reshape(rows, (spec.batch, spec.heads_q, spec.seq_q, rows.shape[-1]))
    return xp.permute_dims(x, (0, 2, 1, 3))


def scores(
    xp: Any, q: Array, k: Array, spec: AttentionSpec, seen: Array | None, added: Array | None = None
) -> tuple[Array, Array | None]:
    """Compute scores after scale, terms, softcap and mask, and the derivative of the softcap."""
    s = product(xp, q, xp.matrix_transpose(k), spec) * spec.scale
    shape, dcap = (spec.batch, spec.heads_q, spec.seq_q, spec.seq_kv), None
    if added is not None:
        s = s + xp.reshape(xp.broadcast_to(added, shape), s.shape)
    if spec.softcap is not None:
        t = xp.tanh(s / spec.softcap)
        s, dcap = t * spec.softcap, 1 - t * t
    if seen is not None:
        # [Sq, Skv], [B, Sq, Skv] or [B or 1, Hq or 1, Sq, Skv]: the rows of s by query head.
        if seen.ndim == 3:
            seen = seen[:, None, :, :]
        seen = xp.reshape(xp.broadcast_to(seen, shape), s.shape)
        s = xp.where(seen, s, xp.full_like(s, float("-inf")))
        if dcap is not None:  # what is added to a hidden pair may be NaN
            dcap = xp.where(seen, dcap, xp.zeros_like(dcap))
    return s, dcap


def sinks_of_rows(
    xp: Any, sinks: Array | None, spec: AttentionSpec | DecodeSpec, rows: int, dtype: Any
) -> Array | None:
    """Return the sink of each row, [Hkv, group · rows, 1]; None without sinks."""
    if sinks is None:
        return None
    heads = (spec.heads_kv, spec.group_size)
    x = xp.broadcast_to(xp.reshape(xp.astype(sinks, dtype), (*heads, 1)), (*heads, rows))
    return xp.reshape(x, (spec.heads_kv, spec.group_size * rows, 1))


def weights_at(
    xp: Any,
    operands: FlashOperands | VarlenOperands,
    spec: AttentionSpec,
    counters: Any,
    dtype: Any,
) -> Array | None:
    """Return the weights of dropout at these counters; None without dropout."""
    seed, rule = operands.dropout_seed, spec.dropout
    if seed is None or rule is None:
        return None
    return dropout_weights(xp, seed, counters, rule, dtype)
