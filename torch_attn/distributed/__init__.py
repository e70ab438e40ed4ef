"""Attention over several devices.

`context_attention` splits one sequence over the ranks of a group. Importing this also teaches
DTensor to shard `flash_attention` (`torch_attn.distributed.sharding`). `torch_attn` does not import
it, because `torch.distributed.tensor` takes long to import.
"""

import torch_attn.distributed.sharding  # noqa: F401 (registers)
from torch_attn.distributed.context import context_attention
from torch_attn.distributed.copies import Sizes
from torch_attn.distributed.peers import Peers, Transfer
from twin_attention.contract.context import (
    ContextPlan,
    context_plan,
    shard_sequence,
    unshard_sequence,
)
from twin_attention.contract.transfers import Rows

__all__ = [
    "ContextPlan",
    "Peers",
    "Rows",
    "Sizes",
    "Transfer",
    "context_attention",
    "context_plan",
    "shard_sequence",
    "unshard_sequence",
]
