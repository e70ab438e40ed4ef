"""The public function of paged attention: any number of new tokens over a paged cache."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax

from pallas_attn.decode_ops import PAGED_ATTENTION
from pallas_attn.dispatch import Implementation
from pallas_attn.keywords import PagedKeywords


@overload
def paged_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, block_tables: jax.Array,
    seq_lens: jax.Array, cu_seqlens_q: jax.Array,
    *, return_lse: Literal[False] = ..., **keywords: Unpack[PagedKeywords],
) -> jax.Array: ...  # fmt: skip
@overload
def paged_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, block_tables: jax.Array,
    seq_lens: jax.Array, cu_seqlens_q: jax.Array,
    *, return_lse: Literal[True], **keywords: Unpack[PagedKeywords],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def paged_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, block_tables: jax.Array,
    seq_lens: jax.Array, cu_seqlens_q: jax.Array,
    *, return_lse: bool, **keywords: Unpack[PagedKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array,
    *,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    tree_ends: jax.Array | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute exact attention of any number of new tokens per sequence over a paged KV cache.

    It is `paged_decode` for chunks of prompts, whole prompts and single tokens in one batch.
    Sequence b has T new tokens, ``cu_seqlens_q[b] .. cu_seqlens_q[b + 1]``, and ``n = seq_lens[b]``
    keys, in the pages of its row of the table. Their own keys are there already: token t stands at
    position ``p = n - T + t`` and sees keys up to p. T may be 0. Tokens past the last offset are
    padding: they may hold NaN, and see no key.

    The grid depends only on Tq, B and max_pages. Offsets, lengths and tables are read on the
    device. Nothing waits for the device and nothing is planned ahead, so a jitted function runs
    with others without being traced again. `check_offsets` and `check_pages` check them; whatever
    they are, nothing outside the arrays is read or written (see `paged_decode`).

    Works under `jit`, `vmap` and `lax.scan`. It has no derivative. The target of the kernel (see
    `twin_attention.targets.target`) is fixed while tracing.

    Args:
        q: [Tq, Hq, D], float16 or bfloat16. D is 16 to 256 in steps of 8.
        k_pages, v_pages, block_tables, seq_lens: as in `paged_decode`.
        cu_seqlens_q: [B + 1] int32, offsets of the sequences' new tokens: 0 first, never
            decreasing, at most Tq.
        scale, window_size, softcap, sinks, k_scale, v_scale, return_lse: as in `paged_decode`.
        tree_ends: [Tq] int32: as in `paged_decode`; tokens and ends count from the sequence's first
            new token.
        num_splits: parts, 1 to 256, that the keys of some tokens are divided into. If given, the
            rest of the batch does not change a sequence's bits for the same Tq and B. None chooses
            by the shapes.
        implementation: "mosaic" (explicit kernels for SM90 and long chunks; from jax 0.11 on),
            "triton" (Pallas kernels in the Triton lowering; on a CPU in the Pallas interpreter),
            "gluon" (torch_attn's Gluon kernels, inside this program, for SM90 and long chunks),
            "torch_triton" (torch_attn's Triton kernels), "reference" (plain JAX in float32, O(Tq ·
            B · max_pages · page_size) memory), or None: the fastest kernels for the problem on a
            CUDA device, the reference elsewhere.

    Returns:
        out [Tq, Hq, Dv] in q's dtype; with `return_lse` the pair (out, lse), lse [Hq, Tq] in
        float32, natural logarithm.

    Raises:
        TypeError: an argument is not a `jax.Array` or has the wrong type or dtype.
        ValueError: shapes, devices or values that contradict each other.
        NotImplementedError: a window to the left with a tree; a dtype, head dimension, page size or
            device without kernels; a derivative.

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
        cu_seqlens_q = jnp.array([0, 1, 21], jnp.int32)  # a decode, and a chunk of 20 tokens
        q = jax.random.normal(keys[1], (21, 4, 64), jnp.bfloat16)
        attention = jax.jit(paged_attention)
        out = attention(q, k_pages, v_pages, block_tables, seq_lens, cu_seqlens_q)
    """
    operands = (
        q, k_pages, v_pages, block_tables, seq_lens, cu_seqlens_q, sinks, k_scale, v_scale,
        tree_ends,
    )  # fmt: skip
    options = scale, window_size, softcap, num_splits, return_lse
    return PAGED_ATTENTION(operands, options, implementation)
