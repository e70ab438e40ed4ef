from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax

from pallas_attn.dispatch import Implementation
from pallas_attn.flash_ops import DENSE, or_as_xla_says
from pallas_attn.keywords import FlashKeywords
from twin_attention.contract.spec import Precision
from twin_attention.contract.validate.names import refuse_names, without_catch_all


@overload
def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array,
    *, return_lse: Literal[False] = ..., return_row_max: Literal[False] = ...,
    **keywords: Unpack[FlashKeywords],
) -> jax.Array: ...  # fmt: skip
@overload
def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array,
    *, return_lse: Literal[True], return_row_max: Literal[False] = ...,
    **keywords: Unpack[FlashKeywords],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array,
    *, return_lse: bool, return_row_max: Literal[False] = ...,
    **keywords: Unpack[FlashKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array,
    *, return_lse: Literal[False] = ..., return_row_max: Literal[True],
    **keywords: Unpack[FlashKeywords],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array,
    *, return_lse: Literal[True], return_row_max: Literal[True],
    **keywords: Unpack[FlashKeywords],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...  # fmt: skip
@overload
def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array,
    *, return_lse: bool = ..., return_row_max: bool,
    **keywords: Unpack[FlashKeywords],
) -> jax.Array | tuple[jax.Array, ...]: ...  # fmt: skip
@without_catch_all
def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *more: Any,
    causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    kv_ends: jax.Array | None = None,
    q_depths: jax.Array | None = None,
    kv_depths: jax.Array | None = None,
    q_ranges: jax.Array | None = None,
    bias: jax.Array | None = None,
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
    """Compute exact attention without storing the score matrix.

    It is ``softmax(scale · q·kᵀ) · v`` for each head, accumulated in float32. Query head h reads kv
    head ``h // (Hq // Hkv)``. Query i stands at key position ``p = i + Skv - Sq``. A query without
    keys has output 0 and log-sum-exp -inf or its head's sink. `docs/semantics.md` has the details.

    Works under `jit`, `grad`, `vmap`, `jax.checkpoint`, `lax.scan` and `shard_map`. Devices that
    share q, k and v by batch or heads compute their own. Symbolic sizes of `jax.export` need
    ``implementation="reference"``. Differentiable once, in reverse or forward mode (`jax.jvp`,
    `jax.linearize`). Tracing fixes the kernels' target (`twin_attention.targets.target`).

    Args:
        q: [B, Sq, Hq, D], float16, bfloat16 or float32. D is 16 to 512 in steps of 8.
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
            order, which can be faster. None: as ``--xla_gpu_deterministic_ops`` in ``XLA_FLAGS``
            says.
        precision: of float32 products: "ieee", or "tf32", which is less exact.
        return_lse: also return the log-sum-exp, which is differentiable.
        return_row_max: also return each row's largest visible score, without sinks and without a
            gradient.
        batch_invariant: a row's bits do not depend on the rest of the batch, packing, chunks or
            pages, so training and serving agree (docs/semantics.md). Implies ``deterministic=True``
            and torch_attn's Triton kernels.
        implementation: "mosaic" (explicit kernels for SM80 and SM90; from jax 0.11 on), "triton"
            (Pallas kernels in the Triton lowering; on a CPU in the Pallas interpreter), "gluon"
            (torch_attn's Gluon kernels, inside this program), "torch_triton" (torch_attn's Triton
            kernels), "reference" (plain JAX in float32, O(Sq · Skv) memory), or None: the fastest
            kernels for the problem on a CUDA device, the reference elsewhere.

    Returns:
        out [B, Sq, Hq, Dv] in q's dtype. With `return_lse` a tuple of out and lse [B, Hq, Sq],
        float32, natural logarithm; with `return_row_max` row_max [B, Hq, Sq], float32, comes last,
        -inf for a row that sees no key.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values that contradict each other.
        NotImplementedError: a dtype, head dimension or device without kernels; a second
            derivative.

    Source: Dao et al. 2022 (FlashAttention); Dao 2023 (FlashAttention-2); sinks: Agarwal et al.
    2025 (gpt-oss); ends: Wang et al. 2024 (FlashMask); terms: Raffel et al. 2020 (T5), Press et al.
    2022 (ALiBi).

    Example::

        import jax
        from pallas_attn import flash_attention

        q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 128, 4, 64))
        attention = jax.jit(lambda *qkv: flash_attention(*qkv, causal=True, return_lse=True))
        out, lse = attention(q, k, v)
    """
    if more or others:
        refuse_names(flash_attention, more, others)
    operands = (
        q, k, v, sinks, q_segment_ids, kv_segment_ids, kv_ends, q_depths, kv_depths, q_ranges,
        bias, relative_bias, alibi_slopes, dropout_seed,
    )  # fmt: skip
    deterministic = or_as_xla_says(deterministic)
    options = (
        causal, scale, window_size, softcap, deterministic, precision, dropout_rate, return_row_max,
        batch_invariant, return_lse,
    )  # fmt: skip
    return DENSE(operands, options, implementation)
