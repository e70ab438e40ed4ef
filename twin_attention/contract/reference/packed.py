from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device

from twin_attention.contract.operands import FlashOperands, VarlenOperands
from twin_attention.contract.reference.formulas import (
    backward,
    forward,
    jvp,
    weights_at,
    with_zeros,
)
from twin_attention.contract.reference.visibility import (
    clear_padding,
    in_branch,
    in_ranges,
    in_window,
    sequence_of_tokens,
)
from twin_attention.contract.spec import VarlenSpec
from twin_attention.contract.terms import added_scores

Array = Any


def varlen_forward(operands: VarlenOperands, spec: VarlenSpec, dtype: Any) -> tuple[Array, ...]:
    """Compute out [Tq, Hq, Dv], lse [Hq, Tq] and, if asked for, each row's largest score."""
    xp = array_namespace(operands.q)
    batch, seen, _, position, sequence = _as_one_sequence(xp, operands, spec)
    added = added_scores(xp, operands, position, sequence, dtype)
    kept = _kept_of_packed(xp, operands, spec, dtype, sequence, position)
    results = forward(xp, batch, spec, seen, dtype, added, kept)
    return tuple(x[0, ...] for x in results)


def varlen_backward(
    dout: Array, dlse: Array | None, operands: VarlenOperands, spec: VarlenSpec, dtype: Any
) -> VarlenOperands[Array]:
    """Compute the gradients of `varlen_forward`, 0 for padding; offsets have none."""
    xp = array_namespace(operands.q)
    batch, seen, is_query, position, sequence = _as_one_sequence(xp, operands, spec)
    added = added_scores(xp, operands, position, sequence, dtype)
    dout = clear_padding(xp, dout, is_query)[None, ...]
    dlse = None if dlse is None else dlse[None, ...]
    kept = _kept_of_packed(xp, operands, spec, dtype, sequence, position)
    found = backward(xp, dout, dlse, batch, spec, seen, dtype, added, position, kept)
    return VarlenOperands(
        found.q[0, ...], found.k[0, ...], found.v[0, ...], None, None, found.sinks,
        relative_bias=found.relative_bias,
    )  # fmt: skip


def varlen_jvp(
    tangents: VarlenOperands, operands: VarlenOperands, spec: VarlenSpec, dtype: Any
) -> tuple[Array, Array]:
    """Compute the tangents of `varlen_forward`'s out and lse, 0 for padding."""
    xp = array_namespace(operands.q)
    tangents = with_zeros(xp, tangents, operands)
    dbatch, *_ = _as_one_sequence(xp, tangents, spec)
    batch, seen, _, position, sequence = _as_one_sequence(xp, operands, spec)
    added, dadded = (added_scores(xp, x, position, sequence, dtype) for x in (operands, tangents))
    kept = _kept_of_packed(xp, operands, spec, dtype, sequence, position)
    dout, dlse = jvp(xp, dbatch, batch, spec, seen, dtype, added, dadded, kept)
    return dout[0, ...], dlse[0, ...]


def _kept_of_packed(
    xp: Any,
    operands: VarlenOperands,
    spec: VarlenSpec,
    dtype: Any,
    sequence: Array,
    position: Array,
) -> Array | None:
    """Return the weights of dropout [Hq, Tq, Tkv], counted within each sequence; or None."""
    if spec.dropout is None:
        return None
    on, offsets = device(operands.q), (operands.cu_seqlens_q, operands.cu_seqlens_kv)
    first_q, first_kv = (xp.take(x, sequence, axis=0) for x in offsets)
    head = xp.arange(spec.heads_q, device=on)[:, None, None]
    query = xp.arange(spec.seq_q, device=on) - first_q
    key = xp.arange(spec.seq_kv, device=on) - first_kv[:, None]
    # Pairs across sequences are hidden, so their numbers may be anything.
    query, key = (xp.where(x < 0, xp.zeros_like(x), x) for x in (query, key))
    counters = sequence[:, None], head, query[:, None], key
    return weights_at(xp, operands, spec, counters, dtype)


def _as_one_sequence(
    xp: Any, operands: VarlenOperands, spec: VarlenSpec
) -> tuple[FlashOperands, Array, Array, Array, Array]:
    """Return packed sequences as a batch of one, with what is needed to treat them so.

    That is the mask [Tq, Tkv], and for each query [Tq]: whether it is no padding, its position
    among all keys, and its sequence, the first for padding.
    """
    q, k, v, cu_q, cu_kv, sinks, *_ = operands
    sequence_q, sequence_kv = (
        sequence_of_tokens(xp, offsets, x.shape[0]) for offsets, x in ((cu_q, q), (cu_kv, k))
    )
    is_query, is_key = (x < spec.num_sequences for x in (sequence_q, sequence_kv))
    is_own = is_query[:, None] & (sequence_q[:, None] == sequence_kv[None, :])
    # The last query of a sequence stands at its last key.
    following = xp.where(is_query, sequence_q + 1, sequence_q)
    diagonal = xp.take(cu_kv - cu_q, following, axis=0)
    position = xp.arange(spec.seq_q, device=device(q)) + diagonal
    seen = in_window(xp, position, spec)
    sequence = xp.where(is_query, sequence_q, 0 * sequence_q)
    first = xp.take(cu_kv, sequence, axis=0)  # from which ends and ranges are counted
    if operands.kv_ends is not None:
        seen = seen & in_branch(xp, operands, spec, (position - first)[:, None])
    if operands.q_ranges is not None:
        key = xp.arange(spec.seq_kv, device=device(q)) - first[:, None]
        seen = seen | in_ranges(xp, operands.q_ranges, key)
    seen = is_own & seen
    cleared = (
        clear_padding(xp, x, x_kept) for x, x_kept in ((q, is_query), (k, is_key), (v, is_key))
    )
    q, k, v = (x[None, ...] for x in cleared)
    batch = FlashOperands(q, k, v, sinks, relative_bias=operands.relative_bias)
    return batch, seen, is_query, position, sequence
