"""Partial results over some of the keys."""

import torch
from torch import Tensor

from twin_attention.contract.spec import PartialSpec


def result_memory(
    q: Tensor, carry: Tensor | None, lse: Tensor | None, spec: PartialSpec
) -> tuple[Tensor, Tensor]:
    """Return a part's out and lse: a carry's memory, or new; the last out in q's dtype."""
    if carry is None or spec.last:
        dtype = q.dtype if spec.last else torch.float32
        carry = q.new_empty((*q.shape[:-1], spec.head_dim_v), dtype=dtype)
    if lse is None:
        lse = q.new_empty((spec.batch, spec.heads_q, spec.seq_q), dtype=torch.float32)
    return carry, lse
