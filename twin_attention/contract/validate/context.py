from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.spec import WINDOW_UNLIMITED, AttentionSpec, FlashOptions
from twin_attention.contract.validate.attention import check_flash_attention
from twin_attention.contract.validate.errors import fail
from twin_attention.contract.validate.offsets import check_offset_values
from twin_attention.contract.validate.operands import Operand
from twin_attention.contract.validate.options import check_choice, check_integer


def check_context_plan(
    seq_len: Any, size: Any, layout: Any, cu_seqlens: Any, layouts: Sequence[str]
) -> tuple[int, int, str, tuple[int, ...] | None]:
    seq_len = check_integer("seq_len", seq_len, 0, WINDOW_UNLIMITED)
    size = check_integer("size", size, 1, WINDOW_UNLIMITED)
    if layout not in layouts:
        fail(ValueError, "layout", "one of " + ", ".join(map(repr, layouts)), repr(layout))
    parts = 2 * size if layout == "zigzag" else size
    if seq_len % parts:
        expected = f"a multiple of {parts}, for {size} ranks in layout {layout!r}"
        fail(ValueError, "seq_len", expected, seq_len)
    if cu_seqlens is None:
        return seq_len, size, layout, None
    offsets = np.asarray(cu_seqlens)
    if offsets.ndim != 1 or len(offsets) < 2:
        fail(ValueError, "cu_seqlens", "shape (N + 1,) for N documents", offsets.shape)
    if offsets.dtype.kind not in "iu":
        fail(TypeError, "cu_seqlens", "integers", offsets.dtype)
    check_offset_values("cu_seqlens", offsets, seq_len)
    return seq_len, size, layout, tuple(offsets.tolist())


def check_context_attention(
    operands: FlashOperands[Operand], options: FlashOptions, local_len: int
) -> AttentionSpec:
    """Check a rank's operands, and describe them as a sequence of `local_len` tokens."""
    spec = check_flash_attention(operands, options)
    for x in (operands.q, operands.k):
        if x.shape[1] != local_len:
            fail(ValueError, x.name, f"the plan's {local_len} tokens of a rank", x.shape[1])
    return spec


def check_exchange(
    exchange: Any, choices: Sequence[str], heads: tuple[int, int], size: int
) -> None:
    check_choice("exchange", exchange, choices)
    for name, count in zip("qk", heads, strict=True):
        if exchange == "heads" and count % size:
            fail(ValueError, name, f"heads that {size} ranks share for exchange 'heads'", count)


def check_group(plan_size: int, group_size: int) -> None:
    if plan_size != group_size:
        fail(ValueError, "plan", f"a plan for the group's {group_size} ranks", plan_size)


def check_rank(rank: Any, size: int) -> int:
    return check_integer("rank", rank, 0, size - 1)


def check_whole(name: str, shape: tuple[int, ...], axis: int, length: int) -> None:
    if not -len(shape) <= axis < len(shape) or shape[axis] != length:
        fail(ValueError, name, f"{length} tokens along axis {axis}", f"shape {tuple(shape)}")


def check_shards(shapes: list[tuple[int, ...]], axis: int, size: int, length: int) -> None:
    if len(shapes) != size:
        fail(ValueError, "xs", f"the tokens of {size} ranks", len(shapes))
    for rank, shape in enumerate(shapes):
        check_whole(f"xs[{rank}]", shape, axis, length)
