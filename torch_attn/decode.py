from __future__ import annotations

from typing import Any, Literal, TypeVar, Unpack, overload

import torch
from torch import Tensor

from torch_attn.calls import CALLS
from torch_attn.decode_ops import (
    APPEND,
    MERGE,
    PAGED_DECODE,
    check_append,
    check_merge,
    check_pools,
    count_write,
)
from torch_attn.dispatch import Implementation, check_implementation
from torch_attn.keywords import DecodeKeywords
from torch_attn.operands import cast_float32, check_tensor, operand
from twin_attention.contract.operands import AppendOperands
from twin_attention.contract.paged_spec import AppendSpec
from twin_attention.contract.spec import MergeSpec
from twin_attention.contract.validate.names import refuse_names, without_catch_all
from twin_attention.contract.validate.options import check_append_options
from twin_attention.contract.validate.pool import check_page_ids, check_pages_arguments

V = TypeVar("V", Tensor, None)  # values of a cache, or none


@overload
def paged_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor | None, block_tables: Tensor,
    seq_lens: Tensor, *, return_lse: Literal[False] = ..., **keywords: Unpack[DecodeKeywords],
) -> Tensor: ...  # fmt: skip
@overload
def paged_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor | None, block_tables: Tensor,
    seq_lens: Tensor, *, return_lse: Literal[True], **keywords: Unpack[DecodeKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def paged_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor | None, block_tables: Tensor,
    seq_lens: Tensor, *, return_lse: bool, **keywords: Unpack[DecodeKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@without_catch_all
def paged_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    *more: Any,
    causal: bool = True,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tree_ends: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    num_splits: int | None = None,
    value_dim: int | None = None,
    cascade: bool = False,
    batch_invariant: bool = False,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention of new tokens over a paged KV cache.

    Key j of sequence b lies in slot ``j % page_size`` of page ``block_tables[b, j // page_size]``.
    The cache already holds the new tokens' own keys (`append_kv`): token t of a sequence of length
    n stands at position ``p = n - T + t`` and sees keys up to p. Heads, and tokens without keys,
    are as in `flash_attention`.

    Only the device reads lengths and page tables, so a CUDA graph can be replayed with others.
    Nothing outside the pool is read, whatever they hold; `check_pages` checks them.

    Works under `torch.compile` (`fullgraph`, static and dynamic shapes) and autocast, which casts a
    float32 q, but never the cache. It has no derivative.

    Args:
        q: [B, Hq, D], or [B, T, Hq, D] with T from 1 to 64, float16 or bfloat16. D is 16 to 512 in
            steps of 8. Any strides with a contiguous last dimension, as for all operands.
        k_pages: [P, page_size, Hkv, D], q's dtype, int8 or float8_e4m3fn: one pool for all
            sequences. page_size is 1 to 256; Hkv divides Hq. The rows of an 8-bit pool begin at
            even offsets.
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
        implementation: "gluon" (an explicit kernel for SM90 and latent caches with many heads),
            "triton", "reference" (copies the keys out of their pages) or None, as in
            `flash_attention`.

    Returns:
        out, q's shape with Dv last, in q's dtype; with `return_lse` the pair (out, lse), lse [B,
        Hq] or [B, Hq, T] in float32, natural logarithm.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices, strides or values that contradict each other.
        NotImplementedError: a window to the left with a tree; a dtype, head dimension, page size,
            number of tokens or device without kernels; an operand that requires grad while
            gradients are recorded.

    Source: Kwon et al. 2023 (PagedAttention); Dao et al. 2023 (Flash-Decoding); sinks: Agarwal et
    al. 2025 (gpt-oss).

    Example::

        import torch
        from torch_attn import paged_decode

        k_pages, v_pages = torch.randn(2, 8, 16, 2, 64, dtype=torch.bfloat16)
        block_tables = torch.tensor([[3, 0], [5, 6]], dtype=torch.int32)
        seq_lens = torch.tensor([9, 32], dtype=torch.int32)
        q = torch.randn(2, 4, 64, dtype=torch.bfloat16)
        out = paged_decode(q, k_pages, v_pages, block_tables, seq_lens)
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
    k_new: Tensor, v_new: V, k_pages: Tensor, v_pages: V,
    block_tables: Tensor, seq_lens: Tensor, *, cu_seqlens_q: Tensor | None = ..., q: None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ...,
    rotary_interleaved: bool = ..., k_scale: Tensor | None = ..., v_scale: Tensor | None = ...,
    implementation: Implementation | None = ...,
) -> tuple[Tensor, V]: ...  # fmt: skip
@overload
def append_kv(
    k_new: Tensor, v_new: V, k_pages: Tensor, v_pages: V,
    block_tables: Tensor, seq_lens: Tensor, *, cu_seqlens_q: Tensor | None = ..., q: Tensor,
    rotary_cos: Tensor, rotary_sin: Tensor, rotary_interleaved: bool = ...,
    k_scale: Tensor | None = ..., v_scale: Tensor | None = ...,
    implementation: Implementation | None = ...,
) -> tuple[Tensor, Tensor, V]: ...  # fmt: skip
@overload
def append_kv(
    k_new: Tensor, v_new: V, k_pages: Tensor, v_pages: V,
    block_tables: Tensor, seq_lens: Tensor, *, cu_seqlens_q: Tensor | None = ..., q: Tensor | None,
    rotary_cos: Tensor | None, rotary_sin: Tensor | None,
    rotary_interleaved: bool = ..., k_scale: Tensor | None = ..., v_scale: Tensor | None = ...,
    implementation: Implementation | None = ...,
) -> tuple[Tensor | V, ...]: ...  # fmt: skip
@without_catch_all
def append_kv(
    k_new: Tensor,
    v_new: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    *more: Any,
    cu_seqlens_q: Tensor | None = None,
    q: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    implementation: Implementation | None = None,
    **others: Any,
) -> tuple[Tensor | None, ...]:
    """Write new tokens' keys and values into their pages, in place.

    Token t of T goes to position ``p = seq_lens[b] - T + t``, if that and its page exist. An 8-bit
    cache stores ``x / scale``, rounded to nearest even and clamped to ±127 (int8) or ±448
    (float8_e4m3fn). If two tokens go to the same slot, either may be kept.

    With `cu_seqlens_q` each sequence has any number of new tokens, packed. Tokens past the last
    offset are padding, which may hold NaN and is not written.

    With `rotary_cos` and `rotary_sin`, keys are written rotated (rotary embedding), and `q`, the
    same tokens' queries, is returned rotated. A pair (x, y) of the first R dimensions becomes
    ``(x cos - y sin, y cos + x sin)``, with row p of the tables; one outside the tables gives NaN.

    Works under `torch.compile`, and in a CUDA graph, replayed with other lengths and tables; the
    reference waits for the device. Autocast casts float32 k_new, v_new and q. It has no derivative.

    Args:
        k_new: [B, Hkv, D], or [B, T, Hkv, D] with T up to 64, or with `cu_seqlens_q` [Tq, Hkv, D];
            float16 or bfloat16. Any strides with a contiguous last dimension, as for all operands.
        v_new: k_new's shape with Dv last, k_new's dtype. None without v_pages.
        k_pages, v_pages, block_tables, seq_lens, k_scale, v_scale: as in `paged_decode`; k_new's
            dtype, int8 or float8_e4m3fn.
        cu_seqlens_q: [B + 1] int32, offsets of the sequences' new tokens.
        q: k_new's shape and dtype, but with Hq heads, a multiple of Hkv. Only with rotation.
        rotary_cos, rotary_sin: [positions, R / 2], float32 or k_new's dtype, both or neither. R is
            2 to D; other dimensions are not rotated.
        rotary_interleaved: pair i is dimensions 2i and 2i + 1 (GPT-J), not i and i + R / 2
            (GPT-NeoX, Llama).
        implementation: "triton", "reference" or None, as in `flash_attention`.

    Returns:
        k_pages and v_pages, the tensors that were given. With q, the triple (q, k_pages, v_pages):
        its q is new, and 0 in the padding.

    Raises:
        TypeError, ValueError, NotImplementedError: as in `paged_decode`.

    Source: Kwon et al. 2023 (PagedAttention); Su et al. 2021 (RoFormer) for the rotation.

    Example::

        import torch
        from torch_attn import append_kv

        k_pages, v_pages = torch.zeros(2, 8, 16, 2, 64, dtype=torch.bfloat16)
        block_tables = torch.tensor([[3, 0], [5, 6]], dtype=torch.int32)
        seq_lens = torch.tensor([9, 31], dtype=torch.int32)
        k_new, v_new = torch.randn(2, 2, 2, 64, dtype=torch.bfloat16)
        append_kv(k_new, v_new, k_pages, v_pages, block_tables, seq_lens + 1)
        assert torch.equal(k_pages[3, 9], k_new[0])
    """
    if more or others:
        refuse_names(append_kv, more, others)
    operands = AppendOperands(
        k_new, v_new, k_pages, v_pages, block_tables, seq_lens, k_scale, v_scale, cu_seqlens_q, q,
        rotary_cos, rotary_sin,
    )  # fmt: skip
    if torch.is_autocast_enabled("cuda"):
        operands = _cast_new(operands)
    options = rotary_interleaved, implementation
    call = CALLS.find(APPEND.name, operands, options)
    if call is None:
        q_out = _check_and_append(operands, *options)
    else:
        check_pools(k_pages, v_pages)  # no address is in what `find` goes by
        (q_out,) = call(*operands)
        count_write(operands)
    return (k_pages, v_pages) if q_out is None else (q_out, k_pages, v_pages)


def _check_and_append(
    operands: AppendOperands[Tensor], interleaved: Any, implementation: Implementation | None
) -> Tensor | None:
    """Check the arguments of `append_kv` and run the operator; return the rotated queries."""
    operands = _cast_new(operands)
    check_append_options(interleaved)
    check_implementation(implementation)
    if not torch.compiler.is_compiling():  # else the operator's fake kernel checks them
        check_append(operands, interleaved)
    q_out = APPEND.op(*operands, interleaved, implementation)
    return None if operands.q is None else q_out


def _cast_new(operands: AppendOperands[Tensor]) -> AppendOperands[Tensor]:
    names = [x for x in ("k_new", "v_new", "q") if x == "k_new" or getattr(operands, x) is not None]
    return operands._replace(**{x: cast_float32(x, getattr(operands, x)) for x in names})


def merge_states(
    outs: Tensor, lses: Tensor, *, implementation: Implementation | None = None
) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys into attention over their union.

    ``lse = log(sum(exp(lses)))`` and ``out = sum(exp(lses - lse) · outs)``, in float32. Where a
    part's lse is -inf, its out may hold anything; where all are, out is 0 and lse -inf. A sink
    belongs in one part only.

    Works under `torch.compile` (`fullgraph`, static and dynamic shapes), `torch.func.grad` and in
    CUDA graphs. Differentiable once, in reverse mode.

    Args:
        outs: [N, B, H, Dv] or [N, B, S, H, Dv], N partial results, float16, bfloat16 or float32. Dv
            is 16 to 512 in steps of 8. Any strides with a contiguous last dimension.
        lses: [N, B, H] or [N, B, H, S] float32, their log-sum-exp, natural logarithm.
        implementation: "triton", "reference" or None, as in `flash_attention`.

    Returns:
        out [B, H, Dv] or [B, S, H, Dv] in the dtype of `outs`, and lse [B, H] or [B, H, S] float32.

    Raises:
        TypeError, ValueError, NotImplementedError: as in `flash_attention`.

    Source: Dao et al. 2022 (FlashAttention), section 3.1; Ye et al. 2025 (FlashInfer), section 2.2.

    Example::

        import torch
        from torch_attn import flash_attention, merge_states

        q, k, v = torch.randn(3, 1, 128, 4, 64)
        halves = [
            flash_attention(q, k[:, keys], v[:, keys], return_lse=True)
            for keys in (slice(0, 64), slice(64, 128))
        ]
        out, lse = merge_states(*map(torch.stack, zip(*halves)))
        torch.testing.assert_close(out, flash_attention(q, k, v))
    """
    check_tensor("outs", outs)
    check_implementation(implementation)
    if not torch.compiler.is_compiling():
        check_merge(outs, lses)
    single = outs.ndim == 4
    if single:
        outs, lses = outs.unsqueeze(2), lses.unsqueeze(3)
    out, lse = MERGE.op(outs, lses, implementation)
    return (out.squeeze(1), lse.squeeze(2)) if single else (out, lse)


def check_pages(
    k_pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    num_new_tokens: int | None = None,
) -> None:
    """Check lengths, page ids and offsets, which the functions of a paged cache do not check.

    It waits for the device: use it for debugging, not in a CUDA graph.

    Args:
        k_pages, block_tables, seq_lens: as in `paged_decode`.
        cu_seqlens_q: [B + 1] int32, offsets of the new tokens that `append_kv` writes. No two
            sequences may write to the same page.
        num_new_tokens: without offsets, each sequence's new tokens, 0 (sequences are only read) to
            64; None is 1.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes that contradict each other; offsets that `check_offsets` refuses; a
            length below 0 or past the capacity ``max_pages * page_size``; a used table entry that
            is no page of the pool; two sequences with new tokens in the same page. The message
            names the first such sequence.
        NotImplementedError: a page size or capacity that `paged_decode` does not take.

    Example::

        import torch
        from torch_attn import check_pages

        k_pages = torch.zeros(8, 16, 2, 64)
        block_tables = torch.tensor([[3, 0], [5, -1]], dtype=torch.int32)
        check_pages(k_pages, block_tables, torch.tensor([32, 16], dtype=torch.int32))
    """
    pool = operand("k_pages", k_pages)
    tables, lengths = operand("block_tables", block_tables), operand("seq_lens", seq_lens)
    offsets = None if cu_seqlens_q is None else operand("cu_seqlens_q", cu_seqlens_q)
    check_pages_arguments(pool, tables, lengths, offsets, num_new_tokens)
    check_page_ids(
        block_tables.numpy(force=True),
        seq_lens.numpy(force=True),
        None if cu_seqlens_q is None else cu_seqlens_q.numpy(force=True),
        num_new_tokens,
        k_pages.shape[:2],
    )


def problem_of_append(
    *, rotary_interleaved: Any, **arguments: Any
) -> tuple[AppendOperands[Tensor], AppendSpec]:
    operands = _cast_new(AppendOperands(**arguments))
    return operands, check_append(operands, check_append_options(rotary_interleaved))


def problem_of_merge(*, outs: Any, lses: Any) -> tuple[tuple[Tensor, Tensor], MergeSpec]:
    return (outs, lses), check_merge(outs, lses)
