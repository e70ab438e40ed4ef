"""Checks of shared options, and of the numbers, bools and names in them.

They only look at types and compare numbers, so that `torch.compile` can trace them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from twin_attention.contract.paged_spec import LATENT_DIM_MAX, SPLITS_MAX, DecodeOptions
from twin_attention.contract.spec import PRECISIONS, WINDOW_UNLIMITED, FlashOptions, Precision
from twin_attention.contract.validate.errors import fail, type_name


def check_flash_options(
    causal: Any,
    scale: Any,
    window_size: Any,
    softcap: Any,
    deterministic: Any,
    precision: Any,
    return_lse: Any,
) -> FlashOptions:
    _check_flag("return_lse", return_lse)
    number, cap = _resolve_scale(scale), _resolve_softcap(softcap)
    number, causal = _scale_within(number, cap), _check_flag("causal", causal)
    left, right = _resolve_window(window_size)
    if deterministic is not None:
        _check_flag("deterministic", deterministic, or_else="None or ")
    right = 0 if causal else right
    return FlashOptions(number, left, right, cap, deterministic, _check_precision(precision))


def check_attention_options(
    causal: Any,
    scale: Any,
    window_size: Any,
    softcap: Any,
    deterministic: Any,
    precision: Any,
    dropout_rate: Any,
    return_row_max: Any,
    batch_invariant: Any,
    return_lse: Any,
) -> FlashOptions:
    options = check_flash_options(
        causal, scale, window_size, softcap, deterministic, precision, return_lse
    )
    options = options._replace(
        row_max=_check_flag("return_row_max", return_row_max),
        dropout_rate=_check_rate(dropout_rate),
        batch_invariant=_check_flag("batch_invariant", batch_invariant),
    )
    return options._replace(deterministic=True) if batch_invariant else options


def check_decode_options(
    causal: Any, scale: Any, window_size: Any, softcap: Any, num_splits: Any, value_dim: Any,
    cascade: Any, batch_invariant: Any, return_lse: Any,
) -> DecodeOptions:  # fmt: skip
    _check_flag("return_lse", return_lse)
    if not _check_flag("causal", causal):
        expected = "True: new tokens see keys up to their own position"
        fail(NotImplementedError, "causal", expected, causal)
    left, _ = _resolve_window(window_size)
    number, cap = _resolve_scale(scale), _resolve_softcap(softcap)
    return DecodeOptions(
        _scale_within(number, cap),
        left,
        cap,
        None
        if num_splits is None
        else check_integer("num_splits", num_splits, 1, SPLITS_MAX, or_else="None or "),
        _check_cascade(cascade, num_splits),
        None
        if value_dim is None
        else check_integer("value_dim", value_dim, 1, LATENT_DIM_MAX, or_else="None or "),
        _check_flag("batch_invariant", batch_invariant),
    )


def check_paged_options(
    causal: Any, scale: Any, window_size: Any, softcap: Any, num_splits: Any, value_dim: Any,
    batch_invariant: Any, return_lse: Any,
) -> DecodeOptions:  # fmt: skip
    return check_decode_options(
        causal, scale, window_size, softcap, num_splits, value_dim, False, batch_invariant,
        return_lse,
    )  # fmt: skip


def check_append_options(rotary_interleaved: Any) -> bool:
    return _check_flag("rotary_interleaved", rotary_interleaved)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a name that is not one of `choices` (None passes)."""
    if value is not None and value not in choices:
        fail(ValueError, name, "None or one of " + ", ".join(map(repr, choices)), repr(value))


def check_integer(name: str, value: Any, least: int, most: int, or_else: str = "") -> int:
    """Check an integer from `least` to `most`, and return it as an int."""
    expected = f"{or_else}an integer from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        fail(TypeError, name, expected, _got(value, repr(value)))
    integer = int(value)
    if not least <= integer <= most:
        fail(ValueError, name, expected, integer)
    return integer


def _got(x: object, described: str) -> str:
    """Return how a message prints a wrong option; a value that JAX traces is no option."""
    if type(x).__name__[-6:] == "Tracer":  # torch.compile of torch 2.11 traces no `endswith`
        return "a traced value; options are static: pass it by static_argnames"
    return described


def _check_cascade(cascade: Any, num_splits: Any) -> bool:
    """Check cascade: its sums depend on the batch, which num_splits excludes."""
    if _check_flag("cascade", cascade) and num_splits is not None:
        expected = "False with num_splits, whose results do not depend on the batch"
        fail(ValueError, "cascade", expected, cascade)
    return cascade


def _check_flag(name: str, value: Any, or_else: str = "") -> bool:
    if not isinstance(value, bool):
        fail(TypeError, name, f"{or_else}a bool", _got(value, type_name(value)))
    return value


def _check_rate(rate: Any) -> float:
    expected = "a number from 0 on that is less than 1"
    if isinstance(rate, bool) or not isinstance(rate, Real):
        fail(TypeError, "dropout_rate", expected, _got(rate, type_name(rate)))
    number = float(rate)
    if not 0 <= number < 1:
        fail(ValueError, "dropout_rate", expected, rate)
    return number


def _check_precision(precision: Any) -> Precision:
    if precision not in PRECISIONS:
        fail(ValueError, "precision", "one of " + ", ".join(map(repr, PRECISIONS)), repr(precision))
    return precision


def _resolve_scale(scale: Any) -> float | None:
    return None if scale is None else _check_number("scale", scale, "a finite number or None")


def _resolve_softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    expected = "a positive number up to 2**100 or None"
    value = _check_number("softcap", softcap, expected)
    if not 0 < value <= 2.0**100:  # numbers divided by a larger one would be flushed to 0
        fail(ValueError, "softcap", expected, softcap)
    return value


def _scale_within(scale: float | None, softcap: float | None) -> float | None:
    """Return the scale, or 0 where `scale / softcap` is below the normal numbers."""
    if scale is None or softcap is None:
        return scale
    tiny = 2.0**-126 * softcap
    return 0.0 if -tiny < scale < tiny else scale


def _check_number(name: str, value: Any, expected: str) -> float:
    """Check a number that kernels take as float32, where numbers below the normal ones are 0.

    `torch.compile` could not trace its rounding, and would treat global bounds as unknown numbers.
    """
    infinite, tiny = 2.0**128 - 2.0**103, 2.0**-126  # what rounds to infinity; the least normal
    if isinstance(value, bool) or not isinstance(value, Real):
        fail(TypeError, name, expected, _got(value, type_name(value)))
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction
        number = math.inf
    if not -infinite < number < infinite:
        fail(ValueError, name, expected, value)
    return 0.0 if -tiny < number < tiny else number


def _resolve_window(window_size: Any) -> tuple[int | None, int | None]:
    if window_size is None:
        return None, None
    expected = "None or a tuple (left, right) of non-negative integers or None"
    if not isinstance(window_size, tuple) or len(window_size) != 2:  # a list has no hash
        fail(TypeError, "window_size", expected, repr(window_size))
    for side in window_size:
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, Integral):
            fail(TypeError, "window_size", expected, _got(side, repr(window_size)))
        if side < 0:
            fail(ValueError, "window_size", expected, repr(window_size))
    left, right = (
        None if side is None or side >= WINDOW_UNLIMITED else int(side) for side in window_size
    )
    return left, right
