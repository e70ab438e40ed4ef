"""Shard `flash_attention` over a device mesh: importing this registers it with DTensor::

    import torch_attn.distributed

    out = torch_attn.flash_attention(q, k, v)  # DTensors, sharded by batch, by heads or by both

Each device computes only its own batch entries and heads, forward and backward. DTensor first
redistributes operands that are sharded otherwise, such as by length, and may gather them. With
dropout, which counts the batch elements and heads of the whole, it does so with all operands.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from torch_attn.flash_ops import DENSE
from twin_attention.contract.operands import TERMS


class _Placement(NamedTuple):
    """Placements on a mesh dimension of a call's tensors: `whole` [B, S, H, D], `rows` [B, H, S],
    sinks [H], ids and others [B, S], the table [Hq, 2R + 1] and slopes [Hq].

    `bias` is the sharded axis of [B, Hq, Sq, Skv]; None for none. `dsinks` and `dtable` are of
    gradients.
    """

    whole: Any = Replicate()
    rows: Any = Replicate()
    sinks: Any = Replicate()
    dsinks: Any = Replicate()
    ids: Any = Replicate()
    table: Any = Replicate()
    dtable: Any = Replicate()
    slopes: Any = Replicate()
    bias: int | None = None


# Operands after the sinks: per-token integers, then terms, then the dropout seed.
_NUM_OTHERS = len(DENSE.operands._fields) - 4
_NUM_IDS = _NUM_OTHERS - len(TERMS) - 1
_BATCH = _Placement(Shard(0), Shard(0), Replicate(), Partial(), Shard(0), dtable=Partial(), bias=0)
_HEADS = _Placement(
    Shard(2), Shard(1), Shard(0), Shard(0), table=Shard(0), dtable=Shard(0), slopes=Shard(0), bias=1
)


def _placements(k: Any, others: Any) -> list[_Placement]:
    """Return how the tensors may be placed on a mesh dimension."""
    if others[_NUM_OTHERS - 1] is not None:
        return [_Placement()]
    found = [_Placement(), _BATCH]
    sizes = k.mesh.shape
    shards = (prod(some) for n in range(1, len(sizes) + 1) for some in combinations(sizes, n))
    # A shard must hold whole groups of query heads. DTensor makes no more shards than heads.
    if all(k.shape[2] % n == 0 for n in shards if n <= k.shape[2]):
        found.append(_HEADS)
    return found


def _of_others(p: _Placement, others: Any) -> list[Any]:
    bias, _, slopes = others[_NUM_IDS : _NUM_OTHERS - 1]
    of_slopes = p.slopes
    if slopes is not None and len(slopes.shape) == 2:  # [B, Hq]
        of_slopes = p.ids if p.ids == Shard(0) else Shard(1) if p.slopes == Shard(0) else p.slopes
    of_terms = [_of_bias(p, bias)[0], p.table, of_slopes]
    placed = [*[p.ids] * _NUM_IDS, *of_terms, Replicate()]
    return [None if x is None else y for x, y in zip(others, placed, strict=False)]


def _of_bias(p: _Placement, bias: Any) -> tuple[Any, Any]:
    """Return the placements of a bias and its gradient; its sharded axis may have size 1."""
    if bias is None or p.bias is None:
        return Replicate(), Replicate()
    if bias.shape[p.bias] == 1:
        return Replicate(), Partial()
    return Shard(p.bias), Shard(p.bias)


def _shard_forward(num_of_rows, q, k, v, sinks, *others):
    """Return how the tensors of a forward with `num_of_rows` results [B, H, S] may be placed."""
    options = others[_NUM_OTHERS:]
    no_options = [None] * len(options)
    found = []
    for p in _placements(k, others):
        x, of_sinks = p.whole, None if sinks is None else p.sinks
        ids = _of_others(p, others)
        results = [x, *[p.rows] * num_of_rows]
        found.append((results, [x, x, x, of_sinks, *ids, *no_options]))
    return found


for kind, forward in DENSE.forwards.items():
    register_sharding(forward.op)(partial(_shard_forward, 1 + sum(kind)))


@register_sharding(DENSE.bwd)
def _shard_backward(dout, dlse, q, k, v, sinks, *others):
    _out, _lse, rest, frozen, *options = others[_NUM_OTHERS:]
    no_options = [None] * (1 + len(options))
    # A gradient that is left out is an empty tensor.
    has_dsinks, has_dbias, has_dtable = (
        x is not None and name not in frozen.split()
        for name, x in (("sinks", sinks), *zip(TERMS[:2], others[_NUM_IDS:], strict=False))
    )
    found = []
    for p in _placements(k, others):
        x, of_dlse = p.whole, None if dlse is None else p.rows
        of_sinks = None if sinks is None else p.sinks
        of_dsinks = p.dsinks if has_dsinks else Replicate()
        of_rest = None if rest is None else p.rows
        ids = _of_others(p, others)
        of_bias = _of_bias(p, others[_NUM_IDS] if has_dbias else None)[1]
        of_table = p.dtable if has_dtable else Replicate()
        of_terms = of_bias, of_table, Replicate(), Replicate()
        gradients = [x, x, x, of_dsinks, *[Replicate()] * _NUM_IDS, *of_terms]
        of_results = x, p.rows, of_rest
        found.append((gradients, [x, of_dlse, x, x, x, of_sinks, *ids, *of_results, *no_options]))
    return found
