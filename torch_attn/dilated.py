from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from torch_attn.decode import merge_states
from torch_attn.dilated_ops import once, place, take
from torch_attn.dispatch import Implementation
from torch_attn.flash import flash_attention
from torch_attn.flash_ops import or_as_torch_says
from torch_attn.operands import cast_inputs, operand
from twin_attention.contract.operands import FlashOperands, describe_operands
from twin_attention.contract.spec import AttentionSpec, DilatedSpec, Precision, dilated_calls
from twin_attention.contract.validate.dilated import (
    check_dilated_attention,
    check_dilations,
    check_segments,
)
from twin_attention.contract.validate.names import refuse_names, without_catch_all
from twin_attention.contract.validate.options import check_flash_options


@overload
def dilated_attention(
    q: Tensor, k: Tensor, v: Tensor, segment_lengths: Sequence[int],
    dilation_rates: Sequence[int], *,
    causal: bool = ..., scale: float | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., precision: Precision = ..., return_lse: Literal[False] = ...,
    implementation: Implementation | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def dilated_attention(
    q: Tensor, k: Tensor, v: Tensor, segment_lengths: Sequence[int],
    dilation_rates: Sequence[int], *,
    causal: bool = ..., scale: float | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., precision: Precision = ..., return_lse: Literal[True],
    implementation: Implementation | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def dilated_attention(
    q: Tensor, k: Tensor, v: Tensor, segment_lengths: Sequence[int],
    dilation_rates: Sequence[int], *,
    causal: bool = ..., scale: float | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., precision: Precision = ..., return_lse: bool,
    implementation: Implementation | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@without_catch_all
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *more: Any,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    precision: Precision = "ieee",
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention within segments of several lengths; longer segments are sparser.

    Pair i cuts the sequence into segments of ``segment_lengths[i]`` tokens. In each, kv head h and
    its query heads keep the tokens at positions p with ``p % r == h % r``, r =
    ``dilation_rates[i]``, and attend among these. A token's results from all pairs are merged as in
    `merge_states`; a key seen in several pairs counts once for each. A token that a head keeps in
    no pair has output 0 and log-sum-exp -inf.

    The kept tokens are gathered for `flash_attention`; pairs with the same ratio of length to rate
    share one call. A single pair of rate 1 copies nothing. Works as `flash_attention` does.

    Args:
        q: [B, S, Hq, D], as in `flash_attention`.
        k: [B, S, Hkv, D].
        v: [B, S, Hkv, Dv].
        segment_lengths: tokens per segment for each pair; a list or tuple. Each divides S.
        dilation_rates: for each pair, a head keeps one of so many tokens; a list or tuple. Each
            divides its segment length and may exceed the number of heads.
        causal, scale, softcap, deterministic, precision, return_lse: as in `flash_attention`.
        implementation: as in `flash_attention`. The merge uses it if it names portable kernels or
            the reference.

    Returns:
        out [B, S, Hq, Dv] in q's dtype; with `return_lse` the pair (out, lse), lse [B, Hq, S].

    Raises:
        TypeError, ValueError, NotImplementedError: as in `flash_attention`.

    Source: Ding et al. 2023 (LongNet), sections 2.2 and 2.3.

    Example::

        import torch
        from torch_attn import dilated_attention

        q, k, v = torch.randn(3, 1, 256, 4, 64, requires_grad=True)
        out = dilated_attention(q, k, v, [64, 128, 256], [1, 2, 4], causal=True)
        out.sum().backward()
    """
    if more or others:
        refuse_names(dilated_attention, more, others)
    q, k, v = cast_inputs(q, k, v)
    options: dict[str, Any] = {"causal": causal, "scale": scale, "softcap": softcap}
    options["deterministic"] = or_as_torch_says(deterministic)
    options["precision"] = precision
    if torch.compiler.is_compiling():  # there the operators' fake kernels check the operands
        dilations = check_dilations(segment_lengths, dilation_rates)
        check_segments(dilations, q.shape[1])
    else:
        pairs = segment_lengths, dilation_rates
        dilations = _check(q, k, v, *pairs, return_lse=return_lse, **options).dilations
        q, k, v = once(q), once(k), once(v)
    calls, heads_kv = dilated_calls(dilations), k.shape[2]
    states = []
    for call in calls:
        kept = [take(x, call, heads_kv) for x in (q, k, v)]
        options |= {"return_lse": True, "implementation": implementation}
        states.append(flash_attention(*kept, **options))
    outs, lses = place(states, calls, heads_kv, q.shape[:2])
    if len(outs) == 1:
        out, lse = outs[0], lses[0]
    else:
        merging = implementation if implementation in ("triton", "reference") else None
        out, lse = merge_states(outs, lses, implementation=merging)
    return (out, lse) if return_lse else out


def _check(
    q: Any, k: Any, v: Any, segment_lengths: Any, dilation_rates: Any, **options: Any
) -> DilatedSpec:
    checked = check_flash_options(window_size=None, **options)
    dilations = check_dilations(segment_lengths, dilation_rates)
    operands = describe_operands(FlashOperands(q, k, v), operand)
    return check_dilated_attention(operands, dilations, checked)


def problem_of_dilated(
    *, q: Any, k: Any, v: Any, **others: Any
) -> tuple[FlashOperands[Tensor], AttentionSpec]:
    """Check the arguments of `dilated_attention` and return operands and its longest call."""
    q, k, v = cast_inputs(q, k, v)
    return FlashOperands(q, k, v), _check(q, k, v, **others).longest_call
