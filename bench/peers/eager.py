"""Plain torch operations, with all scores in memory: what a model written by hand runs."""

from __future__ import annotations

from bench.calls import torch_call
from bench.job import Call
from bench.peers.limits import HALF, check_flash
from interop.parity.cases import FlashCase


def flash(case: FlashCase, operation: str, tensors) -> Call:
    """``softmax(scale · q kᵀ) v`` in the inputs' dtype; the causal mask is made beforehand."""
    check_flash(case, dtypes=(*HALF, "float32"), rectangles=True)
    import torch

    spec = case.spec
    hidden = None
    if case.causal:
        shape = (spec.seq_q, spec.seq_kv)
        hidden = torch.ones(shape, dtype=torch.bool, device=tensors[0].device)
        hidden = hidden.triu(spec.diagonal + 1)

    def attend(q, k, v):
        if spec.group_size > 1:
            k, v = (x.repeat_interleave(spec.group_size, dim=1) for x in (k, v))
        s = (q @ k.transpose(2, 3)) * spec.scale
        if hidden is not None:
            s = s.masked_fill(hidden, float("-inf"))
        return s.softmax(dim=-1) @ v

    return torch_call(attend, operation, tensors, heads_first=True)
