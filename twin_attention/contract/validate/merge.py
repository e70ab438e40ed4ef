from __future__ import annotations

from twin_attention.contract.spec import DTYPES, MergeSpec
from twin_attention.contract.validate.errors import fail
from twin_attention.contract.validate.operands import (
    Operand,
    check_device,
    check_dtype,
    check_float,
    check_head_dim,
    check_rows,
)


def check_merge_states(outs: Operand, lses: Operand) -> MergeSpec:
    if len(outs.shape) not in (4, 5):
        expected = "4 or 5 dimensions [N, B, H, Dv] or [N, B, S, H, Dv]"
        fail(ValueError, "outs", expected, f"shape {outs.shape}")
    check_float(outs, DTYPES)
    check_head_dim(outs)
    check_rows(outs)
    states, batch, *tokens, heads, head_dim_v = outs.shape
    check_dtype(lses, "float32")
    if lses.shape != (states, batch, heads, *tokens):
        fail(ValueError, "lses", f"shape {(states, batch, heads, *tokens)}", lses.shape)
    check_device(lses, outs)
    return MergeSpec(states, batch, tokens[0] if tokens else 1, heads, head_dim_v, outs.dtype)
