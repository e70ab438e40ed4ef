"""The signature of `jax.nn.dot_product_attention` on `pallas_attn`.

An argument that `pallas_attn` has no code for is refused by name; none is ignored.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_attn import flash_attention
from pallas_attn.adapters.masks import of_mask
from pallas_attn.dispatch import IMPLEMENTATIONS, Implementation
from pallas_attn.switches import promoting
from twin_attention.contract.validate.attention import check_broadcast
from twin_attention.contract.validate.errors import fail

# jax.nn's score of a hidden key.
_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)


@promoting
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute what `jax.nn.dot_product_attention` computes, with `pallas_attn.flash_attention`.

    As in `jax.nn`, query i stands at key position i, whatever the lengths; a query past its length
    gives 0, and one within it that sees no key the mean of all values. Only the device reads
    lengths; tiles of padding are skipped.

    Args:
        query: [B, T, N, H] or [T, N, H], float16, bfloat16 or float32. H is 16 to 512 in steps of
            8.
        key, value: [B, S, K, H] or [S, K, H], the query's dtype. N is a multiple of K.
        bias: [B, N, T, S], or 1 in place of any, or without the first ones; float32 or the query's
            dtype, added to the scores.
        mask: bool, shaped as bias, True where a query sees a key. One of only keys, [B, 1, 1, S],
            costs nothing; any other becomes a bias, which needs its memory and hides no tiles.
        scale: factor of the scores; None is ``H ** -0.5``.
        is_causal: query i sees keys up to i.
        query_seq_lengths, key_value_seq_lengths: [B] int32, tokens of each sequence that are no
            padding. None is all.
        local_window_size: (left, right), or one number for both: query i sees keys from i - left to
            i + right; (-1, 2) is the two keys after i.
        implementation: pallas_attn's; "xla" and "cudnn" are refused.
        return_residual: return the log-sum-exp as well.

    Returns:
        out, query's shape and dtype; with `return_residual` the pair (out, lse), lse [B, T, N] or
        [T, N] in the query's dtype, natural logarithm, without a gradient; 0.7 times the least
        float32 for a query that sees no key.

    Raises:
        NotImplementedError: an implementation of `jax.nn`.
        TypeError: lengths that are not int32, or a mask that is not bool.
        ValueError: lengths of another shape than [B], or a bias or mask that does not broadcast.
        What `pallas_attn.flash_attention` raises.

    Example::

        import jax
        from pallas_attn.adapters.jax_nn import dot_product_attention

        q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 128, 4, 64))
        out = jax.jit(lambda *qkv: dot_product_attention(*qkv, is_causal=True))(q, k, v)
    """
    if implementation in ("xla", "cudnn"):
        expected = f"None or one of {', '.join(map(repr, IMPLEMENTATIONS))}, since"
        expected = f"{expected} 'xla' and 'cudnn' run only in jax.nn.dot_product_attention"
        fail(NotImplementedError, "implementation", expected, repr(implementation))
    operands = {"query": query, "key": key, "value": value}
    arrays = {name: jnp.asarray(x) for name, x in operands.items()}
    for name, x in arrays.items():
        if x.ndim not in (3, 4):
            fail(ValueError, name, "3 or 4 dimensions", f"shape {x.shape}")
    q, k, v = (x if x.ndim == 4 else x[None] for x in arrays.values())
    if v.shape[1] != k.shape[1]:
        fail(ValueError, "value", f"key's length {k.shape[1]}", v.shape[1])

    whole = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    of_keys = added = None
    if bias is not None:
        bias = jnp.expand_dims(bias, tuple(range(4 - jnp.ndim(bias))))
        check_broadcast("bias", bias.shape, whole)
    if mask is not None:
        mask = jnp.expand_dims(mask, tuple(range(4 - jnp.ndim(mask))))
        if mask.dtype != bool:
            fail(TypeError, "mask", "bool", mask.dtype)
        of_keys, added = of_mask(mask, whole, q.dtype)
        bias = added if bias is None else bias if added is None else bias + added
    num_queries, num_keys = q.shape[1], k.shape[1]
    if isinstance(local_window_size, int):
        local_window_size = (local_window_size, local_window_size)
    left, right = (None, None) if local_window_size is None else local_window_size
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if left is not None:
        num_queries = max(0, min(num_queries, num_keys + left))
    if right is not None:
        num_keys = max(0, min(num_keys, num_queries + right))
    # flash_attention places query i at key i + shift.
    shift = num_keys - num_queries
    window = (None if left is None else left + shift, None if right is None else right - shift)
    if any(x is not None and x < 0 for x in window):  # no query sees a key
        num_keys, window = 0, None
    cut_off = q.shape[1] - num_queries
    q_ids = kv_ids = None
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        q_ids = _segment_ids("query_seq_lengths", query_seq_lengths, *q.shape[:2])
        kv_ids = _segment_ids("key_value_seq_lengths", key_value_seq_lengths, *k.shape[:2])
    if of_keys is not None:
        q_ids = jnp.zeros(q.shape[:2], jnp.int32) if q_ids is None else q_ids
        kv_ids = of_keys if kv_ids is None else jnp.minimum(kv_ids, of_keys)
    out, lse = flash_attention(
        q[:, :num_queries],
        k[:, :num_keys],
        v[:, :num_keys],
        scale=scale,
        window_size=window,
        bias=None if bias is None else bias[:, :, :num_queries, :num_keys],
        q_segment_ids=None if q_ids is None else q_ids[:, :num_queries],
        kv_segment_ids=None if kv_ids is None else kv_ids[:, :num_keys],
        return_lse=True,
        implementation=implementation,
    )
    lse = jax.lax.stop_gradient(lse.transpose(0, 2, 1))  # [B, T, N]
    if cut_off:
        out = jnp.pad(out, ((0, 0), (0, cut_off), (0, 0), (0, 0)))
        lse = jnp.pad(lse, ((0, 0), (0, cut_off), (0, 0)), constant_values=-jnp.inf)
    first_sees_none = right is not None and right < 0  # query 0 sees no key
    hides = added is not None or q_ids is not None or cut_off or first_sees_none
    if k.shape[1] and (hides or not num_keys):
        # jax.nn's scores of hidden keys are finite, so they are all the same for such a query.
        sees_nothing = takes_mean = jnp.isneginf(lse)
        lse = jnp.where(sees_nothing, _HIDDEN, lse)
        mean = v.mean(1, keepdims=True, dtype=jnp.float32)
        group = jnp.zeros((q.shape[2] // v.shape[2], 1), mean.dtype)
        mean = (mean[:, :, :, None] + group).reshape(*mean.shape[:2], -1, mean.shape[3])
        if q_ids is not None:
            takes_mean &= (q_ids >= 0)[:, :, None]
        out = jnp.where(takes_mean[..., None], mean, out).astype(out.dtype)
    out = out.reshape(*arrays["query"].shape[:-1], out.shape[-1])
    if not return_residual:
        return out
    return out, lse.reshape(out.shape[:-1]).astype(out.dtype)


def _segment_ids(name: str, lengths: ArrayLike | None, batch: int, size: int) -> jax.Array:
    """Return segment ids [B, size]: -1 in the padding, 0 elsewhere."""
    if lengths is None:
        return jnp.zeros((batch, size), jnp.int32)
    lengths = jnp.asarray(lengths)
    if lengths.dtype != jnp.int32:
        fail(TypeError, name, "int32", lengths.dtype)
    if lengths.shape != (batch,):
        fail(ValueError, name, f"shape ({batch},)", lengths.shape)
    return jnp.where(jnp.arange(size) < lengths[:, None], 0, -1).astype(jnp.int32)
