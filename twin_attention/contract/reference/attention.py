"""Attention of a dense batch, and its gradients."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device

from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.reference.formulas import backward, forward, weights_at
from twin_attention.contract.reference.visibility import (
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
    """Attention output and log-sum-exp.

    Args:
        operands: those of the call.
        spec: semantics; its shapes are those of the operands.
        dtype: dtype of every operation.
        first: batch element and query head of a whole, as dropout counts them, with which the
            operands begin.

    Returns:
        out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] (natural log), both in `dtype`. A row that
        sees no key gives 0, and -inf or its head's sink. Where the problem asks for it also each
        row's largest score [B, Hq, Sq], -inf without a key.
    """
    xp = array_namespace(operands.q)
    position = positions(xp, operands, spec)
    seen = visibility(xp, spec, device(operands.q))
    seen = apply_tree(xp, operands, spec, seen)
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
    """Compute the gradients of `attention_forward`.

    With ``dp = dout · vᵀ`` and ``delta = rowsum(p ∘ dp) - dlse``:
    ``ds = p ∘ (dp - delta)``, ``dq = scale · ds k``, ``dk = scale · dsᵀ q``, ``dv = pᵀ dout``.
    A sink is a score without a value, so that its dp is 0. With dropout p of dv, and dp, are
    multiplied by `dropout_weights`.

    With dropout delta is that of out, ``rowsum(dout ∘ out) - dlse``, as in the kernels: the other
    one would cancel dp, without an error, where a row has one key that counts, but out of such a
    row is a multiple of v that is rounded. Gradients of terms that sum ds over keys take it with
    `precision` "tf32", too. The other one cancels there: the sum over all keys that a row sees
    would have no error of a product.

    Args:
        dout: gradient of out, [B, Sq, Hq, Dv].
        dlse: gradient of lse, [B, Hq, Sq], or None for zero.
        operands, spec, dtype, first: as in the forward.

    Returns:
        The gradient of each operand, in `dtype`.
    """
    xp = array_namespace(operands.q)
    seen = visibility(xp, spec, device(operands.q))
    seen = apply_tree(xp, operands, spec, seen)
    operands, seen, is_query = apply_segments(xp, operands, seen)
    if is_query is not None:
        dout = clear_padding(xp, dout, is_query)
    position = positions(xp, operands, spec)
    added = added_scores(xp, operands, position, None, dtype)
    kept = _kept(xp, operands, spec, dtype, first)
    return backward(xp, dout, dlse, operands, spec, seen, dtype, added, position, kept)


def _kept(
    xp: Any, operands: FlashOperands, spec: AttentionSpec, dtype: Any, first: tuple[int, int]
) -> Array | None:
    """Return the weights of dropout [B, Hq, Sq, Skv]; None without dropout."""
    sizes = (spec.batch, spec.heads_q, spec.seq_q, spec.seq_kv)
    batch, head, query, key = (xp.arange(n, device=device(operands.q)) for n in sizes)
    counters = (
        (first[0] + batch)[:, None, None, None], (first[1] + head)[:, None, None],
        query[:, None], key,
    )  # fmt: skip
    return weights_at(xp, operands, spec, counters, dtype)
