from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device

from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.reference.formulas import (
    backward,
    forward,
    jvp,
    weights_at,
    with_zeros,
)
from twin_attention.contract.reference.visibility import (
    apply_ranges,
    apply_segments,
    apply_tree,
    clear_padding,
    positions,
    visibility,
)
from twin_attention.contract.spec import AttentionSpec
from twin_attention.contract.terms import added_scores

Array = Any


def attention_forward(
    operands: FlashOperands, spec: AttentionSpec, dtype: Any, first: tuple[int, int] = (0, 0)
) -> tuple[Array, ...]:
    """Compute out [B, Sq, Hq, Dv], lse [B, Hq, Sq] and, if asked for, each row's largest score."""
    xp = array_namespace(operands.q)
    position = positions(xp, operands, spec)
    seen = visibility(xp, spec, device(operands.q))
    seen = apply_ranges(xp, operands, apply_tree(xp, operands, spec, seen))
    operands, seen, _ = apply_segments(xp, operands, seen)
    added = added_scores(xp, operands, position, None, dtype)
    kept = _kept(xp, operands, spec, dtype, first)
    return forward(xp, operands, spec, seen, dtype, added, kept)


def attention_backward(
    dout: Array,
    dlse: Array | None,
    operands: FlashOperands,
    spec: AttentionSpec,
    dtype: Any,
    first: tuple[int, int] = (0, 0),
) -> FlashOperands[Array]:
    """Compute the gradients of `attention_forward`, of each operand.

    With ``dp = dout · vᵀ`` and ``delta = rowsum(p ∘ dp) - dlse``: ``ds = p ∘ (dp - delta)``,
    ``dq = scale · ds k``, ``dk = scale · dsᵀ q``, ``dv = pᵀ dout``. A sink is a score without a
    value, so its dp is 0. With dropout, dp and the p in dv are multiplied by `dropout_weights`.

    With dropout, delta is computed from out, ``rowsum(dout ∘ out) - dlse``, as in the kernels. If
    one key of a row counts, the delta above would cancel dp without an error, but such a row's out
    is a rounded multiple of v. With `precision` "tf32" gradients of terms that sum ds over keys
    also use it: with the delta above, a row's sum would cancel without a product's error.
    """
    xp = array_namespace(operands.q)
    seen = visibility(xp, spec, device(operands.q))
    seen = apply_ranges(xp, operands, apply_tree(xp, operands, spec, seen))
    operands, seen, is_query = apply_segments(xp, operands, seen)
    if is_query is not None:
        dout = clear_padding(xp, dout, is_query)
    position = positions(xp, operands, spec)
    added = added_scores(xp, operands, position, None, dtype)
    kept = _kept(xp, operands, spec, dtype, first)
    return backward(xp, dout, dlse, operands, spec, seen, dtype, added, position, kept)


def attention_jvp(
    tangents: FlashOperands,
    operands: FlashOperands,
    spec: AttentionSpec,
    dtype: Any,
    first: tuple[int, int] = (0, 0),
) -> tuple[Array, Array]:
    """Compute the tangents of `attention_forward`'s out and lse; None is a tangent of 0.

    With ``ds = (scale · (dq kᵀ + q dkᵀ) + dbias) ∘ dcap``: ``dlse = rowsum(p ∘ ds)`` and
    ``dout = (p ∘ (ds - dlse)) v + p dv``. A sink is a score without a value, so dlse has its
    ``p dsink`` too. With dropout, both p of dout are multiplied by `dropout_weights`. A row that
    sees no key gives 0, and 0 or its sink's tangent.
    """
    xp = array_namespace(operands.q)
    tangents = with_zeros(xp, tangents, operands)
    seen = visibility(xp, spec, device(operands.q))
    seen = apply_ranges(xp, operands, apply_tree(xp, operands, spec, seen))
    tangents, _, _ = apply_segments(xp, tangents, seen)
    operands, seen, _ = apply_segments(xp, operands, seen)
    position = positions(xp, operands, spec)
    added, dadded = (added_scores(xp, x, position, None, dtype) for x in (operands, tangents))
    kept = _kept(xp, operands, spec, dtype, first)
    return jvp(xp, tangents, operands, spec, seen, dtype, added, dadded, kept)


def _kept(
    xp: Any, operands: FlashOperands, spec: AttentionSpec, dtype: Any, first: tuple[int, int]
) -> Array | None:
    """[B, Hq, Sq, Skv]; None without dropout."""
    sizes = (spec.batch, spec.heads_q, spec.seq_q, spec.seq_kv)
    batch, head, query, key = (xp.arange(n, device=device(operands.q)) for n in sizes)
    counters = (
        (first[0] + batch)[:, None, None, None], (first[1] + head)[:, None, None],
        query[:, None], key,
    )  # fmt: skip
    return weights_at(xp, operands, spec, counters, dtype)
