from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax
import numpy as np

from pallas_attn.dispatch import Implementation
from pallas_attn.flash_ops import PACKED, or_as_xla_says
from pallas_attn.keywords import VarlenKeywords
from pallas_attn.operands import operand
from twin_attention.contract.spec import Precision
from twin_attention.contract.validate.names import refuse_names, without_catch_all
from twin_attention.contract.validate.offsets import check_offset_values, check_offsets_arguments


@overload
def flash_attention_varlen(
    q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens_q: jax.Array, cu_seqlens_kv: jax.Array,
    *, return_lse: Literal[False] = ..., return_row_max: Literal[False] = ...,
    **keywords: Unpack[VarlenKeywords],
) -> jax.Array: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens_q: jax.Array, cu_seqlens_kv: jax.Array,
    *, return_lse: Literal[True], return_row_max: Literal[False] = ...,
    **keywords: Unpack[VarlenKeywords],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens_q: jax.Array, cu_seqlens_kv: jax.Array,
    *, return_lse: bool, return_row_max: Literal[False] = ...,
    **keywords: Unpack[VarlenKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens_q: jax.Array, cu_seqlens_kv: jax.Array,
    *, return_lse: Literal[False] = ..., return_row_max: Literal[True],
    **keywords: Unpack[VarlenKeywords],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens_q: jax.Array, cu_seqlens_kv: jax.Array,
    *, return_lse: Literal[True], return_row_max: Literal[True],
    **keywords: Unpack[VarlenKeywords],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens_q: jax.Array, cu_seqlens_kv: jax.Array,
    *, return_lse: bool = ..., return_row_max: bool,
    **keywords: Unpack[VarlenKeywords],
) -> jax.Array | tuple[jax.Array, ...]: ...  # fmt: skip
@without_catch_all
def flash_attention_varlen(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_kv: jax.Array,
    *more: Any,
    causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    kv_ends: jax.Array | None = None,
    q_depths: jax.Array | None = None,
    kv_depths: jax.Array | None = None,
    q_ranges: jax.Array | None = None,
    relative_bias: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    dropout_rate: float = 0,
    dropout_seed: jax.Array | None = None,
    deterministic: bool | None = None,
    precision: Precision = "ieee",
    return_lse: bool = False,
    return_row_max: bool = False,
    batch_invariant: bool = False,
    implementation: Implementation | None = None,
    **others: Any,
) -> jax.Array | tuple[jax.Array, ...]:
    """Compute exact attention within each of N packed sequences.

    Sequence n has queries ``cu_seqlens_q[n] .. cu_seqlens_q[n + 1]`` and keys
    ``cu_seqlens_kv[n] .. cu_seqlens_kv[n + 1]``, maybe none, and the result of `flash_attention`
    over these. Tokens past the last offset are padding: they may hold NaN, and see no key.

    The grid depends only on Tq, Tkv and N, and only the device reads the offsets: one trace serves
    all. `check_offsets` checks them; no memory outside the arrays is touched. Works under the
    transformations that `flash_attention` does.

    Args:
        q: [Tq, Hq, D], as in `flash_attention`.
        k: [Tkv, Hkv, D].
        v: [Tkv, Hkv, Dv].
        cu_seqlens_q, cu_seqlens_kv: [N + 1] int32, offsets of the sequences' queries and keys: 0
            first, never decreasing, at most Tq and Tkv.
        causal, scale, window_size, softcap, sinks, dropout_rate: as in `flash_attention`.
        deterministic, precision, return_lse, return_row_max, batch_invariant: as in
            `flash_attention`.
        kv_ends: [Tkv] int32, as in `flash_attention`, counted from the sequence's first key.
        q_depths, kv_depths: [Tq] and [Tkv] int32, as in `flash_attention`.
        q_ranges: [Tq, R, 2] int32, as in `flash_attention`, counted from the sequence's first key.
        relative_bias: [Hq, 2R + 1], as in `flash_attention`.
        alibi_slopes: [Hq] or [N, Hq], as in `flash_attention`.
        dropout_seed: as in `flash_attention`; sequence n drops what batch element n would.
        implementation: as in `flash_attention`; "reference" takes O(Tq · Tkv) memory.

    Returns:
        out [Tq, Hq, Dv], lse [Hq, Tq] and row_max [Hq, Tq], as `flash_attention` returns them.

    Raises:
        TypeError, ValueError, NotImplementedError: as in `flash_attention`.

    Source: Dao 2023 (FlashAttention-2), whose ``flash_attn_varlen_func`` takes such offsets.

    Example::

        import jax
        import jax.numpy as jnp
        from pallas_attn import flash_attention_varlen

        q, k, v = jax.random.normal(jax.random.key(0), (3, 128, 4, 64))
        offsets = jnp.array([0, 40, 100], jnp.int32)  # 40 and 60 tokens, padding
        attention = jax.jit(lambda *operands: flash_attention_varlen(*operands, causal=True))
        out = attention(q, k, v, offsets, offsets)
    """
    if more or others:
        refuse_names(flash_attention_varlen, more, others)
    operands = (
        q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks, kv_ends, q_depths, kv_depths, q_ranges,
        relative_bias, alibi_slopes, dropout_seed,
    )  # fmt: skip
    deterministic = or_as_xla_says(deterministic)
    options = (
        causal, scale, window_size, softcap, deterministic, precision, dropout_rate, return_row_max,
        batch_invariant, return_lse,
    )  # fmt: skip
    return PACKED(operands, options, implementation)


def check_offsets(
    cu_seqlens_q: jax.Array, cu_seqlens_kv: jax.Array, *, tokens_q: int, tokens_kv: int
) -> None:
    """Check offsets, which `flash_attention_varlen` itself does not check.

    It waits for the device: use it for debugging, not in traced code.

    Args:
        cu_seqlens_q, cu_seqlens_kv: [N + 1] int32.
        tokens_q, tokens_kv: Tq and Tkv, the lengths of the packed axes.

    Raises:
        TypeError: an argument has the wrong type or dtype, or it has no values because it is traced
            (`jax.errors.TracerArrayConversionError`).
        ValueError: shapes that contradict each other; a first offset that is not 0, a decreasing
            one, or one that exceeds the tokens. The message names the first such offset.

    Example::

        import jax.numpy as jnp
        from pallas_attn import check_offsets

        offsets = jnp.array([0, 40, 100], jnp.int32)
        check_offsets(offsets, offsets, tokens_q=128, tokens_kv=128)
    """
    of_q, of_kv = operand("cu_seqlens_q", cu_seqlens_q), operand("cu_seqlens_kv", cu_seqlens_kv)
    check_offsets_arguments(of_q, of_kv, tokens_q, tokens_kv)
    check_offset_values(of_q.name, np.asarray(cu_seqlens_q), tokens_q)
    check_offset_values(of_kv.name, np.asarray(cu_seqlens_kv), tokens_kv)
