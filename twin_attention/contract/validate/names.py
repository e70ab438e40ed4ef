"""Names that other libraries give to arguments, so that an error says ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from inspect import signature
from typing import Any, NoReturn, TypeVar

from twin_attention.contract.validate.errors import fail

F = TypeVar("F", bound=Callable[..., Any])

# What other libraries' names stand for here, an option first; "" is what nothing here needs.
# If a tensor that is required has another name, Python's own error names it.
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
    "return_lse": "return_attn_probs return_softmax_lse return_residual",
    "implementation": "backend",
    "": "max_seqlen max_seqlen_q max_seqlen_k max_seqlen_kv enable_gqa",
}
_OURS = {name: ours for ours, theirs in _THEIRS.items() for name in theirs.split()}


def without_catch_all(function: F) -> F:
    """Leave ``*more`` and ``**others`` out of a function's signature.

    They only take what `refuse_names` refuses; catching Python's own error costs each call more.
    """
    own = signature(function)
    shown = [x for x in own.parameters.values() if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    function.__signature__ = own.replace(parameters=shown)  # pyright: ignore[reportFunctionMemberAccess]
    return function


def refuse_names(
    function: Callable[..., Any], more: tuple[Any, ...], others: dict[str, Any]
) -> NoReturn:
    """Refuse arguments that a function does not take, with our names for those of other libraries.

    Args:
        more: arguments by position behind the last that has one.
        others: arguments by a name that is none of the function's.
    """
    name, parameters = function.__name__, signature(function).parameters
    for theirs in others:
        if theirs in _OURS:
            ours = _OURS[theirs]
            has_it = re.split(r"\W", ours)[0] in parameters
            answer = f"takes {ours} in place of {theirs}" if has_it else f"takes no {theirs}"
            raise TypeError(f"{name}() {answer}; see docs/coming-from.md")
        if theirs in ("bias", "relative_bias"):
            expected = f"no such argument of {name} (docs/non-goals.md)"
            fail(NotImplementedError, theirs, expected, "one")
        close = get_close_matches(theirs, parameters, 1)
        hint = f". Did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"{name}() got an unexpected keyword argument {theirs!r}{hint}")
    positional = [x.name for x in parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    raise TypeError(
        f"{name}() takes {len(positional)} positional arguments ({', '.join(positional)}), "
        f"got {len(positional) + len(more)}; give others by name, as in docs/coming-from.md"
    )
