"""Names that other libraries give to arguments, so that an error says ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

# What other libraries' names stand for here, a parameter first; "" is what nothing here needs.
_THEIRS = {
    "scale": "softmax_scale sm_scale scaling",
    "causal": "is_causal",
    "window_size": "window window_left sliding_window local_window_size",
    "softcap": "logits_soft_cap logit_cap soft_cap",
    "dropout_rate and dropout_seed": "dropout_p dropout dropout_rng",
    "bias=where(mask, 0, -inf), or segment ids for padding,": (
        "attn_mask attn_bias mask attention_mask key_padding_mask"
    ),
    "q_segment_ids and kv_segment_ids": "segment_ids",
    "sinks": "s_aux learnable_sink",
    "cu_seqlens_kv": "cu_seqlens_k",
    "seq_lens, which counts the new tokens too,": "cache_seqlens seqused_k",
    "block_tables": "block_table page_table",
    "return_lse": "return_attn_probs return_softmax_lse return_residual",
    "implementation": "backend",
    "": "max_seqlen max_seqlen_q max_seqlen_k max_seqlen_kv enable_gqa",
}
_OURS = {name: ours for ours, theirs in _THEIRS.items() for name in theirs.split()}


def answers_other_names(function: F) -> F:
    """Let a call with another library's names of arguments raise a TypeError that says ours."""
    parameters = signature(function).parameters
    positional = [x.name for x in parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            _check_names(function.__name__, parameters, positional, len(args), kwargs)
            raise

    return cast(F, call)


def _check_names(
    function: str,
    parameters: Iterable[str],
    positional: Sequence[str],
    num_positional: int,
    given: Iterable[str],
) -> None:
    for name in given:
        if name not in parameters and name in _OURS:
            ours = _OURS[name]
            has_it = re.split(r"\W", ours)[0] in parameters
            answer = f"takes {ours} in place of {name}" if has_it else f"takes no {name}"
            raise TypeError(f"{function}() {answer}; see docs/coming-from.md") from None
    if num_positional > len(positional):
        raise TypeError(
            f"{function}() takes {len(positional)} positional arguments ({', '.join(positional)}), "
            f"got {num_positional}; give others by name, as in docs/coming-from.md"
        ) from None
