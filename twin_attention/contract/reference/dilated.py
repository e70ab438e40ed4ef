from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device

from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.reference.formulas import backward, forward
from twin_attention.contract.reference.merge import merge, merge_backward
from twin_attention.contract.reference.visibility import visibility
from twin_attention.contract.spec import DilatedSpec, Dilation

Array = Any


def dilated_forward(operands: FlashOperands, spec: DilatedSpec, dtype: Any) -> tuple[Array, Array]:
    """Compute out and lse; a token that no pair keeps sees no key.

    Source: Ding et al. 2023 (LongNet), sections 2.2, 2.3.
    """
    xp = array_namespace(operands.q)
    return merge(*_dilated_states(xp, operands, spec, dtype), dtype)


def dilated_backward(
    dout: Array, dlse: Array | None, operands: FlashOperands, spec: DilatedSpec, dtype: Any
) -> FlashOperands[Array]:
    xp = array_namespace(operands.q)
    states = _dilated_states(xp, operands, spec, dtype)
    of_states = zip(*merge_backward(dout, dlse, *states, dtype), strict=True)
    dq, dk, dv = (xp.zeros_like(x, dtype=dtype) for x in (operands.q, operands.k, operands.v))
    for dilation, (dout, dlse) in zip(spec.dilations, of_states, strict=True):
        seen = kept_tokens(xp, spec, dilation, device(operands.q))
        found = backward(xp, dout, dlse, operands, spec, seen, dtype)
        dq, dk, dv = dq + found.q, dk + found.k, dv + found.v
    return FlashOperands(dq, dk, dv)


def _dilated_states(
    xp: Any, operands: FlashOperands, spec: DilatedSpec, dtype: Any
) -> tuple[Array, Array]:
    """Return each pair's own outs [N, B, S, Hq, Dv] and lses [N, B, Hq, S]."""
    states = [
        forward(xp, operands, spec, kept_tokens(xp, spec, dilation, device(operands.q)), dtype)
        for dilation in spec.dilations
    ]
    outs, lses = zip(*states, strict=True)
    return xp.stack(outs), xp.stack(lses)


def kept_tokens(xp: Any, spec: DilatedSpec, dilation: Dilation, on: Any) -> Array:
    """Return the mask [1, Hq, S, S] of the keys that each query sees in one pair."""
    position = xp.arange(spec.seq_q, device=on)
    segment = position // dilation.segment_length
    head = xp.arange(spec.heads_q, device=on)[:, None] // spec.group_size
    kept = position % dilation.rate == head % dilation.rate  # [Hq, S]
    seen = kept[:, :, None] & kept[:, None, :] & (segment[:, None] == segment)
    window = visibility(xp, spec, on)
    return (seen if window is None else seen & window)[None, ...]
