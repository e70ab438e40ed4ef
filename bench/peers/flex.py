"""torch's FlexAttention, compiled. It takes some 10 s for every shape."""

from __future__ import annotations

from functools import partial

from bench.calls import compiled, torch_call
from bench.job import Call
from bench.peers.limits import HALF, check_flash
from interop.parity.cases import FlashCase


def flash(case: FlashCase, operation: str, tensors) -> Call:
    """A call with the causal mask as a block mask, which is made beforehand."""
    check_flash(case, dtypes=(*HALF, "float32"), rectangles=True)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    diagonal = case.spec.diagonal

    def visible(batch, head, query, key):
        return query + diagonal >= key

    mask = None
    if case.causal:
        device = tensors[0].device
        mask = create_block_mask(visible, None, None, case.seq_q, case.seq_kv, device)
    attend = partial(
        compiled(flex_attention),
        block_mask=mask,
        scale=case.scale,
        enable_gqa=case.heads_q != case.heads_kv,
    )
    return torch_call(attend, operation, tensors, heads_first=True)
