from __future__ import annotations

from typing import Any, Literal, TypeVar, Unpack, overload

import jax
import numpy as np

from pallas_attn.decode_ops import PAGED_DECODE, append, merge
from pallas_attn.dispatch import Implementation, choose_backends
from pallas_attn.keywords import DecodeKeywords
from pallas_attn.operands import device_of, operand
from pallas_attn.switches import promoting
from pallas_attn.varying import alike
from twin_attention.contract.operands import AppendOperands, describe_operands
from twin_attention.contract.paged_spec import AppendSpec
from twin_attention.contract.spec import MergeSpec
from twin_attention.contract.validate.merge import check_merge_states
from twin_attention.contract.validate.names import refuse_names, without_catch_all
from twin_attention.contract.validate.options import check_append_options
from twin_attention.contract.validate.paged import check_append_kv
from twin_attention.contract.validate.pool import check_page_ids, check_pages_arguments

V = TypeVar("V", jax.Array, None)  # values of a cache, or none


@overload
def paged_decode(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array | None,
    block_tables: jax.Array, seq_lens: jax.Array,
    *, return_lse: Literal[False] = ..., **keywords: Unpack[DecodeKeywords],
) -> jax.Array: ...  # fmt: skip
@overload
def paged_decode(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array | None,
    block_tables: jax.Array, seq_lens: jax.Array,
    *, return_lse: Literal[True], **keywords: Unpack[DecodeKeywords],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def paged_decode(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array | None,
    block_tables: jax.Array, seq_lens: jax.Array,
    *, return_lse: bool, **keywords: Unpack[DecodeKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
@without_catch_all
def paged_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    block_tables: jax.Array,
    seq_lens: jax.Array,
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
    num_splits: int | None = None,
    value_dim: int | None = None,
    cascade: bool = False,
    batch_invariant: bool = False,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **others: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute exact attention of new tokens over a paged KV cache.

    Key j of sequence b lies in slot ``j % page_size`` of page ``block_tables[b, j // page_size]``.
    The cache already holds the new tokens' own keys (`append_kv`): token t of a sequence of length
    n stands at position ``p = n - T + t`` and sees keys up to p. Heads, and tokens without keys,
    are as in `flash_attention`.

    Only the device reads lengths and page tables, so one trace serves all. Nothing outside the pool
    is read, whatever they hold; `check_pages` checks them.

    Works under `jit`, `vmap`, `lax.scan` and `shard_map`, divided over devices by batch or heads.
    It has no derivative. Tracing fixes the kernel's target, as in
    `flash_attention`.

    Args:
        q: [B, Hq, D], or [B, T, Hq, D] with T from 1 to 64, float16 or bfloat16. D is 16 to 512 in
            steps of 8.
        k_pages: [P, page_size, Hkv, D], q's dtype, int8 or float8_e4m3fn: one pool for all
            sequences. page_size is 1 to 256; Hkv divides Hq.
        v_pages: [P, page_size, Hkv, Dv], k_pages' dtype. Dv has D's limits. None for a latent
            cache (MLA), with `value_dim`.
        block_tables: [B, max_pages] int32, ids of pages.
        seq_lens: [B] int32, keys of each sequence, including the new tokens.
        causal: only True: new tokens are causal among themselves.
        scale, softcap, sinks, batch_invariant, return_lse: as in `flash_attention`.
        window_size: (left, right): a token sees keys from p - left on. None is unlimited; right has
            no effect.
        k_scale, v_scale: [] or [Hkv] float32, factors of an 8-bit cache's numbers.
        tree_ends: [B, T] int32: the new tokens form a tree. Token t sees all keys before them, and
            new token u if ``u <= t < tree_ends[b, u]``. `tree_of` makes it; `check_tree` checks it.
            Not with a window to the left. None is causal.
        alibi_slopes: [Hq] or [B, Hq], as in `flash_attention`. Not with tree_ends.
        num_splits: parts, 1 to 256, that each sequence's keys are divided into; then the rest of
            the batch does not change a sequence's bits. None chooses by the shapes.
        value_dim: without v_pages, values are the first `value_dim` columns of the keys, which are
            read once; D then is up to 576, and `k_scale` is the values' too.
        cascade: read pages that several sequences begin with, such as a shared prompt's, once for
            these. No effect with alibi_slopes, a window to the left, more than 32 query rows
            (tokens times query heads) per kv head, or more than 1024 sequences. Not with
            num_splits.
        implementation: "mosaic" (kernels in Pallas's Mosaic GPU; from jax 0.11 on), "gluon"
            (torch_attn's, for SM90 and latent caches with many heads), "triton", "torch_triton"
            (torch_attn's), "reference" (copies the keys out of their pages) or None, as in
            `flash_attention`.

    Returns:
        out, q's shape with Dv last, in q's dtype; with `return_lse` the pair (out, lse), lse [B,
        Hq] or [B, Hq, T] in float32, natural logarithm.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values that contradict each other.
        NotImplementedError: a window to the left with a tree; a dtype, head dimension, page size,
            number of tokens or device without kernels; a derivative.

    Source: Kwon et al. 2023 (PagedAttention); Dao et al. 2023 (Flash-Decoding); sinks: Agarwal et
    al. 2025 (gpt-oss).

    Example::

        import jax
        import jax.numpy as jnp
        from pallas_attn import paged_decode

        keys = jax.random.split(jax.random.key(0), 2)
        k_pages, v_pages = jax.random.normal(keys[0], (2, 8, 16, 2, 64), jnp.bfloat16)
        block_tables = jnp.array([[3, 0], [5, 6]], jnp.int32)
        seq_lens = jnp.array([9, 32], jnp.int32)
        q = jax.random.normal(keys[1], (2, 4, 64), jnp.bfloat16)
        out = jax.jit(paged_decode)(q, k_pages, v_pages, block_tables, seq_lens)
    """
    if more or others:
        refuse_names(paged_decode, more, others)
    operands = (
        q, k_pages, v_pages, block_tables, seq_lens, sinks, k_scale, v_scale, tree_ends,
        alibi_slopes,
    )  # fmt: skip
    options = (
        causal, scale, window_size, softcap, num_splits, value_dim, cascade, batch_invariant,
        return_lse,
    )  # fmt: skip
    return PAGED_DECODE(operands, options, implementation)


@overload
def append_kv(
    k_new: jax.Array, v_new: V, k_pages: jax.Array,
    v_pages: V,
    block_tables: jax.Array, seq_lens: jax.Array, *, cu_seqlens_q: jax.Array | None = ...,
    q: None = ..., rotary_cos: jax.Array | None = ...,
    rotary_sin: jax.Array | None = ..., rotary_interleaved: bool = ...,
    k_scale: jax.Array | None = ..., v_scale: jax.Array | None = ...,
    implementation: Implementation | None = ...,
) -> tuple[jax.Array, V]: ...  # fmt: skip
@overload
def append_kv(
    k_new: jax.Array, v_new: V, k_pages: jax.Array,
    v_pages: V,
    block_tables: jax.Array, seq_lens: jax.Array, *, cu_seqlens_q: jax.Array | None = ...,
    q: jax.Array, rotary_cos: jax.Array,
    rotary_sin: jax.Array, rotary_interleaved: bool = ...,
    k_scale: jax.Array | None = ..., v_scale: jax.Array | None = ...,
    implementation: Implementation | None = ...,
) -> tuple[jax.Array, jax.Array, V]: ...  # fmt: skip
@overload
def append_kv(
    k_new: jax.Array, v_new: V, k_pages: jax.Array,
    v_pages: V,
    block_tables: jax.Array, seq_lens: jax.Array, *, cu_seqlens_q: jax.Array | None = ...,
    q: jax.Array | None, rotary_cos: jax.Array | None,
    rotary_sin: jax.Array | None, rotary_interleaved: bool = ...,
    k_scale: jax.Array | None = ..., v_scale: jax.Array | None = ...,
    implementation: Implementation | None = ...,
) -> tuple[jax.Array | V, ...]: ...  # fmt: skip
@without_catch_all
def append_kv(
    k_new: jax.Array,
    v_new: jax.Array | None,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *more: Any,
    cu_seqlens_q: jax.Array | None = None,
    q: jax.Array | None = None,
    rotary_cos: jax.Array | None = None,
    rotary_sin: jax.Array | None = None,
    rotary_interleaved: bool = False,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: Implementation | None = None,
    **others: Any,
) -> tuple[jax.Array | None, ...]:
    """Write new tokens' keys and values into their pages, and return the cache.

    Token t of T goes to position ``p = seq_lens[b] - T + t``, if that and its page exist. An 8-bit
    cache stores ``x / scale``, rounded to nearest even and clamped to ±127 (int8) or ±448
    (float8_e4m3fn). If two tokens go to the same slot, either may be kept.

    With `cu_seqlens_q` each sequence has any number of new tokens, packed. Tokens past the last
    offset are padding, which may hold NaN and is not written.

    With `rotary_cos` and `rotary_sin`, keys are written rotated (rotary embedding), and `q`, the
    same tokens' queries, is returned rotated. A pair (x, y) of the first R dimensions becomes
    ``(x cos - y sin, y cos + x sin)``, with row p of the tables; one outside the tables gives NaN.

    The results are new arrays. Pools that a jitted function owns, donated to it or carried through
    its loop, are written in place; others are copied first.

    Works under `jit`, `vmap`, `lax.scan` and `shard_map`, divided over devices by heads. It has no
    derivative.

    Args:
        k_new: [B, Hkv, D], or [B, T, Hkv, D] with T up to 64, or with `cu_seqlens_q` [Tq, Hkv, D];
            float16 or bfloat16.
        v_new: k_new's shape with Dv last, k_new's dtype. None without v_pages.
        k_pages, v_pages, block_tables, seq_lens, k_scale, v_scale: as in `paged_decode`; k_new's
            dtype, int8 or float8_e4m3fn.
        cu_seqlens_q: [B + 1] int32, offsets of the sequences' new tokens.
        q: k_new's shape and dtype, but with Hq heads, a multiple of Hkv. Only with rotation.
        rotary_cos, rotary_sin: [positions, R / 2], float32 or k_new's dtype, both or neither. R is
            2 to D; other dimensions are not rotated.
        rotary_interleaved: pair i is dimensions 2i and 2i + 1 (GPT-J), not i and i + R / 2
            (GPT-NeoX, Llama).
        implementation: "mosaic" (without `cu_seqlens_q` and rotation; from jax 0.11 on),
            "torch_triton" (torch_attn's), "triton", "reference" or None, as in `flash_attention`.

    Returns:
        k_pages and v_pages with the new tokens, shaped and typed as those given. With q, the triple
        (q, k_pages, v_pages): its q is new, and 0 in the padding.

    Raises:
        TypeError, ValueError, NotImplementedError: as in `paged_decode`.

    Source: Kwon et al. 2023 (PagedAttention); Su et al. 2021 (RoFormer) for the rotation.

    Example::

        import jax
        import jax.numpy as jnp
        from pallas_attn import append_kv

        k_pages, v_pages = jnp.zeros((2, 8, 16, 2, 64), jnp.bfloat16)
        block_tables = jnp.array([[3, 0], [5, 6]], jnp.int32)
        seq_lens = jnp.array([9, 31], jnp.int32)
        k_new, v_new = jax.random.normal(jax.random.key(0), (2, 2, 2, 64), jnp.bfloat16)
        append = jax.jit(append_kv, donate_argnames=("k_pages", "v_pages"))
        k_pages, v_pages = append(k_new, v_new, k_pages, v_pages, block_tables, seq_lens + 1)
        assert jnp.array_equal(k_pages[3, 9], k_new[0])
    """
    if more or others:
        refuse_names(append_kv, more, others)
    operands = AppendOperands(
        k_new, v_new, k_pages, v_pages, block_tables, seq_lens, k_scale, v_scale, cu_seqlens_q, q,
        rotary_cos, rotary_sin,
    )  # fmt: skip
    interleaved = check_append_options(rotary_interleaved)
    spec = check_append_kv(describe_operands(operands, operand), interleaved)
    backends = choose_backends(implementation, "append_kv", device_of(k_new), spec)
    k_pages, v_pages, *rotated = append(alike(operands), spec, backends)
    return (*rotated, k_pages, v_pages)


def merge_states(
    outs: jax.Array, lses: jax.Array, *, implementation: Implementation | None = None
) -> tuple[jax.Array, jax.Array]:
    """Merge attention over disjoint sets of keys into attention over their union.

    ``lse = log(sum(exp(lses)))`` and ``out = sum(exp(lses - lse) · outs)``, in float32. Where a
    part's lse is -inf, its out may hold anything; where all are, out is 0 and lse -inf. A sink
    belongs in one part only.

    Works under `jit`, `grad`, `vmap`, `lax.scan` and `shard_map`, divided over devices by batch or
    heads. Differentiable once, in reverse mode.

    Args:
        outs: [N, B, H, Dv] or [N, B, S, H, Dv], N partial results, float16, bfloat16 or float32. Dv
            is 16 to 512 in steps of 8.
        lses: [N, B, H] or [N, B, H, S] float32, their log-sum-exp, natural logarithm.
        implementation: "mosaic" (from jax 0.11 on), "torch_triton" (torch_attn's), "triton",
            "reference" or None, as in `flash_attention`.

    Returns:
        out [B, H, Dv] or [B, S, H, Dv] in the dtype of `outs`, and lse [B, H] or [B, H, S] float32.

    Raises:
        TypeError, ValueError, NotImplementedError: as in `flash_attention`.

    Source: Dao et al. 2022 (FlashAttention), section 3.1; Ye et al. 2025 (FlashInfer), section 2.2.

    Example::

        import jax
        import jax.numpy as jnp
        from pallas_attn import flash_attention, merge_states

        q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 128, 4, 64))
        halves = [
            flash_attention(q, k[:, keys], v[:, keys], return_lse=True)
            for keys in (slice(0, 64), slice(64, 128))
        ]
        out, lse = merge_states(*map(jnp.stack, zip(*halves)))
        assert jnp.allclose(out, flash_attention(q, k, v), atol=1e-5)
    """
    spec = check_merge_states(operand("outs", outs), operand("lses", lses))
    backends = choose_backends(implementation, "combine", device_of(outs), spec)
    return merge(*alike((outs, lses)), spec, backends)


@promoting
def check_pages(
    k_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array | None = None,
    *,
    num_new_tokens: int | None = None,
) -> None:
    """Check lengths, page ids and offsets, which the functions of a paged cache do not check.

    It waits for the device: use it for debugging, not in traced code.

    Args:
        k_pages, block_tables, seq_lens: as in `paged_decode`.
        cu_seqlens_q: [B + 1] int32, offsets of the new tokens that `append_kv` writes. No two
            sequences may write to the same page.
        num_new_tokens: without offsets, each sequence's new tokens, 0 (sequences are only read) to
            64; None is 1.

    Raises:
        TypeError: an argument has the wrong type or dtype, or it has no values because it is traced
            (`jax.errors.TracerArrayConversionError`).
        ValueError: shapes that contradict each other; offsets that `check_offsets` refuses; a
            length below 0 or past the capacity ``max_pages * page_size``; a used table entry that
            is no page of the pool; two sequences with new tokens in the same page. The message
            names the first such sequence.
        NotImplementedError: a page size or capacity that `paged_decode` does not take.

    Example::

        import jax.numpy as jnp
        from pallas_attn import check_pages

        k_pages = jnp.zeros((8, 16, 2, 64))
        block_tables = jnp.array([[3, 0], [5, -1]], jnp.int32)
        check_pages(k_pages, block_tables, jnp.array([32, 16], jnp.int32))
    """
    pool = operand("k_pages", k_pages)
    tables, lengths = operand("block_tables", block_tables), operand("seq_lens", seq_lens)
    offsets = None if cu_seqlens_q is None else operand("cu_seqlens_q", cu_seqlens_q)
    check_pages_arguments(pool, tables, lengths, offsets, num_new_tokens)
    check_page_ids(
        np.asarray(block_tables),
        np.asarray(seq_lens),
        None if cu_seqlens_q is None else np.asarray(cu_seqlens_q),
        num_new_tokens,
        k_pages.shape[:2],
    )


def problem_of_append(
    *, rotary_interleaved: Any, **arguments: Any
) -> tuple[AppendOperands[jax.Array], AppendSpec]:
    operands = AppendOperands(**arguments)
    interleaved = check_append_options(rotary_interleaved)
    return operands, check_append_kv(describe_operands(operands, operand), interleaved)


def problem_of_merge(*, outs: Any, lses: Any) -> tuple[tuple[jax.Array, jax.Array], MergeSpec]:
    return (outs, lses), check_merge_states(operand("outs", outs), operand("lses", lses))
