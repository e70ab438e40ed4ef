from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from torch import Tensor

from torch_attn.decode_ops import PAGED_ATTENTION
from torch_attn.dispatch import Implementation
from torch_attn.keywords import PagedKeywords
from twin_attention.contract.validate.names import refuse_names, without_catch_all


@overload
def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor | None, block_tables: Tensor,
    seq_lens: Tensor, cu_seqlens_q: Tensor,
    *, return_lse: Literal[False] = ..., **keywords: Unpack[PagedKeywords],
) -> Tensor: ...  # fmt: skip
@overload
def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor | None, block_tables: Tensor,
    seq_lens: Tensor, cu_seqlens_q: Tensor,
    *, return_lse: Literal[True], **keywords: Unpack[PagedKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor | None, block_tables: Tensor,
    seq_lens: Tensor, cu_seqlens_q: Tensor,
    *, return_lse: bool, **keywords: Unpack[PagedKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@without_catch_all
def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
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
    q_ranges: Tensor | None = None,
    num_splits: int | None = None,
    value_dim: int | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention of any number of new tokens per sequence over a paged KV cache.

    It is `paged_decode` for chunks of prompts, whole prompts and single tokens in one batch.
    Sequence b has T new tokens, ``cu_seqlens_q[b] .. cu_seqlens_q[b + 1]``, maybe none; everything
    else is as there. Tokens past the last offset are padding: they may hold NaN, and see no key.

    The grid depends only on Tq, B and max_pages, and only the device reads offsets, lengths and
    tables: nothing waits for it, and a CUDA graph can be replayed with others. `check_offsets`
    and `check_pages` check them. Works as `paged_decode` does, with no derivative and no
    `vmap`.

    Args:
        q: [Tq, Hq, D], float16 or bfloat16. D is 16 to 512 in steps of 8. Any strides with a
            contiguous last dimension, as for all operands.
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
        implementation: "gluon" (explicit kernels for SM90, and long chunks or latent caches with
            many heads), "triton", "reference" (O(Tq · B · max_pages · page_size) memory) or None,
            as in `flash_attention`.

    Returns:
        out [Tq, Hq, Dv] in q's dtype; with `return_lse` the pair (out, lse), lse [Hq, Tq] in
        float32.

    Raises:
        TypeError, ValueError, NotImplementedError: as in `paged_decode`.

    Source: Kwon et al. 2023 (PagedAttention); Agrawal et al. 2023 (SARATHI, chunked prefills with
    decodes); Dao et al. 2023 (Flash-Decoding).

    Example::

        import torch
        from torch_attn import paged_attention

        k_pages, v_pages = torch.randn(2, 8, 16, 2, 64, dtype=torch.bfloat16)
        block_tables = torch.tensor([[3, 0], [5, 6]], dtype=torch.int32)
        seq_lens = torch.tensor([9, 32], dtype=torch.int32)
        cu_seqlens_q = torch.tensor([0, 1, 21], dtype=torch.int32)  # a decode, a chunk of 20
        q = torch.randn(21, 4, 64, dtype=torch.bfloat16)
        out = paged_attention(q, k_pages, v_pages, block_tables, seq_lens, cu_seqlens_q)
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
