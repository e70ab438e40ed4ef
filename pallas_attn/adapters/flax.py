"""`flash_attention` as the `attention_fn` of Flax's attention modules, linen and NNX.

It does not import Flax.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_attn import flash_attention
from pallas_attn.adapters.masks import of_mask
from pallas_attn.switches import promoting
from twin_attention.contract.validate.errors import fail

# Options that count positions, which a cache longer than its tokens does not tell.
_BY_POSITION = (
    "window_size", "kv_ends", "q_depths", "kv_depths", "q_ranges", "relative_bias", "alibi_slopes",
)  # fmt: skip


def attention_fn(*, is_causal: bool = False, **options: Any) -> Callable[..., Array]:
    """Return an ``attention_fn`` for Flax's modules that computes with `flash_attention`.

    It takes what the modules pass: queries [..., Sq, H, D], keys and values [..., Skv, Hkv, D], a
    mask and a bias that broadcast to [..., H, Sq, Skv], dropout, and a cache (``decode=True``). A
    mask is an array, which does not say that it is causal: pass `is_causal` or other options here,
    and leave it out there. A mask of only keys, [..., 1, 1, Skv], is padding and costs nothing;
    any other becomes a bias, which needs its memory and hides no tiles.

    Dropout takes its seed from Flax's key, and drops others in each sequence and head, whatever
    `broadcast_dropout` says. A query that sees no key gives 0. Operands are cast to `dtype`, and to
    a common one, as Flax does; scores are in float32 with any `precision`.

    Args:
        is_causal: query i sees keys up to i; a module's own ``is_causal=True`` says the same. A
            single query over a cache sees what the module's mask says.
        options: of `flash_attention`, such as window_size, softcap, sinks, q_segment_ids,
            alibi_slopes and implementation, for each call. Segment ids may be arrays that the
            caller traces, shaped [B, S].

    Raises (the returned function):
        NotImplementedError: weights to store (``sow_weights``), or an einsum of the caller's.
        ValueError: a mask that does not broadcast, no key for dropout, or `is_causal` or an option
            that counts positions with several queries and another number of keys.
        What `flash_attention` raises.

    Example::

        import jax
        from flax import nnx
        from pallas_attn.adapters.flax import attention_fn

        attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=64, decode=False, rngs=nnx.Rngs(0),
            attention_fn=attention_fn(is_causal=True, window_size=(31, 0)),
        )
        out = attention(jax.random.normal(jax.random.key(0), (2, 128, 64)))
    """
    causal = is_causal

    @promoting
    def attend(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> Array:
        refused = {
            "module": module, "einsum_dot_general": einsum_dot_general,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }  # fmt: skip
        for name, given in refused.items():
            if given is not None:
                expected = "None, since no weights are stored"
                fail(NotImplementedError, name, expected, type(given).__name__)
        given = options.copy()
        if causal or is_causal or any(given.get(name) is not None for name in _BY_POSITION):
            given["causal"] = _is_causal(causal or is_causal, query, key, given)
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        batch = query.shape[:-3]
        q, k, v = (x.astype(dtype).reshape(prod(batch), *x.shape[-3:]) for x in (query, key, value))
        whole = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        added = [] if bias is None else [_over_batch("bias", bias, batch)]
        if mask is not None:
            ids, hidden = of_mask(_over_batch("mask", mask, batch).astype(bool), whole, dtype)
            added += [] if hidden is None else [hidden]
            if ids is not None:
                if given.get("kv_segment_ids") is None:
                    given["q_segment_ids"] = jnp.zeros(q.shape[:2], jnp.int32)
                else:
                    ids = jnp.where(ids < 0, -1, given["kv_segment_ids"])
                given["kv_segment_ids"] = ids
        if added:
            given["bias"] = sum(added[1:], start=added[0])
        if dropout_rate > 0 and not deterministic:
            if dropout_rng is None:
                fail(ValueError, "dropout_rng", "a key with dropout_rate", None)
            given["dropout_rate"] = dropout_rate
            given["dropout_seed"] = jax.random.bits(dropout_rng, (2,), "uint32")
        out = flash_attention(q, k, v, **given)
        return out.reshape(*query.shape[:-1], out.shape[-1])

    return attend


def _is_causal(causal: bool, query: Array, key: Array, options: dict[str, Any]) -> bool:
    """Return True if the causal mask hides something; refuse positions that lengths do not tell."""
    num_queries, num_keys = query.shape[-3], key.shape[-3]
    if num_queries == num_keys:
        return causal
    names = [name for name in _BY_POSITION if options.get(name) is not None]
    if names or num_queries > 1:
        expected = f"as many queries as keys with {(names or ['is_causal'])[0]}"
        fail(ValueError, "query", expected, f"{num_queries} and {num_keys}")
    return False


def _over_batch(name: str, x: Array, batch: tuple[int, ...]) -> Array:
    """Return [..., H, Sq, Skv] with one batch axis, of size 1 if all sequences share it."""
    x = x.reshape(*(1,) * (len(batch) + 3 - x.ndim), *x.shape)
    own = x.shape[:-3]
    if len(own) != len(batch) or any(
        n not in (1, size) for n, size in zip(own, batch, strict=True)
    ):
        fail(ValueError, name, f"batch axes {batch}, or 1 in place of any of these", own)
    if set(own) != {1}:
        x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
    return x.reshape(-1, *x.shape[-3:])
