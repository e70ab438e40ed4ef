"""Operations of `flash_attention` for `FlopCounterMode`: importing this teaches them to torch.

`torch_attn` itself does not import it, because `torch.utils.flop_counter` imports Triton. Import it
before the mode is made::

    import torch
    import torch_attn.flops
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = torch.randn(3, 1, 128, 4, 64)
    with FlopCounterMode(display=False) as counter:
        torch_attn.flash_attention(q, k, v, causal=True)
    print(counter.get_total_flops())

Only pairs of query and key that the window keeps are counted, unlike for
`scaled_dot_product_attention`, of which torch counts all. The backward counts its five products.
Most of what follows from data is left out: with segment ids the count is that without, and
`flash_attention_varlen` counts nothing. Of `block_sparse_attention` the tiles that its mask keeps
are counted, which waits for the device; of a fake tensor's mask, which holds no data, all tiles.
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
from twin_attention.contract.spec import BlockSparseSpec


@register_flop_formula(torch.ops.torch_attn.flash_fwd, get_raw=True)
def _forward(*args, **_) -> int:
    return cost.forward_flops(_problem(DENSE, args)[1])


@register_flop_formula(torch.ops.torch_attn.flash_bwd, get_raw=True)
def _backward(dout, dlse, *args, **_) -> int:
    return cost.backward_flops(_problem(DENSE, args)[1])


@register_flop_formula(torch.ops.torch_attn.block_sparse_fwd, get_raw=True)
def _sparse_forward(*args, **_) -> int:
    return _of_mask(args, cost.forward_flops, cost.block_sparse_forward_flops)


@register_flop_formula(torch.ops.torch_attn.block_sparse_bwd, get_raw=True)
def _sparse_backward(dout, dlse, *args, **_) -> int:
    return _of_mask(args, cost.backward_flops, cost.block_sparse_backward_flops)


def _problem(function: FlashAttention, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return operands and problem of an operator's arguments, from the operands on."""
    operands = function.operands._make(args[: function.num_operands])
    return operands, function.check(operands, function.options_of(args))


def _of_mask(
    args: tuple[Any, ...],
    of_all: Callable[[BlockSparseSpec], int],
    of_kept: Callable[[BlockSparseSpec, BlockMask[np.ndarray]], int],
) -> int:
    """Count an operator's call by the mask among its arguments, of all tiles if that is fake."""
    operands, spec = _problem(SPARSE, args)
    lists = [getattr(operands, name) for name in BlockMask._fields]
    if private.is_fake is not None and any(map(private.is_fake, lists)):
        return of_all(spec)
    return of_kept(spec, BlockMask(*(x.numpy(force=True) for x in lists)))
