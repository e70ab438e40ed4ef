"""The oracle: attention and its gradients written plainly, over any array-API library.

Everything is computed in one dtype, the caller's choice:

- float64 gives the reference that both implementations are checked against;
- the inputs' own dtype gives `lp`, the plain low-precision run that sets the error budget;
- float32 gives the ``"reference"`` implementation of `pallas_attn` and `torch_attn`. With
  `precision` "tf32" its products take the operands as tensor cores do, and it is that `lp` as well.

Memory is O(Sq · Skv). Source: Vaswani et al. 2017, eq. 1; gradients as in Dao et al. 2022
(FlashAttention), appendix B.2.
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace, device

from twin_attention.contract.dropout import dropout_weights
from twin_attention.contract.operands import (
    AppendOperands,
    BlockSparseOperands,
    DecodeOperands,
    FlashOperands,
    PagedOperands,
    PartialOperands,
    VarlenOperands,
)
from twin_attention.contract.spec import (
    WINDOW_UNLIMITED,
    AppendSpec,
    AttentionSpec,
    BlockSparseSpec,
    DecodeSpec,
    DilatedSpec,
    Dilation,
    PagedCache,
    PagedSpec,
    PartialSpec,
    VarlenSpec,
    Window,
)
from twin_attention.contract.terms import added_scores, gradients_of_terms

Array = Any

FLOAT8_MAX = 448.0  # the largest float8_e4m3fn


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
    position = _positions(xp, operands, spec)
    seen = visibility(xp, spec, device(operands.q))
    seen = _apply_tree(xp, operands, spec, seen)
    operands, seen, _ = _apply_segments(xp, operands, seen)
    added = added_scores(xp, operands, position, None, dtype)
    kept = _kept(xp, operands, spec, dtype, first)
    return _forward(xp, operands, spec, seen, dtype, added, kept)


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

    Gradients of terms that sum ds over keys take delta of out with `precision` "tf32",
    ``rowsum(dout ∘ out) - dlse``, as kernels do. The other one cancels there: the sum over all keys
    that a row sees would have no error of a product.

    Args:
        dout: gradient of out, [B, Sq, Hq, Dv].
        dlse: gradient of lse, [B, Hq, Sq], or None for zero.
        operands, spec, dtype, first: as in the forward.

    Returns:
        The gradient of each operand, in `dtype`.
    """
    xp = array_namespace(operands.q)
    seen = visibility(xp, spec, device(operands.q))
    seen = _apply_tree(xp, operands, spec, seen)
    operands, seen, is_query = _apply_segments(xp, operands, seen)
    if is_query is not None:
        dout = _clear_padding(xp, dout, is_query)
    position = _positions(xp, operands, spec)
    added = added_scores(xp, operands, position, None, dtype)
    kept = _kept(xp, operands, spec, dtype, first)
    return _backward(xp, dout, dlse, operands, spec, seen, dtype, added, position, kept)


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
    return _weights(xp, operands, spec, counters, dtype)


def _weights(
    xp: Any,
    operands: FlashOperands | VarlenOperands,
    spec: AttentionSpec,
    counters: Any,
    dtype: Any,
) -> Array | None:
    seed, rule = operands.dropout_seed, spec.dropout
    if seed is None or rule is None:
        return None
    return dropout_weights(xp, seed, counters, rule, dtype)


def _positions(xp: Any, operands: FlashOperands, spec: AttentionSpec) -> Array:
    """Return the key position of each query, [Sq]."""
    return xp.arange(spec.seq_q, device=device(operands.q)) + spec.diagonal


def _apply_tree(
    xp: Any, operands: FlashOperands, spec: AttentionSpec, seen: Array | None
) -> Array | None:
    """Return the mask [B, Sq, Skv] of the keys whose end is behind a query, of those in `seen` [Sq,
    Skv]. Without ends nothing changes.
    """
    if operands.kv_ends is None:
        return seen
    position = _positions(xp, operands, spec)
    return seen & _in_branch(xp, operands, spec, position[:, None])


def _in_branch(
    xp: Any, operands: FlashOperands | VarlenOperands, spec: AttentionSpec, position: Array
) -> Array:
    """Return the mask [..., Sq, Skv] of the keys whose branch queries at these positions are on.

    A query's own key is the last in the window, so that `causal` is a right side of 0. Depths count
    where the window does.

    Args:
        xp, operands, spec: array namespace, operands with ends, and problem.
        position: key positions of the queries, [Sq, 1].
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


def _apply_segments(
    xp: Any, operands: FlashOperands, seen: Array | None
) -> tuple[FlashOperands, Array | None, Array | None]:
    """Return operands without their padding, the mask [B, Sq, Skv] of the keys that each query sees
    of those in `seen` [Sq, Skv] or [B, Sq, Skv], and which queries are no padding, [B, Sq]. Without
    segment ids nothing changes, and the last is None.
    """
    q, k, v, _, q_ids, kv_ids, *_ = operands
    if q_ids is None or kv_ids is None:
        return operands, seen, None
    is_query, is_key = q_ids >= 0, kv_ids >= 0
    same = (q_ids[:, :, None] == kv_ids[:, None, :]) & is_query[:, :, None]
    seen = same if seen is None else same & seen
    q, k, v = (_clear_padding(xp, x, kept) for x, kept in ((q, is_query), (k, is_key), (v, is_key)))
    return operands._replace(q=q, k=k, v=v), seen, is_query


def varlen_forward(operands: VarlenOperands, spec: VarlenSpec, dtype: Any) -> tuple[Array, ...]:
    """Attention output and log-sum-exp of packed sequences.

    Nothing but values depends on the offsets, so that it can be traced. Memory is O(Tq · Tkv).

    Args:
        operands: those of the call.
        spec: semantics; its shapes are those of the operands.
        dtype: dtype of every operation.

    Returns:
        out [Tq, Hq, Dv] and lse [Hq, Tq] (natural log), both in `dtype`. A row that sees no key,
        such as padding, gives 0, and -inf or its head's sink. Where the problem asks for it also
        each row's largest score [Hq, Tq].
    """
    xp = array_namespace(operands.q)
    batch, seen, _, position, sequence = _as_one_sequence(xp, operands, spec)
    added = added_scores(xp, operands, position, sequence, dtype)
    kept = _kept_of_packed(xp, operands, spec, dtype, sequence, position)
    results = _forward(xp, batch, spec, seen, dtype, added, kept)
    return tuple(x[0, ...] for x in results)


def varlen_backward(
    dout: Array, dlse: Array | None, operands: VarlenOperands, spec: VarlenSpec, dtype: Any
) -> VarlenOperands[Array]:
    """Compute the gradients of `varlen_forward`; offsets have none.

    Args:
        dout: gradient of out, [Tq, Hq, Dv]; that of padding never matters.
        dlse: gradient of lse, [Hq, Tq], or None for zero.
        operands, spec, dtype: as in the forward.

    Returns:
        The gradient of each operand, in `dtype`; 0 for padding.
    """
    xp = array_namespace(operands.q)
    batch, seen, is_query, position, sequence = _as_one_sequence(xp, operands, spec)
    added = added_scores(xp, operands, position, sequence, dtype)
    dout = _clear_padding(xp, dout, is_query)[None, ...]
    dlse = None if dlse is None else dlse[None, ...]
    kept = _kept_of_packed(xp, operands, spec, dtype, sequence, position)
    found = _backward(xp, dout, dlse, batch, spec, seen, dtype, added, position, kept)
    return VarlenOperands(
        found.q[0, ...], found.k[0, ...], found.v[0, ...], None, None, found.sinks,
        relative_bias=found.relative_bias,
    )  # fmt: skip


def _kept_of_packed(
    xp: Any,
    operands: VarlenOperands,
    spec: VarlenSpec,
    dtype: Any,
    sequence: Array,
    position: Array,
) -> Array | None:
    """Return the weights of dropout [Hq, Tq, Tkv], which hold within sequences; None without it.

    Sequences count as batch elements, and their queries and keys from their first ones.
    """
    if spec.dropout is None:
        return None
    on, offsets = device(operands.q), (operands.cu_seqlens_q, operands.cu_seqlens_kv)
    first_q, first_kv = (xp.take(x, sequence, axis=0) for x in offsets)
    head = xp.arange(spec.heads_q, device=on)[:, None, None]
    query = xp.arange(spec.seq_q, device=on) - first_q
    key = xp.arange(spec.seq_kv, device=on) - first_kv[:, None]
    # Pairs of different sequences are hidden: their numbers may be anything.
    query, key = (xp.where(x < 0, xp.zeros_like(x), x) for x in (query, key))
    counters = sequence[:, None], head, query[:, None], key
    return _weights(xp, operands, spec, counters, dtype)


def _as_one_sequence(
    xp: Any, operands: VarlenOperands, spec: VarlenSpec
) -> tuple[FlashOperands, Array, Array, Array, Array]:
    """Return packed sequences as a batch of one, the mask [Tq, Tkv] of the keys that each query
    sees, which of the queries are no padding, [Tq], their positions, counted from the first of all
    keys, and their sequences, the first one's for padding.
    """
    q, k, v, cu_q, cu_kv, sinks, *_ = operands
    sequence_q, sequence_kv = (
        _sequence_of_tokens(xp, offsets, x.shape[0]) for offsets, x in ((cu_q, q), (cu_kv, k))
    )
    is_query, is_key = (x < spec.num_sequences for x in (sequence_q, sequence_kv))
    seen = is_query[:, None] & (sequence_q[:, None] == sequence_kv[None, :])
    # The last query of a sequence stands at its last key.
    following = xp.where(is_query, sequence_q + 1, sequence_q)
    diagonal = xp.take(cu_kv - cu_q, following, axis=0)
    position = xp.arange(spec.seq_q, device=device(q)) + diagonal
    seen = seen & _in_window(xp, position, spec)
    sequence = xp.where(is_query, sequence_q, 0 * sequence_q)
    if operands.kv_ends is not None:
        # Ends are counted from the sequence's first key.
        first = xp.take(cu_kv, sequence, axis=0)
        seen = seen & _in_branch(xp, operands, spec, (position - first)[:, None])
    cleared = (
        _clear_padding(xp, x, x_kept) for x, x_kept in ((q, is_query), (k, is_key), (v, is_key))
    )
    q, k, v = (x[None, ...] for x in cleared)
    batch = FlashOperands(q, k, v, sinks, relative_bias=operands.relative_bias)
    return batch, seen, is_query, position, sequence


def _sequence_of_tokens(xp: Any, offsets: Array, tokens: int) -> Array:
    """Return the sequence that each token belongs to, [T]; their number for padding."""
    token = xp.arange(tokens, device=device(offsets))
    begun = offsets[None, 1:] <= token[:, None]
    return xp.sum(xp.astype(begun, offsets.dtype), axis=1, dtype=offsets.dtype)


def block_sparse_forward(
    operands: BlockSparseOperands, spec: BlockSparseSpec, dtype: Any
) -> tuple[Array, ...]:
    """Attention output and log-sum-exp over the tiles that a block mask keeps.

    The mask is that of the tiles of keys which each tile of queries keeps.

    Args:
        operands, spec, dtype: as `attention_forward` takes them.

    Returns:
        out and lse, as `attention_forward` returns them.
    """
    xp = array_namespace(operands.q)
    return _forward(xp, operands, spec, _kept_keys(xp, operands, spec), dtype)


def block_sparse_backward(
    dout: Array,
    dlse: Array | None,
    operands: BlockSparseOperands,
    spec: BlockSparseSpec,
    dtype: Any,
) -> BlockSparseOperands[Array]:
    """Compute the gradients of `block_sparse_forward`; lists have none.

    Args:
        dout, dlse, operands, spec, dtype: as `attention_backward` takes them.

    Returns:
        The gradient of each operand, in `dtype`.
    """
    xp = array_namespace(operands.q)
    seen = _kept_keys(xp, operands, spec)
    dq, dk, dv, dsinks, *_ = _backward(xp, dout, dlse, operands, spec, seen, dtype)
    return BlockSparseOperands(dq, dk, dv, None, None, None, None, dsinks)


def _kept_keys(xp: Any, operands: BlockSparseOperands, spec: BlockSparseSpec) -> Array:
    """Return the mask [Bm, Hm, Sq, Skv] of the keys in the window and in tiles that are kept."""
    counts, tiles, on = operands.kv_counts, operands.kv_tiles, device(operands.q)
    listed = xp.arange(tiles.shape[-1], device=on) < counts[..., None]
    tile = xp.arange(operands.q_counts.shape[-1], device=on)
    kept = xp.any((tiles[..., None] == tile) & listed[..., None], axis=-2)
    query = xp.arange(spec.seq_q, device=on) // spec.tile_q
    key = xp.arange(spec.seq_kv, device=on) // spec.tile_kv
    kept = xp.take(xp.take(kept, query, axis=2), key, axis=3)
    seen = visibility(xp, spec, on)
    return kept if seen is None else kept & seen


def dilated_forward(operands: FlashOperands, spec: DilatedSpec, dtype: Any) -> tuple[Array, Array]:
    """Attention output and log-sum-exp within dilated segments, merged by log-sum-exp.

    Args:
        operands, spec, dtype: as `attention_forward` takes them.

    Returns:
        out and lse, as `attention_forward` returns them. A token that no pair keeps sees no key.

    Source: Ding et al. 2023 (LongNet), sections 2.2 and 2.3.
    """
    xp = array_namespace(operands.q)
    return merge(*_dilated_states(xp, operands, spec, dtype), dtype)


def dilated_backward(
    dout: Array, dlse: Array | None, operands: FlashOperands, spec: DilatedSpec, dtype: Any
) -> FlashOperands[Array]:
    """Compute the gradients of `dilated_forward`.

    Args:
        dout, dlse, operands, spec, dtype: as `attention_backward` takes them.

    Returns:
        The gradient of each operand, in `dtype`.
    """
    xp = array_namespace(operands.q)
    states = _dilated_states(xp, operands, spec, dtype)
    of_states = zip(*merge_backward(dout, dlse, *states, dtype), strict=True)
    dq, dk, dv = (xp.zeros_like(x, dtype=dtype) for x in (operands.q, operands.k, operands.v))
    for dilation, (dout, dlse) in zip(spec.dilations, of_states, strict=True):
        seen = kept_tokens(xp, spec, dilation, device(operands.q))
        found = _backward(xp, dout, dlse, operands, spec, seen, dtype)
        dq, dk, dv = dq + found.q, dk + found.k, dv + found.v
    return FlashOperands(dq, dk, dv)


def _dilated_states(
    xp: Any, operands: FlashOperands, spec: DilatedSpec, dtype: Any
) -> tuple[Array, Array]:
    """Return the outs [N, B, S, Hq, Dv] and lses [N, B, Hq, S] of each pair by itself."""
    states = [
        _forward(xp, operands, spec, kept_tokens(xp, spec, dilation, device(operands.q)), dtype)
        for dilation in spec.dilations
    ]
    outs, lses = zip(*states, strict=True)
    return xp.stack(outs), xp.stack(lses)


def kept_tokens(xp: Any, spec: DilatedSpec, dilation: Dilation, on: Any) -> Array:
    """Return the mask [1, Hq, S, S] of the keys that each query sees by one pair."""
    position = xp.arange(spec.seq_q, device=on)
    segment = position // dilation.segment_length
    head = xp.arange(spec.heads_q, device=on)[:, None] // spec.group_size
    kept = position % dilation.rate == head % dilation.rate  # [Hq, S]
    seen = kept[:, :, None] & kept[:, None, :] & (segment[:, None] == segment)
    window = visibility(xp, spec, on)
    return (seen if window is None else seen & window)[None, ...]


def partial_forward(
    operands: PartialOperands, out: Array, lse: Array, spec: PartialSpec, dtype: Any
) -> tuple[Array, Array]:
    """Attention output and log-sum-exp over the keys of a result and over those of the operands.

    Args:
        operands: those of the call.
        out, lse: the result over other keys, [B, Sq, Hq, Dv] and [B, Hq, Sq].
        spec: semantics; its shapes are those of the operands.
        dtype: dtype of every operation.

    Returns:
        out and lse, both in `dtype`.
    """
    xp = array_namespace(operands.q)
    part = _forward(xp, operands, spec, _seen_in_intervals(xp, operands, spec), dtype)
    outs, lses = (xp.stack([xp.astype(x, dtype), y]) for x, y in zip((out, lse), part, strict=True))
    return merge(outs, lses, dtype)


def partial_backward(
    dout: Array, lse: Array, delta: Array, operands: PartialOperands, spec: PartialSpec, dtype: Any
) -> tuple[Array, Array, Array]:
    """Compute the gradients of q, k and v through the keys of the operands.

    Args:
        dout: gradient of out, [B, Sq, Hq, Dv].
        lse: over all keys, [B, Hq, Sq].
        delta: ``rowsum(dout ∘ out) - dlse``, of the result over all keys, [B, Hq, Sq].
        operands, spec, dtype: as in the forward.

    Returns:
        dq, dk and dv, in `dtype`.
    """
    xp = array_namespace(operands.q)
    q, k, v = _by_kv_head(xp, operands, spec, dtype)
    dout = _rows(xp, dout, spec, dtype)
    s, dcap = _scores(xp, q, k, spec, _seen_in_intervals(xp, operands, spec))
    rows = (spec.batch, spec.heads_kv, spec.group_size * spec.seq_q, 1)
    lse, delta = (xp.reshape(xp.astype(x, dtype), rows) for x in (lse, delta))
    p = xp.exp(s - xp.where(lse == -xp.inf, xp.full_like(lse, float("inf")), lse))
    dp = _product(xp, dout, xp.matrix_transpose(v), spec)
    ds = p * (dp - delta)
    if dcap is not None:
        ds = ds * dcap
    dq = _product(xp, ds, k, spec) * spec.scale
    dk = _product(xp, xp.matrix_transpose(ds), q, spec) * spec.scale
    dv = _product(xp, xp.matrix_transpose(p), dout, spec)
    return _to_heads(xp, dq, spec), *(xp.permute_dims(x, (0, 2, 1, 3)) for x in (dk, dv))


def _seen_in_intervals(xp: Any, operands: PartialOperands, spec: PartialSpec) -> Array:
    """Return the mask [Sq, Skv] of the keys in each query's interval."""
    key = xp.arange(spec.seq_kv, device=device(operands.q))
    return (key >= operands.key_begins[:, None]) & (key < operands.key_ends[:, None])


# Every other attention is dense.
_FORWARD = {
    VarlenSpec: varlen_forward,
    BlockSparseSpec: block_sparse_forward,
    DilatedSpec: dilated_forward,
}
_BACKWARD = {
    VarlenSpec: varlen_backward,
    BlockSparseSpec: block_sparse_backward,
    DilatedSpec: dilated_backward,
}


def forward_of(spec: AttentionSpec) -> Any:
    """Return the forward of a problem: `attention_forward`, or that of its kind."""
    return _FORWARD.get(type(spec), attention_forward)


def backward_of(spec: AttentionSpec) -> Any:
    """Return the backward of a problem: `attention_backward`, or that of its kind."""
    return _BACKWARD.get(type(spec), attention_backward)


def _clear_padding(xp: Any, x: Array, kept: Array) -> Array:
    """Return tokens [..., S, H, D] with padding, which may hold NaN, at 0."""
    return xp.where(kept[..., None, None], x, xp.zeros_like(x))


def _forward(
    xp: Any,
    operands: FlashOperands | BlockSparseOperands | PartialOperands,
    spec: AttentionSpec,
    seen: Array | None,
    dtype: Any,
    added: Array | None = None,
    kept: Array | None = None,
) -> tuple[Array, ...]:
    q, k, v = _by_kv_head(xp, operands, spec, dtype)
    s, _ = _scores(xp, q, k, spec, seen, added)
    p, _, lse = _normalize(xp, s, _of_rows(xp, operands.sinks, spec, spec.seq_q, dtype))
    if kept is not None:
        p = p * xp.reshape(kept, p.shape)
    out = _to_heads(xp, _product(xp, p, v, spec), spec)
    of_rows = [lse, _largest(xp, s)] if spec.row_max else [lse]
    shape = (spec.batch, spec.heads_q, spec.seq_q)
    return out, *(xp.reshape(x, shape) for x in of_rows)


def _backward(
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
    q, k, v = _by_kv_head(xp, operands, spec, dtype)
    dout = _rows(xp, dout, spec, dtype)
    s, dcap = _scores(xp, q, k, spec, seen, added)
    sink = _of_rows(xp, operands.sinks, spec, spec.seq_q, dtype)
    p, p_sink, lse = _normalize(xp, s, sink)
    dp = _product(xp, dout, xp.matrix_transpose(v), spec)
    kept_p = p
    if kept is not None:
        kept = xp.reshape(kept, p.shape)
        kept_p, dp = p * kept, dp * kept
    delta = xp.sum(p * dp, axis=-1, keepdims=True)
    if dlse is not None:
        lse, dlse = (xp.reshape(xp.astype(x, dtype), delta.shape) for x in (lse, dlse))
        delta = delta - xp.where(lse == -xp.inf, xp.zeros_like(dlse), dlse)

    def ds_of(delta: Array) -> Array:
        ds = p * (dp - delta)
        return ds if dcap is None else ds * dcap

    ds = ds_of(delta)
    dq = _product(xp, ds, k, spec) * spec.scale
    dk = _product(xp, xp.matrix_transpose(ds), q, spec) * spec.scale
    dv = _product(xp, xp.matrix_transpose(kept_p), dout, spec)
    dsinks = None
    if p_sink is not None:
        dsink = xp.reshape(-p_sink * delta, (spec.batch, spec.heads_q, spec.seq_q))
        dsinks = xp.sum(dsink, axis=(0, 2))
    of_terms = {}
    if isinstance(operands, FlashOperands) and spec.terms:
        summed = ds
        if _takes_tf32(xp, dp, spec):  # p is rounded in out, so that no sum over keys cancels
            out = _product(xp, kept_p, v, spec)
            of_out = xp.sum(_as_tf32(xp, dout) * out, axis=-1, keepdims=True)
            summed = ds_of(delta + of_out - xp.sum(p * dp, axis=-1, keepdims=True))
        shape = (spec.batch, spec.heads_q, spec.seq_q, spec.seq_kv)
        of_pairs = (xp.reshape(x, shape) for x in (ds, summed))
        of_terms = gradients_of_terms(xp, operands, position, *of_pairs)
    return FlashOperands(
        _to_heads(xp, dq, spec),
        xp.permute_dims(dk, (0, 2, 1, 3)),
        xp.permute_dims(dv, (0, 2, 1, 3)),
        dsinks,
        **of_terms,
    )


def _product(xp: Any, a: Array, b: Array, spec: AttentionSpec) -> Array:
    """Multiply matrices; with `precision` "tf32" float32 operands are rounded to TF32."""
    if _takes_tf32(xp, a, spec):
        a, b = (_as_tf32(xp, x) for x in (a, b))
    return xp.matmul(a, b)


def _takes_tf32(xp: Any, x: Array, spec: AttentionSpec) -> bool:
    return spec.precision == "tf32" and x.dtype == xp.float32


def _as_tf32(xp: Any, x: Array) -> Array:
    """Round float32 numbers to 10 bits of mantissa: to nearest, ties away from 0."""
    bits = (x.view(xp.int32) + (1 << 12)) & -(1 << 13)
    return xp.where(xp.isfinite(x), bits.view(xp.float32), x)


def visibility(xp: Any, spec: AttentionSpec, on: Any) -> Array | None:
    """Return the mask [Sq, Skv] of the keys each query sees, on device `on`; None for all."""
    if spec.position_window == Window():
        return None
    position = xp.arange(spec.seq_q, device=on) + spec.diagonal
    return _in_window(xp, position, spec)


def _in_window(xp: Any, position: Array, spec: AttentionSpec) -> Array:
    """Return the mask [Sq, Skv] of the keys in the window of queries at these positions, [Sq]."""
    window = spec.bounded_window  # wider ones see no more, and may not fit an index dtype
    position, key = position[:, None], xp.arange(spec.seq_kv, device=device(position))[None, :]
    seen = xp.ones((spec.seq_q, spec.seq_kv), dtype=xp.bool, device=device(position))
    if window.left is not None:
        seen = seen & (key >= position - window.left)
    if window.right is not None:
        seen = seen & (key <= position + window.right)
    return seen


def _by_kv_head(
    xp: Any,
    operands: FlashOperands | BlockSparseOperands | PartialOperands,
    spec: AttentionSpec,
    dtype: Any,
):
    """Return q as [B, Hkv, group · Sq, D], so that no key is copied; k, v as [B, Hkv, Skv, D]."""
    k, v = (xp.permute_dims(xp.astype(x, dtype), (0, 2, 1, 3)) for x in (operands.k, operands.v))
    return _rows(xp, operands.q, spec, dtype), k, v


def _rows(xp: Any, x: Array, spec: AttentionSpec, dtype: Any) -> Array:
    """Turn [B, Sq, Hq, D] into [B, Hkv, group · Sq, D]."""
    rows = spec.group_size * spec.seq_q
    x = xp.permute_dims(xp.astype(x, dtype), (0, 2, 1, 3))
    return xp.reshape(x, (spec.batch, spec.heads_kv, rows, x.shape[-1]))


def _to_heads(xp: Any, rows: Array, spec: AttentionSpec) -> Array:
    """Undo `_rows`."""
    x = xp.reshape(rows, (spec.batch, spec.heads_q, spec.seq_q, rows.shape[-1]))
    return xp.permute_dims(x, (0, 2, 1, 3))


def _scores(
    xp: Any,
    q: Array,
    k: Array,
    spec: AttentionSpec,
    seen: Array | None,
    added: Array | None = None,
) -> tuple[Array, Array | None]:
    """Compute scores after scale, terms, softcap and mask, and the derivative of the softcap.

    `added` is what `added_scores` returns.
    """
    s = _product(xp, q, xp.matrix_transpose(k), spec) * spec.scale
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
    return s, dcap


def _of_rows(
    xp: Any, sinks: Array | None, spec: AttentionSpec | DecodeSpec, rows: int, dtype: Any
) -> Array | None:
    """Return the sink of each row, [Hkv, group · rows, 1]; None where there are no sinks."""
    if sinks is None:
        return None
    heads = (spec.heads_kv, spec.group_size)
    x = xp.broadcast_to(xp.reshape(xp.astype(sinks, dtype), (*heads, 1)), (*heads, rows))
    return xp.reshape(x, (spec.heads_kv, spec.group_size * rows, 1))


def _normalize(xp: Any, s: Array, sink: Array | None = None) -> tuple[Array, Array | None, Array]:
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
    m = _largest(xp, s)
    if sink is not None:
        m = xp.maximum(m, sink)
    return xp.where(xp.isinf(m), xp.zeros_like(m), m)


def _largest(xp: Any, s: Array) -> Array:
    """Return the largest score of each row, [..., 1]; -inf where there is none."""
    if s.shape[-1] == 0:
        return xp.full_like(xp.sum(s, axis=-1, keepdims=True), float("-inf"))
    return xp.max(s, axis=-1, keepdims=True)


def paged_forward(operands: DecodeOperands, spec: DecodeSpec, dtype: Any) -> tuple[Array, Array]:
    """Attention of new tokens over a paged cache, and log-sum-exp.

    Args:
        operands: those of a decode, q with its T.
        spec: semantics; its shapes are those of the operands.
        dtype: dtype of every operation.

    Returns:
        out [B, T, Hq, Dv] and lse [B, Hq, T] (natural log), both in `dtype`. A token that sees no
        key gives 0, and -inf or its head's sink.
    """
    q, k_pages, v_pages, block_tables, seq_lens, sinks, k_scale, v_scale, tree_ends = operands
    xp = array_namespace(q, k_pages, v_pages)
    cache, group = spec.cache, spec.group_size
    length = xp.clip(seq_lens, 0, cache.capacity if cache.num_pages else 0)[:, None]
    key = xp.arange(cache.capacity, dtype=length.dtype, device=device(q))[None, :]
    exists = key < length  # [B, keys]
    k = _gather(xp, k_pages, block_tables, exists, k_scale, cache, dtype)
    v = _gather(xp, v_pages, block_tables, exists, v_scale, cache, dtype)
    rows = (spec.batch, spec.heads_kv, group * spec.tokens)
    q = xp.reshape(xp.permute_dims(xp.astype(q, dtype), (0, 2, 1, 3)), (*rows, spec.head_dim))

    s = xp.matmul(q, xp.matrix_transpose(k)) * spec.scale
    if spec.softcap is not None:
        s = spec.softcap * xp.tanh(s / spec.softcap)
    token = xp.arange(spec.tokens, dtype=length.dtype, device=device(q))[None, :]
    position = (length - spec.tokens + token)[:, :, None]
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

    p, _, lse = _normalize(xp, s, _of_rows(xp, sinks, spec, spec.tokens, dtype))
    heads = (spec.batch, spec.heads_q, spec.tokens)
    out = xp.reshape(xp.matmul(p, v), (*heads, spec.head_dim_v))
    return xp.permute_dims(out, (0, 2, 1, 3)), xp.reshape(lse, heads)


def ragged_forward(operands: PagedOperands, spec: PagedSpec, dtype: Any) -> tuple[Array, Array]:
    """Attention of any number of new tokens a sequence over a paged cache, and log-sum-exp.

    Nothing but values depends on offsets, lengths and tables, so that it can be traced. All tokens
    meet the keys of all sequences: memory is O(Tq · B · capacity).

    Args:
        operands: those of the call.
        spec: semantics; its shapes are those of the operands.
        dtype: dtype of every operation.

    Returns:
        out [Tq, Hq, Dv] and lse [Hq, Tq] (natural log), both in `dtype`. A token that sees no key,
        such as padding, gives 0, and -inf or its head's sink.
    """
    q, k_pages, v_pages, block_tables, seq_lens, offsets, *optional = operands
    sinks, k_scale, v_scale, tree_ends = optional
    xp = array_namespace(q, k_pages, v_pages)
    cache, on = spec.cache, device(q)
    length = xp.clip(seq_lens, 0, cache.capacity if cache.num_pages else 0)
    key = xp.arange(cache.capacity, dtype=length.dtype, device=on)[None, :]
    exists = key < length[:, None]  # [B, capacity]
    sequence = _sequence_of_tokens(xp, offsets, spec.tokens)
    is_token = sequence < spec.batch
    # The last token of a sequence stands at its last key.
    own = xp.where(is_token, sequence, xp.zeros_like(sequence))
    token = xp.arange(spec.tokens, dtype=offsets.dtype, device=on)
    position = xp.take(length - offsets[1:], own, axis=0) + token
    seen = is_token[:, None] & (key <= position[:, None])  # [Tq, capacity]
    if spec.window_left is not None:
        seen = seen & (key >= position[:, None] - min(spec.window_left, cache.capacity))
    if tree_ends is not None:
        begins_later = xp.arange(spec.batch, device=on) > 0  # the first offset counts as 0
        first = xp.where(begins_later, offsets[:-1], xp.zeros_like(offsets[:-1]))
        new = key - (length - (offsets[1:] - first))[:, None]  # [B, capacity]
        end = _ends_of_keys(xp, tree_ends, first[:, None] + new, exists & (new >= 0))
        seen = seen & ((token - xp.take(first, own, axis=0))[:, None] < xp.take(end, own, axis=0))
    of_sequence = sequence[:, None] == xp.arange(spec.batch, dtype=sequence.dtype, device=on)
    seen = of_sequence[:, :, None] & seen[:, None, :]  # [Tq, B, capacity]

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

    def keys(pages: Array, scale: Array | None) -> Array:
        x = _gather(xp, pages, block_tables, exists, scale, cache, dtype)
        x = xp.permute_dims(x, (0, 2, 1, 3))
        return xp.reshape(x, (1, one.seq_kv, cache.heads, x.shape[-1]))

    q = _clear_padding(xp, q, is_token)[None, ...]
    batch = FlashOperands(q, keys(k_pages, k_scale), keys(v_pages, v_scale), sinks)
    out, lse = _forward(xp, batch, one, xp.reshape(seen, (one.seq_q, one.seq_kv)), dtype)
    return out[0, ...], lse[0, ...]


def _ends_of_keys(xp: Any, tree_ends: Array, token: Array, is_new: Array) -> Array:
    """Return the end of the tokens that see each key; no token is past that of an older key.

    Args:
        tree_ends: of the new tokens, in any shape.
        token: which of them a key is, counted over all sequences.
        is_new: the key is one.
    """
    size = math.prod(tree_ends.shape)
    token = xp.where(is_new & (token >= 0) & (token < size), token, xp.full_like(token, size))
    none = xp.full((1,), WINDOW_UNLIMITED, dtype=tree_ends.dtype, device=device(tree_ends))
    ends = xp.concat([xp.reshape(tree_ends, (-1,)), none])
    return xp.reshape(xp.take(ends, xp.reshape(token, (-1,)), axis=0), token.shape)


def positions_of_new(operands: AppendOperands, spec: AppendSpec) -> tuple[Array, Array, Array]:
    """Return where new tokens go: position, sequence, and whether they are tokens.

    Each is [B, T], or [Tq] of packed ones. Padding counts as a token at position 0 of sequence 0.
    """
    lengths, offsets = operands.seq_lens, operands.cu_seqlens_q
    xp, on = array_namespace(lengths), device(lengths)
    token = xp.arange(spec.tokens, dtype=lengths.dtype, device=on)
    if offsets is None:
        position = lengths[:, None] - spec.tokens + token
        sequence = xp.arange(spec.batch, dtype=lengths.dtype, device=on)[:, None]
        sequence = xp.broadcast_to(sequence, position.shape)
        return position, sequence, xp.ones_like(position, dtype=xp.bool)
    sequence = _sequence_of_tokens(xp, offsets, spec.tokens)
    is_token = sequence < spec.batch
    sequence = xp.where(is_token, sequence, xp.zeros_like(sequence))
    if spec.batch == 0:
        return xp.zeros_like(token), sequence, is_token
    position = xp.take(lengths - offsets[1:], sequence, axis=0) + token
    return xp.where(is_token, position, xp.zeros_like(position)), sequence, is_token


def rotate(
    x: Array, position: Array, cos: Array, sin: Array, interleaved: bool, dtype: Any
) -> Array:
    """Rotate pairs of dimensions by the angles of positions (rotary embedding).

    With the angle a of a pair (x, y): ``x cos a - y sin a`` and ``y cos a + x sin a``.

    Args:
        x: [..., H, D].
        position: [...].
        cos, sin: [positions, R / 2]. Dimensions of `x` from R on are not rotated.
        interleaved: pair i is dimensions 2i and 2i + 1, not i and i + R / 2.
        dtype: dtype of every operation.

    Returns:
        `x` rotated, in `dtype`. Where cos and sin have no row of a position, what is rotated is
        NaN.

    Source: Su et al. 2021 (RoFormer).
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
    """Return the new keys, and the queries if there are any, rotated at their positions.

    Queries of padding are 0. Without rotation, k_new and None.
    """
    k_new, q = operands.k_new, operands.q
    cos, sin = operands.rotary_cos, operands.rotary_sin
    if cos is None:
        return k_new, None
    xp = array_namespace(k_new)
    position, _, is_token = positions_of_new(operands, spec)
    k_new = rotate(k_new, position, cos, sin, spec.interleaved, dtype)
    if q is not None:
        q = _clear_padding(xp, q, is_token) if spec.packed else q
        q = rotate(q, position, cos, sin, spec.interleaved, dtype)
    return k_new, q


def merge(outs: Array, lses: Array, dtype: Any) -> tuple[Array, Array]:
    """Attention over the union of disjoint sets of keys, from the attention over each.

    Args:
        outs: [N, B, S, H, Dv].
        lses: [N, B, H, S], natural log.
        dtype: dtype of every operation.

    Returns:
        out [B, S, H, Dv] and lse [B, H, S], both in `dtype`. A row that saw no key in any part
        gives 0 and -inf.
    """
    xp = array_namespace(outs, lses)
    weight, outs, lse = _merge_weights(xp, outs, lses, dtype)
    return xp.sum(weight * outs, axis=0), lse


def merge_backward(
    dout: Array, dlse: Array | None, outs: Array, lses: Array, dtype: Any
) -> tuple[Array, Array]:
    """Compute the gradients of `merge`.

    With ``w = softmax(lses)`` and ``dp_n = dout · out_n``: ``d out_n = w_n dout`` and
    ``d lse_n = w_n (dp_n - Σ_m w_m dp_m + dlse)``. A part that saw no key has gradients 0.

    Args:
        dout: gradient of out, [B, S, H, Dv].
        dlse: gradient of lse, [B, H, S], or None for zero.
        outs, lses, dtype: as in the forward.

    Returns:
        The gradients of outs and lses, both in `dtype`.
    """
    xp = array_namespace(outs, lses)
    weight, outs, _ = _merge_weights(xp, outs, lses, dtype)
    dout = xp.astype(dout, dtype)
    dp = xp.sum(dout * outs, axis=-1)
    delta = xp.sum(weight[..., 0] * dp, axis=0)
    if dlse is not None:
        delta = delta - xp.permute_dims(xp.astype(dlse, dtype), (0, 2, 1))
    dlses = weight[..., 0] * (dp - delta)
    return weight * dout, xp.permute_dims(dlses, (0, 1, 3, 2))


def _merge_weights(xp: Any, outs: Array, lses: Array, dtype: Any) -> tuple[Array, Array, Array]:
    """Return the parts' weights [N, B, S, H, 1], their outs with 0 where it is 0, and lse."""
    outs, lses = xp.astype(outs, dtype), xp.astype(lses, dtype)
    lses = xp.where(lses == float("inf"), xp.full_like(lses, float("nan")), lses)
    weight, _, lse = _normalize(xp, xp.permute_dims(lses, (1, 2, 3, 0)))
    weight = xp.permute_dims(weight, (3, 0, 2, 1))[..., None]
    # A part that saw nothing has weight 0 and may hold anything.
    return weight, xp.where(weight > 0, outs, xp.zeros_like(outs)), lse[..., 0]


def quantize(x: Array, scale: Array, cache: PagedCache, dtype: Any) -> Array:
    """Return `x` [..., Hkv, D] as a quantised cache stores it: ``x / scale``, rounded, clamped.

    A NaN becomes 0 in int8 and stays NaN in float8_e4m3fn.

    Args:
        scale: [] or [Hkv] float32.
        dtype: the cache's dtype, in the library of `x`.
    """
    xp = array_namespace(x)
    x = xp.astype(x, xp.float32) / _of_heads(xp, scale)
    if cache.dtype == "int8":
        x = xp.where(xp.isnan(x), xp.zeros_like(x), x)
        return xp.astype(xp.clip(xp.round(x), -127, 127), dtype)
    return xp.astype(xp.clip(x, -FLOAT8_MAX, FLOAT8_MAX), dtype)


def _of_heads(xp: Any, scale: Array) -> Array:
    """Return a scale as a factor of [..., Hkv, D]."""
    return xp.reshape(scale, (*scale.shape, 1)) if scale.shape else scale


def _gather(
    xp: Any,
    pages: Array,
    block_tables: Array,
    exists: Array,
    scale: Array | None,
    cache: PagedCache,
    dtype: Any,
) -> Array:
    """Return the keys of each sequence, [B, Hkv, capacity, D]; 0 where there is none."""
    batch, size = block_tables.shape[0], pages.shape[-1]
    if cache.num_pages == 0:
        shape = (batch, cache.heads, cache.capacity, size)
        return xp.zeros(shape, dtype=dtype, device=device(pages))
    first = xp.reshape(exists, (batch, cache.max_pages, cache.page_size))[:, :, 0]
    ids = xp.where(first, block_tables, xp.zeros_like(block_tables))
    ids = xp.clip(ids, 0, cache.num_pages - 1)
    x = xp.take(pages, xp.reshape(ids, (-1,)), axis=0)
    x = xp.reshape(x, (batch, cache.capacity, cache.heads, size))
    x = xp.astype(x, dtype)
    x = xp.where(exists[:, :, None, None], x, xp.zeros_like(x))
    if scale is not None:
        x = x * xp.astype(_of_heads(xp, scale), dtype)
    return xp.permute_dims(x, (0, 2, 1, 3))
