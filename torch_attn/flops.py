"""Flop counts of `flash_attention` for `FlopCounterMode`: importing this registers them with torch.

Import it before the mode is made; `torch_attn` does not, because `torch.utils.flop_counter` imports
Triton::

    import torch
    import torch_attn.flops
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = torch.randn(3, 1, 128, 4, 64)
    with FlopCounterMode(display=False) as counter:
        torch_attn.flash_attention(q, k, v, causal=True)
    print(counter.get_total_flops())

docs/semantics.md says which pairs of query and key are counted. The backward counts its five
products, without what gradients of a bias compute again. With `q_ranges`, `kv_ends` and block masks
a count waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import register_flop_formula

from torch_attn import private
from torch_attn.flash_ops import DENSE, SPARSE, FlashAttention
from twin_attention.contract import cost
from twin_attention.contract.block_mask import BlockMask
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec


@register_flop_formula([x.op.overloadpacket for x in DENSE.forwards.values()], get_raw=True)
def _forward(*args, **_) -> int:
    return _of_dense(args, cost.forward_flops, cost.tree_forward_flops, cost.range_forward_flops)


@register_flop_formula(torch.ops.twin_attention.flash_bwd, get_raw=True)
def _backward(dout, dlse, *args, **_) -> int:
    return _of_dense(args, cost.backward_flops, cost.tree_backward_flops, cost.range_backward_flops)


@register_flop_formula(torch.ops.twin_attention.flash_jvp, get_raw=True)
def _tangents(*args, **_) -> int:
    """Count all five products, which are as large as a backward's."""
    return _backward(None, None, *args[len(DENSE.with_tangents) :])


@register_flop_formula(torch.ops.twin_attention.block_sparse_fwd, get_raw=True)
def _sparse_forward(*args, **_) -> int:
    return _of_mask(args, cost.forward_flops, cost.block_sparse_forward_flops)


@register_flop_formula(torch.ops.twin_attention.block_sparse_bwd, get_raw=True)
def _sparse_backward(dout, dlse, *args, **_) -> int:
    return _of_mask(args, cost.backward_flops, cost.block_sparse_backward_flops)


def _problem(function: FlashAttention, args: tuple[Any, ...]) -> tuple[Any, Any]:
    operands = function.operands._make(args[: function.num_operands])
    return operands, function.check(operands, function.options_of(args))


def _of_dense(
    args: tuple[Any, ...],
    of_all: Callable[[AttentionSpec], int],
    of_ends: Callable[[AttentionSpec, np.ndarray], int],
    of_ranges: Callable[[AttentionSpec, np.ndarray], int],
) -> int:
    """Count an operator's call by queries' ranges or the keys' ends, if they hold data."""
    operands, spec = _problem(DENSE, args)
    for x, count in ((operands.q_ranges, of_ranges), (operands.kv_ends, of_ends)):
        if x is not None and not _holds_no_data(x):
            return count(spec, x.numpy(force=True))
    return of_all(spec)


def _of_mask(
    args: tuple[Any, ...],
    of_all: Callable[[BlockSparseSpec], int],
    of_kept: Callable[[BlockSparseSpec, BlockMask[np.ndarray]], int],
) -> int:
    """Count an operator's call by its mask; if that is fake, count all tiles."""
    operands, spec = _problem(SPARSE, args)
    lists = [getattr(operands, name) for name in BlockMask._fields]
    if any(map(_holds_no_data, lists)):
        return of_all(spec)
    return of_kept(spec, BlockMask(*(x.numpy(force=True) for x in lists)))


def _holds_no_data(x: torch.Tensor) -> bool:
    return private.is_fake is not None and private.is_fake(x)
