"""Argument checks: the only place that writes an error message about an argument.

Every message reads ``name: expected ..., got ...``. `ValueError` and `TypeError` are for what
is wrong anywhere, `NotImplementedError` for what is valid but not supported here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NoReturn

from interop.contract.spec import (
    DTYPES,
    HEAD_DIM_MAX,
    HEAD_DIM_MIN,
    HEAD_DIM_STEP,
    AttentionSpec,
    Window,
)


@dataclass(frozen=True)
class Operand:
    """What a check needs to know of a tensor, whichever framework owns it.

    Attributes:
        name: the argument's name, as messages print it.
        shape: dimensions.
        dtype: the framework's dtype name without a prefix, such as "bfloat16".
        device: a comparable name such as "cpu" or "cuda:0"; None when it is not known (a tracer).
        contiguous_rows: False when the last dimension has a stride other than 1.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str | None = None
    contiguous_rows: bool = True


def fail(error: type[Exception], name: str, expected: str, got: object) -> NoReturn:
    """Raise `error` in the project's one message format."""
    raise error(f"{name}: expected {expected}, got {got}")


def not_a_tensor(name: str, got: object) -> NoReturn:
    """Refuse an argument that is no tensor of the calling framework."""
    fail(TypeError, name, "a tensor of the calling framework", type(got).__name__)


def not_differentiable(what: str, instead: str) -> NoReturn:
    """Refuse a derivative that has no formula here, and name the way out."""
    raise NotImplementedError(
        f"flash_attention: {what} is not supported; reverse mode, once, is. {instead}"
    )


def check_flash_attention(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    causal: Any,
    scale: Any,
    window_size: Any,
    softcap: Any,
) -> AttentionSpec:
    """Check every argument of `flash_attention` and describe the problem.

    Raises:
        ValueError: ranks, sizes, devices, strides or values that contradict each other.
        TypeError: an argument of the wrong type or dtype.
        NotImplementedError: a head size or dtype that the kernels do not take.
    """
    _check_operands(q, k, v)
    batch, seq_q, heads_q, head_dim = q.shape
    _, seq_kv, heads_kv, _ = k.shape
    head_dim_v = v.shape[3]
    return AttentionSpec(
        batch=batch,
        seq_q=seq_q,
        seq_kv=seq_kv,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=q.dtype,
        scale=_resolve_scale(scale, head_dim),
        window=Window.of(_check_flag("causal", causal), _resolve_window(window_size)),
        softcap=_resolve_softcap(softcap),
    )


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a name that is not one of `choices` (None passes)."""
    if value is not None and value not in choices:
        fail(ValueError, name, "None or one of " + ", ".join(map(repr, choices)), repr(value))


def _check_operands(q: Operand, k: Operand, v: Operand) -> None:
    for x, layout in ((q, "[B, Sq, Hq, D]"), (k, "[B, Skv, Hkv, D]"), (v, "[B, Skv, Hkv, Dv]")):
        if len(x.shape) != 4:
            fail(ValueError, x.name, f"4 dimensions {layout}", f"shape {tuple(x.shape)}")
    for x in (q, k, v):
        if "float" not in x.dtype:
            fail(TypeError, x.name, "a floating-point dtype", x.dtype)
    for x in (q, k, v):
        if x.dtype not in DTYPES:
            fail(NotImplementedError, x.name, "dtype " + ", ".join(DTYPES), x.dtype)
    for x in (k, v):
        if x.dtype != q.dtype:
            fail(TypeError, x.name, f"q's dtype {q.dtype}", x.dtype)
    for x in (k, v):
        if x.device is not None and q.device is not None and x.device != q.device:
            fail(ValueError, x.name, f"q's device {q.device}", x.device)
    for x in (k, v):
        if x.shape[0] != q.shape[0]:
            fail(ValueError, x.name, f"q's batch size {q.shape[0]}", x.shape[0])
    if v.shape[1] != k.shape[1]:
        fail(ValueError, "v", f"k's length {k.shape[1]}", v.shape[1])
    if v.shape[2] != k.shape[2]:
        fail(ValueError, "v", f"k's {k.shape[2]} heads", v.shape[2])
    if k.shape[3] != q.shape[3]:
        fail(ValueError, "k", f"q's head size {q.shape[3]}", k.shape[3])
    heads_q, heads_kv = q.shape[2], k.shape[2]
    if (heads_kv == 0 and heads_q != 0) or (heads_kv != 0 and heads_q % heads_kv != 0):
        fail(ValueError, "q", f"a number of heads divisible by k's {heads_kv}", heads_q)
    for x in (q, v):
        size = x.shape[3]
        if size % HEAD_DIM_STEP or not HEAD_DIM_MIN <= size <= HEAD_DIM_MAX:
            supported = (
                f"a head size from {HEAD_DIM_MIN} to {HEAD_DIM_MAX} in steps of {HEAD_DIM_STEP}"
            )
            fail(NotImplementedError, x.name, supported, size)
    for x in (q, k, v):
        if not x.contiguous_rows:
            fail(ValueError, x.name, "a contiguous last dimension", "a stride other than 1")


def _check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        fail(TypeError, name, "a bool", type(value).__name__)
    return value


def _resolve_scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    return _check_number("scale", scale, "a finite number or None")


def _resolve_softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    expected = "a finite positive number or None"
    value = _check_number("softcap", softcap, expected)
    if value <= 0:
        fail(ValueError, "softcap", expected, softcap)
    return value


def _check_number(name: str, value: Any, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        fail(TypeError, name, expected, type(value).__name__)
    if not math.isfinite(value):
        fail(ValueError, name, expected, value)
    return float(value)


def _resolve_window(window_size: Any) -> tuple[int | None, int | None] | None:
    if window_size is None:
        return None
    expected = "None or a pair (left, right) of non-negative integers or None"
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        fail(TypeError, "window_size", expected, repr(window_size))
    for side in window_size:
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, Integral):
            fail(TypeError, "window_size", expected, repr(tuple(window_size)))
        if side < 0:
            fail(ValueError, "window_size", expected, repr(tuple(window_size)))
    left, right = (None if side is None else int(side) for side in window_size)
    return left, right
