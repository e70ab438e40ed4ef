"""Tensors as the checks see them, and the checks that several functions share."""

from __future__ import annotations

from typing import NamedTuple

from twin_attention.contract.operands import (
    BlockSparseOperands,
    DecodeOperands,
    FlashOperands,
    PagedOperands,
    VarlenOperands,
)
from twin_attention.contract.spec import DTYPES, HEAD_DIM_MAX, HEAD_DIM_MIN, HEAD_DIM_STEP
from twin_attention.contract.validate.errors import fail


class Operand(NamedTuple):
    """A tensor as the argument checks see it, whichever framework owns it.

    Attributes:
        dtype: the framework's dtype name without a prefix, such as "bfloat16".
        device: a comparable name such as "cpu" or "cuda:0"; None when it is not known (a tracer).
        contiguous_rows: False when the last dimension has a stride other than 1.
        even_rows: False when a row begins at an odd offset, or at an odd distance from others, in
            elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str | None = None
    contiguous_rows: bool = True
    even_rows: bool = True


def check_qkv(
    operands: FlashOperands[Operand] | VarlenOperands[Operand] | BlockSparseOperands[Operand],
    layouts: tuple[str, str, str],
) -> None:
    """Check that q, k and v have these layouts and fit each other."""
    q, k, v = operands.q, operands.k, operands.v
    for x, layout in zip((q, k, v), layouts, strict=True):
        rank = 1 + layout.count(",")
        if len(x.shape) != rank:
            fail(ValueError, x.name, f"{rank} dimensions {layout}", f"shape {tuple(x.shape)}")
    for x in (q, k, v):
        check_float(x, DTYPES)
    for x in (k, v):
        check_dtype(x, q.dtype, "q's ")
    for x in (k, v):
        check_device(x, q)
    for x in (k, v):
        if x.shape[:-3] != q.shape[:-3]:
            fail(ValueError, x.name, f"q's batch size {q.shape[0]}", x.shape[0])
    if v.shape[-3] != k.shape[-3]:
        fail(ValueError, "v", f"k's length {k.shape[-3]}", v.shape[-3])
    if v.shape[-2] != k.shape[-2]:
        fail(ValueError, "v", f"k's {k.shape[-2]} heads", v.shape[-2])
    if k.shape[-1] != q.shape[-1]:
        fail(ValueError, "k", f"q's head dimension {q.shape[-1]}", k.shape[-1])
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if (heads_kv == 0 and heads_q != 0) or (heads_kv != 0 and heads_q % heads_kv != 0):
        fail(ValueError, "q", f"a number of heads divisible by k's {heads_kv}", heads_q)
    for x in (q, v):
        check_head_dim(x)
    for x in (q, k, v):
        check_rows(x)


def check_sinks(
    operands: FlashOperands[Operand]
    | VarlenOperands[Operand]
    | BlockSparseOperands[Operand]
    | DecodeOperands[Operand]
    | PagedOperands[Operand],
) -> None:
    """Check that sinks, if any, are one for each head of q."""
    q, sinks = operands.q, operands.sinks
    if sinks is None:
        return
    check_dtype(sinks, "float32")
    if sinks.shape != q.shape[-2:-1]:
        fail(ValueError, "sinks", f"shape {q.shape[-2:-1]}, one of each head", sinks.shape)
    check_device(sinks, q)
    check_rows(sinks)


def check_slopes(
    operands: FlashOperands[Operand]
    | VarlenOperands[Operand]
    | DecodeOperands[Operand]
    | PagedOperands[Operand],
    batch: int,
) -> None:
    """Check that slopes, if any, are one for each head of q, or of each sequence too."""
    slopes, heads = operands.alibi_slopes, operands.q.shape[-2]
    if slopes is None:
        return
    check_dtype(slopes, "float32")
    if slopes.shape not in ((heads,), (batch, heads)):
        expected = f"shape {(heads,)} or {(batch, heads)}, one of each head"
        fail(ValueError, slopes.name, expected, slopes.shape)
    check_device(slopes, operands.q)
    check_rows(slopes)


def check_float(x: Operand, dtypes: tuple[str, ...]) -> None:
    if "float" not in x.dtype:
        fail(TypeError, x.name, "a floating-point dtype", x.dtype)
    if x.dtype not in dtypes:
        fail(NotImplementedError, x.name, "dtype " + ", ".join(dtypes), x.dtype)


def check_dtype(x: Operand, dtype: str, whose: str = "") -> None:
    if x.dtype != dtype:
        fail(TypeError, x.name, f"{whose}dtype {dtype}", x.dtype)


def check_device(x: Operand, other: Operand) -> None:
    """Check that a tensor is on another's device, where both are known."""
    if x.device is not None and other.device is not None and x.device != other.device:
        fail(ValueError, x.name, f"{other.name}'s device {other.device}", x.device)


def check_head_dim(x: Operand, most: int = HEAD_DIM_MAX) -> None:
    if not is_head_dim(x.shape[-1], most):
        fail(NotImplementedError, x.name, head_dims(most), x.shape[-1])


def head_dims(most: int = HEAD_DIM_MAX) -> str:
    return f"a head dimension from {HEAD_DIM_MIN} to {most} in steps of {HEAD_DIM_STEP}"


def is_head_dim(size: int, most: int = HEAD_DIM_MAX) -> bool:
    return size % HEAD_DIM_STEP == 0 and HEAD_DIM_MIN <= size <= most


def check_rows(x: Operand) -> None:
    if not x.contiguous_rows:
        fail(ValueError, x.name, "a contiguous last dimension", "a stride other than 1")
