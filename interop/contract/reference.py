"""The oracle: attention and its gradients written plainly, over any array-API library.

Everything is computed in one dtype, the caller's choice:

- float64 gives the reference that both implementations are held to;
- the inputs' own dtype gives `lp`, the plain low-precision run that sets the error budget;
- float32 gives the ``"reference"`` implementation of `pallas_attn` and `torch_attn`.

Memory is O(Sq · Skv). Source: Vaswani et al. 2017, eq. 1; gradients as in Dao et al. 2022
(FlashAttention), appendix B.2.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device

from interop.contract.spec import AttentionSpec

Array = Any


def attention_forward(
    q: Array, k: Array, v: Array, spec: AttentionSpec, dtype: Any
) -> tuple[Array, Array]:
    """Attention output and log-sum-exp.

    Args:
        q: [B, Sq, Hq, D].
        k: [B, Skv, Hkv, D].
        v: [B, Skv, Hkv, Dv].
        spec: semantics; its shapes are those of q, k, v.
        dtype: dtype of every operation.

    Returns:
        out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] (natural log), both in `dtype`. A row that
        sees no key gives 0 and -inf.
    """
    xp = array_namespace(q, k, v)
    q, k, v = _by_kv_head(xp, (q, k, v), spec, dtype)
    p, lse, _ = _softmax(xp, q, k, spec)
    out = xp.matmul(p, v)
    return _to_heads(xp, out, spec), xp.reshape(lse, (spec.batch, spec.heads_q, spec.seq_q))


def attention_backward(
    dout: Array,
    dlse: Array | None,
    q: Array,
    k: Array,
    v: Array,
    spec: AttentionSpec,
    dtype: Any,
) -> tuple[Array, Array, Array]:
    """Gradients of `attention_forward`.

    With ``dp = dout · vᵀ`` and ``delta = rowsum(p ∘ dp) - dlse``:
    ``ds = p ∘ (dp - delta)``, ``dq = scale · ds k``, ``dk = scale · dsᵀ q``, ``dv = pᵀ dout``.

    Args:
        dout: gradient of out, [B, Sq, Hq, Dv].
        dlse: gradient of lse, [B, Hq, Sq], or None for zero.
        q, k, v, spec, dtype: as in the forward.

    Returns:
        dq, dk, dv, shaped as q, k, v, in `dtype`.
    """
    xp = array_namespace(q, k, v)
    q, k, v = _by_kv_head(xp, (q, k, v), spec, dtype)
    dout = _rows(xp, dout, spec, dtype)
    p, _, dcap = _softmax(xp, q, k, spec)
    dp = xp.matmul(dout, xp.matrix_transpose(v))
    delta = xp.sum(p * dp, axis=-1, keepdims=True)
    if dlse is not None:
        delta = delta - xp.reshape(xp.astype(dlse, dtype), delta.shape)
    ds = p * (dp - delta)
    if dcap is not None:
        ds = ds * dcap
    dq = xp.matmul(ds, k) * spec.scale
    dk = xp.matmul(xp.matrix_transpose(ds), q) * spec.scale
    dv = xp.matmul(xp.matrix_transpose(p), dout)
    return (
        _to_heads(xp, dq, spec),
        xp.permute_dims(dk, (0, 2, 1, 3)),
        xp.permute_dims(dv, (0, 2, 1, 3)),
    )


def visibility(xp: Any, spec: AttentionSpec, on: Any) -> Array | None:
    """Boolean mask [Sq, Skv] of the keys each query sees, on device `on`; None when it sees all."""
    reach = spec.seq_q + spec.seq_kv  # wider windows see no more, and may not fit an index dtype
    left, right = (
        None if side is None else min(side, reach) for side in (spec.window.left, spec.window.right)
    )
    if left is None and right is None:
        return None
    position = xp.arange(spec.seq_q, device=on)[:, None] + spec.diagonal
    key = xp.arange(spec.seq_kv, device=on)[None, :]
    seen = xp.ones((spec.seq_q, spec.seq_kv), dtype=xp.bool, device=on)
    if left is not None:
        seen = seen & (key >= position - left)
    if right is not None:
        seen = seen & (key <= position + right)
    return seen


def _by_kv_head(xp: Any, qkv: tuple[Array, ...], spec: AttentionSpec, dtype: Any):
    """q as [B, Hkv, group · Sq, D], so that no key is copied; k, v as [B, Hkv, Skv, D]."""
    q, k, v = qkv
    k, v = (xp.permute_dims(xp.astype(x, dtype), (0, 2, 1, 3)) for x in (k, v))
    return _rows(xp, q, spec, dtype), k, v


def _rows(xp: Any, x: Array, spec: AttentionSpec, dtype: Any) -> Array:
    """[B, Sq, Hq, D] as [B, Hkv, group · Sq, D]."""
    rows = spec.group_size * spec.seq_q
    x = xp.permute_dims(xp.astype(x, dtype), (0, 2, 1, 3))
    return xp.reshape(x, (spec.batch, spec.heads_kv, rows, x.shape[-1]))


def _to_heads(xp: Any, rows: Array, spec: AttentionSpec) -> Array:
    """The inverse of `_rows`."""
    x = xp.reshape(rows, (spec.batch, spec.heads_q, spec.seq_q, rows.shape[-1]))
    return xp.permute_dims(x, (0, 2, 1, 3))


def _scores(xp: Any, q: Array, k: Array, spec: AttentionSpec) -> tuple[Array, Array | None]:
    """Scores after scale, softcap and mask, and the derivative of the softcap."""
    s = xp.matmul(q, xp.matrix_transpose(k)) * spec.scale
    dcap = None
    if spec.softcap is not None:
        t = xp.tanh(s / spec.softcap)
        s, dcap = t * spec.softcap, 1 - t * t
    seen = visibility(xp, spec, device(s))
    if seen is not None:
        group = (spec.group_size, *seen.shape)
        seen = xp.reshape(xp.broadcast_to(seen, group), s.shape[-2:])
        s = xp.where(seen, s, xp.full_like(s, float("-inf")))
    return s, dcap


def _softmax(xp: Any, q: Array, k: Array, spec: AttentionSpec) -> tuple[Array, Array, Array | None]:
    """p, log-sum-exp, and the derivative of the softcap; a row that sees no key has p = 0."""
    s, dcap = _scores(xp, q, k, spec)
    m = _row_max(xp, s)
    p = xp.exp(s - m)
    normalizer = xp.sum(p, axis=-1, keepdims=True)
    lse = xp.log(normalizer) + m
    p = p / xp.where(normalizer == 0, xp.ones_like(normalizer), normalizer)
    return p, lse, dcap


def _row_max(xp: Any, s: Array) -> Array:
    """Row maximum, 0 where a row sees no key."""
    if s.shape[-1] == 0:
        return xp.zeros_like(xp.sum(s, axis=-1, keepdims=True))
    m = xp.max(s, axis=-1, keepdims=True)
    return xp.where(xp.isinf(m), xp.zeros_like(m), m)
