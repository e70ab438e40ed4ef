"""Sharding of `flash_attention` over a device mesh: importing this teaches it to DTensor.

`torch_attn` itself does not import it, because `torch.distributed.tensor` takes long to import::

    import torch_attn.distributed

    out = torch_attn.flash_attention(q, k, v)  # DTensors, sharded by batch, by heads or by both

Each device computes its batch entries and heads alone, forward and backward. Operands that are
sharded otherwise, such as by length, are first redistributed by DTensor, which may gather them.
"""

from __future__ import annotations

from itertools import combinations
from math import prod
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from torch_attn.flash_ops import flash_bwd, flash_fwd

# Dimension of the batch and of the heads in a [B, S, H, D] tensor, and in a [B, H, S] one.
_AXES = {"batch": (0, 0), "heads": (2, 1)}
_NUM_OPTIONS = 5


def _placements(k: Any) -> list[tuple[Any, Any]]:
    """Return how tensors may be placed on a mesh dimension: [B, S, H, D] ones, and [B, H, S] ones.

    Args:
        k: keys as DTensor describes them.
    """
    axes = [_AXES["batch"]]
    sizes = k.mesh.shape
    shards = (prod(some) for n in range(1, len(sizes) + 1) for some in combinations(sizes, n))
    # A shard must hold whole groups of query heads. DTensor makes no more shards than heads.
    if all(k.shape[2] % n == 0 for n in shards if n <= k.shape[2]):
        axes.append(_AXES["heads"])
    return [(Replicate(), Replicate()), *((Shard(a), Shard(b)) for a, b in axes)]


@register_sharding(flash_fwd)
def _shard_forward(q, k, v, *options):
    no_options = [None] * _NUM_OPTIONS
    return [([x, lse], [x, x, x, *no_options]) for x, lse in _placements(k)]


@register_sharding(flash_bwd)
def _shard_backward(dout, dlse, q, k, v, out, lse, *options):
    no_options = [None] * _NUM_OPTIONS
    return [
        ([x, x, x], [x, None if dlse is None else rows, x, x, x, x, rows, *no_options])
        for x, rows in _placements(k)
    ]
