"""Attention over a tree of tokens, or with ranges of keys, by other libraries.

A factory takes (case, operation, tensors): a `bench.trees.TreeCase` or `bench.ranges.RangeCase`,
and torch's q, k, v and dout [1, S, H, D].
"""

from __future__ import annotations

from typing import Any

from bench.calls import compiled, torch_call
from bench.job import Call
from bench.ranges import RangeCase, visible
from bench.trees import TreeCase

FLEX_TILE = 128  # queries, and keys, of FlexAttention's tiles


def flex(
    case: TreeCase | RangeCase,
    operation: str,
    tensors,
    *,
    makes_mask: bool = False,
    compiles_mask: bool = True,
) -> Call:
    """Compiled FlexAttention with a block mask.

    makes_mask: in each call, as each new problem needs it; else it is premade.
    compiles_mask: compile the function that makes it, unlike torch's default.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = tensors[0].device
    make = compiled(create_block_mask) if compiles_mask else create_block_mask
    attention = compiled(flex_attention)

    if isinstance(case, RangeCase):
        seen = visible(case, device)
    else:
        ends = torch.from_numpy(case.ends[0]).to(device)

        def seen(batch, head, query, key):
            return (query >= key) & (query < ends[key])

    def mask() -> Any:
        sizes = case.seq_q, case.seq_kv
        return make(seen, None, None, *sizes, device=str(device), BLOCK_SIZE=FLEX_TILE)

    kept = None if makes_mask else mask()

    def attend(q, k, v):
        return attention(q, k, v, block_mask=kept or mask(), scale=case.scale)

    return torch_call(attend, operation, tensors, heads_first=True)
