from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax

from pallas_attn.decode_ops import PAGED_ATTENTION
from pallas_attn.dispatch import Implementation
from pallas_attn.keywords import PagedKeywords
from twin_attention.contract.validate.names import refuse_names, without_catch_all


@overload
def paged_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array | None,
    block_tables: jax.Array, seq_lens: jax.Array, cu_seqlens_q: jax.Array,
    *, return_lse: Literal[False] = ..., **keywords: Unpack[PagedKeywords],
) -> jax.Array: ...  # fmt: skip
@overload
def paged_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array | None,
    block_tables: jax.Array, seq_lens: jax.Array, cu_seqlens_q: jax.Array,
    *, return_lse: Literal[True], **keywords: Unpack[PagedKeywords],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def paged_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array | None,
    block_tables: jax.Array, seq_lens: jax.Array, cu_seqlens_q: jax.Array,
    *, return_lse: bool, **keywords: Unpack[PagedKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
@without_catch_all
def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array,
    *more: Any,
    causal: bool = True,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    tree_ends: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    q_ranges: jax.Array | None = None,
    num_splits: int | None = None,
    value_dim: int | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **others: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute exact attention of any number of new tokens per sequence over a paged KV cache.

    It is `paged_decode` for chunks of prompts, whole prompts and single tokens in one batch.
    Sequence b has T new tokens, ``cu_seqlens_q[b] .. cu_seqlens_q[b + 1]``, maybe none; everything
    else is as there. Tokens past the last offset are padding: they may hold NaN, and see no key.

    The grid depends only on Tq, B and max_pages, and only the device reads offsets, lengths and
    tables: one trace serves all. `check_offsets` and `check_pages` check them. Works under
    `jit`, `vmap` and `lax.scan`. It has no derivative.

    Args:
        q: [Tq, Hq, D], float16 or bfloat16. D is 16 to 512 in steps of 8.
        k_pages, v_pages, block_tables, seq_lens: as in `paged_decode`.
        cu_seqlens_q: [B + 1] int32, offsets of the sequences' new tokens: 0 first, never
            decreasing, at most Tq.
        causal, scale, window_size, softcap, sinks, k_scale, v_scale: as in `paged_decode`.
        value_dim, batch_invariant, return_lse: as in `paged_decode`.
        tree_ends: [Tq] int32, as in `paged_decode`, counted from the sequence's first new token.
        alibi_slopes: [Hq] or [B, Hq], as in `paged_decode`.
        q_ranges: [Tq, R, 2] int32, as in `flash_attention`, counted from the sequence's first key.
        num_splits: as in `paged_decode`, for the keys of some tokens; the bits stay the same for
            the same Tq and B.
        implementation: "mosaic" (explicit kernels for SM90 and long chunks; from jax 0.11 on),
            "gluon" (torch_attn's, and for latent caches with many heads), "triton", "torch_triton"
            (torch_attn's), "reference" (O(Tq · B · max_pages · page_size) memory) or None, as in
            `flash_attention`.

    Returns:
        out [Tq, Hq, Dv] in q's dtype; with `return_lse` the pair (out, lse), lse [Hq, Tq] in
        float32.

    Raises:
        TypeError, ValueError, NotImplementedError: as in `paged_decode`.

    Source: Kwon et al. 2023 (PagedAttention); Agrawal et al. 2023 (SARATHI, chunked prefills with
    decodes); Dao et al. 2023 (Flash-Decoding).

    Example::

        import jax
        import jax.numpy as jnp
        from pallas_attn import paged_attention

        keys = jax.random.split(jax.random.key(0), 2)
        k_pages, v_pages = jax.random.normal(keys[0], (2, 8, 16, 2, 64), jnp.bfloat16)
        block_tables = jnp.array([[3, 0], [5, 6]], jnp.int32)
        seq_lens = jnp.array([9, 32], jnp.int32)
        cu_seqlens_q = jnp.array([0, 1, 21], jnp.int32)  # a decode, a chunk of 20
        q = jax.random.normal(keys[1], (21, 4, 64), jnp.bfloat16)
        out = jax.jit(paged_attention)(q, k_pages, v_pages, block_tables, seq_lens, cu_seqlens_q)
    """
    if more or others:
        refuse_names(paged_attention, more, others)
    operands = (
        q, k_pages, v_pages, block_tables, seq_lens, cu_seqlens_q, sinks, k_scale, v_scale,
        tree_ends, alibi_slopes, q_ranges,
    )  # fmt: skip
    options = (
        causal, scale, window_size, softcap, num_splits, value_dim, batch_invariant, return_lse,
    )  # fmt: skip
    return PAGED_ATTENTION(operands, options, implementation)
