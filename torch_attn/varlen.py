from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from torch import Tensor

from torch_attn.dispatch import Implementation
from torch_attn.flash_ops import PACKED, or_as_torch_says
from torch_attn.keywords import VarlenKeywords
from torch_attn.operands import operand
from twin_attention.contract.spec import Precision
from twin_attention.contract.validate.names import refuse_names, without_catch_all
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
@without_catch_all
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    *more: Any,
    causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_ends: Tensor | None = None,
    q_depths: Tensor | None = None,
    kv_depths: Tensor | None = None,
    q_ranges: Tensor | None = None,
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
    """Compute exact attention within each of N packed sequences.

    Sequence n has queries ``cu_seqlens_q[n] .. cu_seqlens_q[n + 1]`` and keys
    ``cu_seqlens_kv[n] .. cu_seqlens_kv[n + 1]``, maybe none, and the result of `flash_attention`
    over these. Tokens past the last offset are padding: they may hold NaN, and see no key.

    The grid depends only on Tq, Tkv and N, and only the device reads the offsets: nothing waits for
    it, and a CUDA graph can be replayed with other offsets. `check_offsets` checks them; no
    memory outside the tensors is touched. Works as `flash_attention` does, but not under
    `vmap`.

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

        import torch
        from torch_attn import flash_attention_varlen

        q, k, v = torch.randn(3, 128, 4, 64, requires_grad=True)
        offsets = torch.tensor([0, 40, 100], dtype=torch.int32)  # 40 and 60 tokens, padding
        out = flash_attention_varlen(q, k, v, offsets, offsets, causal=True)
        out.sum().backward()
    """
    if more or others:
        refuse_names(flash_attention_varlen, more, others)
    operands = (
        q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks, kv_ends, q_depths, kv_depths, q_ranges,
        relative_bias, alibi_slopes, dropout_seed,
    )  # fmt: skip
    deterministic = or_as_torch_says(deterministic)
    options = (
        causal, scale, window_size, softcap, deterministic, precision, dropout_rate, return_row_max,
        batch_invariant, return_lse,
    )  # fmt: skip
    return PACKED(operands, options, implementation)


def check_offsets(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, *, tokens_q: int, tokens_kv: int
) -> None:
    """Check offsets, which `flash_attention_varlen` itself does not check.

    It waits for the device: use it for debugging, not in a CUDA graph.

    Args:
        cu_seqlens_q, cu_seqlens_kv: [N + 1] int32.
        tokens_q, tokens_kv: Tq and Tkv, the lengths of the packed axes.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes that contradict each other; a first offset that is not 0, a decreasing
            one, or one that exceeds the tokens. The message names the first such offset.

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
