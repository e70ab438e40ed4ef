from __future__ import annotations

from typing import Any

import numpy as np

from twin_attention.contract.spec import WINDOW_UNLIMITED
from twin_attention.contract.validate.errors import fail
from twin_attention.contract.validate.operands import Operand, check_dtype, check_rows
from twin_attention.contract.validate.options import check_integer


def check_offsets_arguments(
    cu_seqlens_q: Operand, cu_seqlens_kv: Operand, tokens_q: Any, tokens_kv: Any
) -> None:
    """Contents are not checked."""
    for name, tokens in (("tokens_q", tokens_q), ("tokens_kv", tokens_kv)):
        check_integer(name, tokens, 0, WINDOW_UNLIMITED)
    check_offset_operands(cu_seqlens_q, cu_seqlens_kv)


def check_offset_values(name: str, offsets: np.ndarray, tokens: int) -> None:
    """Check [N + 1] offsets on an axis of `tokens`; the message names the first wrong one."""
    least = np.concatenate([[0], offsets[:-1]])
    bad = (offsets < least) | (offsets > tokens)
    bad[0] |= offsets[0] != 0
    for i in np.flatnonzero(bad)[:1]:
        expected = f"an offset from {least[i]} to {tokens}" if i else "0"
        fail(ValueError, f"{name}[{i}]", expected, offsets[i])


def check_offset_operands(cu_seqlens_q: Operand, *others: Operand) -> None:
    """Check the shapes, dtypes and strides of offsets, those of queries first."""
    for x in (cu_seqlens_q, *others):
        if len(x.shape) != 1 or x.shape[0] < 1:
            fail(ValueError, x.name, "shape (N + 1,) for N sequences", x.shape)
        check_dtype(x, "int32")
        check_rows(x)
    for x in others:
        if x.shape != cu_seqlens_q.shape:
            expected = f"cu_seqlens_q's {cu_seqlens_q.shape[0]} offsets"
            fail(ValueError, x.name, expected, x.shape[0])
