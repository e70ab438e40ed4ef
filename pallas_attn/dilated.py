from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax

from pallas_attn.decode import merge_states
from pallas_attn.derivatives import once
from pallas_attn.dilated_ops import place, take
from pallas_attn.dispatch import Implementation
from pallas_attn.flash import flash_attention
from pallas_attn.flash_ops import or_as_xla_says
from pallas_attn.operands import operand
from twin_attention.contract.operands import FlashOperands, describe_operands
from twin_attention.contract.spec import AttentionSpec, DilatedSpec, Precision, dilated_calls
from twin_attention.contract.validate.dilated import check_dilated_attention, check_dilations
from twin_attention.contract.validate.names import refuse_names, without_catch_all
from twin_attention.contract.validate.options import check_flash_options


@overload
def dilated_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_lengths: Sequence[int],
    dilation_rates: Sequence[int], *,
    causal: bool = ..., scale: float | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., precision: Precision = ..., return_lse: Literal[False] = ...,
    implementation: Implementation | None = ...,
) -> jax.Array: ...  # fmt: skip
@overload
def dilated_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_lengths: Sequence[int],
    dilation_rates: Sequence[int], *,
    causal: bool = ..., scale: float | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., precision: Precision = ..., return_lse: Literal[True],
    implementation: Implementation | None = ...,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def dilated_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_lengths: Sequence[int],
    dilation_rates: Sequence[int], *,
    causal: bool = ..., scale: float | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., precision: Precision = ..., return_lse: bool,
    implementation: Implementation | None = ...,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
@without_catch_all
def dilated_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
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
) -> jax.Array | tuple[jax.Array, jax.Array]:
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

        import jax
        from pallas_attn import dilated_attention

        q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 256, 4, 64))
        attention = jax.jit(lambda q: dilated_attention(q, k, v, [64, 128, 256], [1, 2, 4]))
        out = attention(q)
    """
    if more or others:
        refuse_names(dilated_attention, more, others)
    options: dict[str, Any] = {"causal": causal, "scale": scale, "softcap": softcap}
    options["deterministic"] = or_as_xla_says(deterministic)
    options["precision"] = precision
    spec = _check(q, k, v, segment_lengths, dilation_rates, return_lse=return_lse, **options)
    calls, heads_kv = dilated_calls(spec.dilations), spec.heads_kv
    q, k, v = once((q, k, v), "dilated_attention")
    states = []
    for call in calls:
        kept = [take(x, call, heads_kv) for x in (q, k, v)]
        options |= {"return_lse": True, "implementation": implementation}
        states.append(flash_attention(*kept, **options))
    outs, lses = place(states, calls, heads_kv, q.shape[:2])
    if len(outs) == 1:
        out, lse = outs[0], lses[0]
    else:
        merges = ("triton", "torch_triton", "reference")
        merging = implementation if implementation in merges else None
        out, lse = merge_states(outs, lses, implementation=merging)
    return once((out, lse) if return_lse else out, "dilated_attention")


def _check(
    q: Any, k: Any, v: Any, segment_lengths: Any, dilation_rates: Any, **options: Any
) -> DilatedSpec:
    checked = check_flash_options(window_size=None, **options)
    dilations = check_dilations(segment_lengths, dilation_rates)
    operands = describe_operands(FlashOperands(q, k, v), operand)
    return check_dilated_attention(operands, dilations, checked)


def problem_of_dilated(
    *, q: Any, k: Any, v: Any, **others: Any
) -> tuple[FlashOperands[jax.Array], AttentionSpec]:
    """Check the arguments of `dilated_attention` and return operands and its longest call."""
    return FlashOperands(q, k, v), _check(q, k, v, **others).longest_call
