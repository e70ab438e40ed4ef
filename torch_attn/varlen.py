"""The public functions of flash attention over packed sequences: check the arguments, run it."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from torch import Tensor

from torch_attn.dispatch import Implementation
from torch_attn.flash_ops import PACKED, or_as_torch_says
from torch_attn.keywords import VarlenKeywords
from torch_attn.operands import operand
from twin_attention.contract.spec import Precision
from twin_attention.contract.validate.offsets import check_offset_values, check_offsets_arguments


@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor,
    *, return_lse: Literal[False] = ..., return_row_max: Literal[False] = ...,
    **keywords: Unpack[VarlenKeywords],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor,
    *, return_lse: Literal[True], return_row_max: Literal[False] = ...,
    **keywords: Unpack[VarlenKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor,
    *, return_lse: bool, return_row_max: Literal[False] = ...,
    **keywords: Unpack[VarlenKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor,
    *, return_lse: Literal[False] = ..., return_row_max: Literal[True],
    **keywords: Unpack[VarlenKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor,
    *, return_lse: Literal[True], return_row_max: Literal[True],
    **keywords: Unpack[VarlenKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor,
    *, return_lse: bool = ..., return_row_max: bool,
    **keywords: Unpack[VarlenKeywords],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_ends: Tensor | None = None,
    q_depths: Tensor | None = None,
    kv_depths: Tensor | None = None,
    relative_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_rate: float = 0,  # 0.0 would count as a number that changes to torch.compile
    dropout_seed: Tensor | None = None,
    deterministic: bool | None = None,
    precision: Precision = "ieee",
    return_lse: bool = False,
    return_row_max: bool = False,
    implementation: Implementation | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention within each of N sequences that are packed one after the other.

    Sequence n has queries ``cu_seqlens_q[n] .. cu_seqlens_q[n + 1]`` and keys ``cu_seqlens_kv[n] ..
    cu_seqlens_kv[n + 1]``. Each is what `flash_attention` computes for it alone: query i of a
    sequence stands at its key position ``p = i + (its keys) - (its queries)``, and lengths may be
    0. Tokens past the last offset are padding and may hold NaN: a query there sees no key and gives
    0, log-sum-exp -inf or its head's sink, and gradients 0 but for the sink's.

    The grid follows from Tq, Tkv and N, and the offsets are read on the device alone: nothing waits
    for it, and a CUDA graph may be replayed with others. Nothing checks them (`check_offsets`
    does); whatever they are, no memory outside the tensors is touched. Works under autograd,
    `torch.compile`, `torch.func` (`grad`, `vjp`) and autocast, as `flash_attention` does, but not
    under `vmap`. Differentiable once, in reverse mode.

    Args:
        q: [Tq, Hq, D], float16, bfloat16 or float32. D is 16 to 256 in steps of 8.
        k: [Tkv, Hkv, D], q's dtype. Hq is a multiple of Hkv.
        v: [Tkv, Hkv, Dv], q's dtype. Dv has D's limits and need not be D.
        cu_seqlens_q: [N + 1] int32, offsets of the sequences' queries: 0 first, never decreasing,
            Tq at most.
        cu_seqlens_kv: [N + 1] int32, the same of their keys, Tkv at most.
        causal: query i sees keys up to p.
        scale: factor of the scores; None is ``D ** -0.5``.
        window_size: (left, right): query i sees keys from p - left to p + right. None, for the
            pair or a side, is unlimited.
        softcap: scores become ``softcap * tanh(score / softcap)``, before the masks.
        sinks: [Hq] float32, a logit of each head that counts in the softmax's denominator and in
            the log-sum-exp, and has no value. None is no such logit.
        kv_ends: [Tkv] int32, as `flash_attention` takes it, counted from the sequence's first key.
        q_depths: [Tq] int32, as `flash_attention` takes it.
        kv_depths: [Tkv] int32, as `flash_attention` takes it.
        relative_bias: [Hq, 2R + 1], float32 or q's dtype: a score gets ``relative_bias[h, clip(j -
            p, -R, R) + R]``, after the scale and before the softcap. Its gradient is a sum over all
            pairs. Buckets of distances, as T5 has them, expand to it.
        alibi_slopes: [Hq] or [N, Hq], float32: a score loses ``alibi_slopes * |p - j|``, after
            relative_bias. They are constants: their gradient is none, or 0.
        dropout_rate: as `flash_attention` takes it.
        dropout_seed: [2] int32 or uint32, as `flash_attention` takes it; a sequence drops what an
            element of a batch in its place does.
        deterministic: True: the backward gives the same bits every time. False: it may add in any
            order, which is faster where the kernels can. None: as
            ``torch.are_deterministic_algorithms_enabled()`` says.
        precision: of float32 products. "ieee", or "tf32": their operands are rounded to 10 bits
            of mantissa, for tensor cores, which take them so. No effect on 16-bit operands.
        return_lse: return the log-sum-exp of the scores as well. It is differentiable.
        return_row_max: return the largest score of each row as well, of the keys that it sees,
            after scale and softcap. Sinks do not count. It has no gradient.
        implementation: "gluon" (explicit kernels for SM80 and SM90), "triton"
            (Triton kernels; on a CPU in Triton's interpreter), "mosaic" (the kernels of pallas_attn
            in Mosaic GPU, on torch's stream), "reference" (plain torch in float32,
            O(Tq · Tkv) memory), or None: the fastest kernels for the problem on a CUDA device, the
            reference elsewhere.

    Returns:
        out [Tq, Hq, Dv] in q's dtype. With `return_lse` a tuple of out and lse [Hq, Tq], float32,
        natural logarithm; with `return_row_max` row_max [Hq, Tq], float32, comes last, -inf for a
        row that sees no key.

    Raises:
        TypeError: an argument is not a `torch.Tensor` or has the wrong type or dtype.
        ValueError: shapes, devices or values that contradict each other.
        NotImplementedError: a dtype, head dimension or device without kernels; forward mode; a
            second derivative.

    Source: Dao 2023 (FlashAttention-2), whose ``flash_attn_varlen_func`` takes such offsets.

    Example::

        import torch
        from torch_attn import flash_attention_varlen

        q, k, v = torch.randn(3, 128, 4, 64, requires_grad=True)
        offsets = torch.tensor([0, 40, 100], dtype=torch.int32)  # 40 and 60 tokens, padding
        out = flash_attention_varlen(q, k, v, offsets, offsets, causal=True)
        out.sum().backward()
    """
    operands = (
        q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks, kv_ends, q_depths, kv_depths, relative_bias,
        alibi_slopes, dropout_seed,
    )  # fmt: skip
    deterministic = or_as_torch_says(deterministic)
    options = (
        causal, scale, window_size, softcap, deterministic, precision, dropout_rate, return_row_max,
        return_lse,
    )  # fmt: skip
    return PACKED(operands, options, implementation)


def check_offsets(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, *, tokens_q: int, tokens_kv: int
) -> None:
    """Check the offsets that `flash_attention_varlen` takes as data, unchecked.

    Waits for the device and reads values, so it is for debugging and not for a CUDA graph.

    Args:
        cu_seqlens_q, cu_seqlens_kv: [N + 1] int32.
        tokens_q, tokens_kv: Tq and Tkv, the numbers of tokens that the sequences share.

    Raises:
        TypeError: an argument is not a `torch.Tensor` or has the wrong type or dtype.
        ValueError: shapes that contradict each other; a first offset that is not 0, one that is
            less than the one before it, or one that exceeds the tokens. The message names the first
            such offset.

    Example::

        import torch
        from torch_attn import check_offsets

        offsets = torch.tensor([0, 40, 100], dtype=torch.int32)
        check_offsets(offsets, offsets, tokens_q=128, tokens_kv=128)
    """
    of_q, of_kv = operand("cu_seqlens_q", cu_seqlens_q), operand("cu_seqlens_kv", cu_seqlens_kv)
    check_offsets_arguments(of_q, of_kv, tokens_q, tokens_kv)
    check_offset_values(of_q.name, cu_seqlens_q.numpy(force=True), tokens_q)
    check_offset_values(of_kv.name, cu_seqlens_kv.numpy(force=True), tokens_kv)
