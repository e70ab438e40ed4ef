from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from torch import Tensor

from torch_attn.dispatch import Implementation
from torch_attn.flash_ops import DENSE, or_as_torch_says
from torch_attn.keywords import FlashKeywords
from twin_attention.contract.spec import Precision
from twin_attention.contract.validate.names import refuse_names, without_catch_all


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor,
    *, return_lse: Literal[False] = ..., return_row_max: Literal[False] = ...,
    **keywords: Unpack[FlashKeywords],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor,
    *, return_lse: Literal[True], return_row_max: Literal[False] = ...,
    **keywords: Unpack[FlashKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor,
    *, return_lse: bool, return_row_max: Literal[False] = ...,
    **keywords: Unpack[FlashKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor,
    *, return_lse: Literal[False] = ..., return_row_max: Literal[True],
    **keywords: Unpack[FlashKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor,
    *, return_lse: Literal[True], return_row_max: Literal[True],
    **keywords: Unpack[FlashKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor,
    *, return_lse: bool = ..., return_row_max: bool,
    **keywords: Unpack[FlashKeywords],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
@without_catch_all
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *more: Any,
    causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    kv_ends: Tensor | None = None,
    q_depths: Tensor | None = None,
    kv_depths: Tensor | None = None,
    q_ranges: Tensor | None = None,
    bias: Tensor | None = None,
    relative_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_rate: float = 0,  # 0.0 would count as a number that changes to torch.compile
    dropout_seed: Tensor | None = None,
    deterministic: bool | None = None,
    precision: Precision = "ieee",
    return_lse: bool = False,
    return_row_max: bool = False,
    batch_invariant: bool = False,
    implementation: Implementation | None = None,
    **others: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Compute exact attention without storing the score matrix.

    It is ``softmax(scale · q·kᵀ) · v`` for each head, accumulated in float32. Query head h reads kv
    head ``h // (Hq // Hkv)``. Query i stands at key position ``p = i + Skv - Sq``. A query without
    keys has output 0 and log-sum-exp -inf or its head's sink. `docs/semantics.md` has the details.

    Works under autograd, `torch.compile` (`fullgraph`, static and dynamic shapes), `torch.func`
    (`grad`, `vjp`, `jvp`, `vmap`), CUDA graphs and autocast, which casts q, k and v as for
    `scaled_dot_product_attention`. Differentiable once, in reverse or forward mode.

    Args:
        q: [B, Sq, Hq, D], float16, bfloat16 or float32. D is 16 to 512 in steps of 8. Any strides
            with a contiguous last dimension, as for k and v.
        k: [B, Skv, Hkv, D], q's dtype. Hkv divides Hq.
        v: [B, Skv, Hkv, Dv], q's dtype. Dv has D's limits.
        causal: query i sees keys up to p.
        scale: factor of the scores; None is ``D ** -0.5``.
        window_size: (left, right): query i sees keys p - left to p + right. None is unlimited.
        softcap: scores become ``softcap * tanh(score / softcap)``, before the masks.
        sinks: [Hq] float32, float16 or bfloat16, a logit per head in the softmax's denominator,
            without a value.
        q_segment_ids: [B, Sq] int32, in any order: a query sees keys of its own segment. Negative
            ids are padding, which may hold NaN. Needs kv_segment_ids.
        kv_segment_ids: [B, Skv] int32.
        kv_ends: [B, Skv] int32, with causal=True: queries at ``j <= p < kv_ends[j]`` see key j.
            With tokens in depth-first order this is a tree: a token's end is its subtree's.
        q_depths: [B, Sq] int32, depths in the tree, 0 to 2^30 - 1, which window_size's left side
            counts instead of positions. Needs kv_depths.
        kv_depths: [B, Skv] int32.
        q_ranges: [B, Sq, R, 2] int32, R 1 or 2: a query also sees the keys ``begin <= j < end`` of
            its R ranges, whatever causal, window_size and kv_ends hide. `prefix_ranges`,
            `span_ranges` and `block_diffusion_ranges` make them.
        bias: [B, Hq, Sq, Skv], or 1 in place of any, float32 or q's dtype: added to the scaled
            scores before the softcap.
        relative_bias: [Hq, 2R + 1], float32 or q's dtype:
            ``relative_bias[h, clip(j - p, -R, R) + R]`` is added to scores as bias is.
        alibi_slopes: [Hq] or [B, Hq], a dtype of sinks, constants: ``alibi_slopes * |p - j|`` is
            subtracted after relative_bias.
        dropout_rate: share of probabilities to drop, at least 0 and below 1, rounded to a multiple
            of 2^-16. The others are divided by the share kept.
        dropout_seed: [2] int32 or uint32, decides what is dropped, in the backward too. Give each
            layer and step its own. With [4] the last two are the first batch element and query
            head, of a part of a batch.
        deterministic: True: the backward gives the same bits every time. False: it may add in any
            order, which can be faster. None: as ``torch.are_deterministic_algorithms_enabled()``
            says.
        precision: of float32 products: "ieee", or "tf32", which is less exact.
        return_lse: also return the log-sum-exp, which is differentiable.
        return_row_max: also return each row's largest visible score, without sinks and without a
            gradient.
        batch_invariant: a row's bits do not depend on the rest of the batch, packing, chunks or
            pages, so training and serving agree (docs/semantics.md). Implies ``deterministic=True``
            and torch_attn's Triton kernels.
        implementation: "gluon" (explicit kernels for SM80 and SM90), "triton" (Triton kernels; on a
            CPU in Triton's interpreter), "reference" (plain torch in float32, O(Sq · Skv) memory),
            or None: the fastest kernels for the problem on a CUDA device, the reference elsewhere.

    Returns:
        out [B, Sq, Hq, Dv] in q's dtype. With `return_lse` a tuple of out and lse [B, Hq, Sq],
        float32, natural logarithm; with `return_row_max` row_max [B, Hq, Sq], float32, comes last,
        -inf for a row that sees no key.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices, strides or values that contradict each other.
        NotImplementedError: a dtype, head dimension or device without kernels; a second
            derivative.

    Source: Dao et al. 2022 (FlashAttention); Dao 2023 (FlashAttention-2); sinks: Agarwal et al.
    2025 (gpt-oss); ends: Wang et al. 2024 (FlashMask); terms: Raffel et al. 2020 (T5), Press et al.
    2022 (ALiBi).

    Example::

        import torch
        from torch_attn import flash_attention

        q, k, v = torch.randn(3, 1, 128, 4, 64, requires_grad=True)
        out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
        out.sum().backward()
    """
    if more or others:
        refuse_names(flash_attention, more, others)
    operands = (
        q, k, v, sinks, q_segment_ids, kv_segment_ids, kv_ends, q_depths, kv_depths, q_ranges,
        bias, relative_bias, alibi_slopes, dropout_seed,
    )  # fmt: skip
    deterministic = or_as_torch_says(deterministic)
    options = (
        causal, scale, window_size, softcap, deterministic, precision, dropout_rate, return_row_max,
        batch_invariant, return_lse,
    )  # fmt: skip
    return DENSE(operands, options, implementation)
