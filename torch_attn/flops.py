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
`scaled_dot_product_attention`, of which torch counts all. What follows from data is left out: with
segment ids the count is that without, and `flash_attention_varlen` and `block_sparse_attention`
count nothing. The backward counts its five products.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from torch_attn.flash_ops import DENSE
from twin_attention.contract import cost


@register_flop_formula(torch.ops.torch_attn.flash_fwd, get_raw=True)
def _forward(*args, **_) -> int:
    operands, _, options, _ = DENSE.unpack(args)
    return cost.forward_flops(DENSE.spec_of(operands, options))


@register_flop_formula(torch.ops.torch_attn.flash_bwd, get_raw=True)
def _backward(dout, dlse, *args, **_) -> int:
    operands, _, options, _ = DENSE.unpack(args)
    return cost.backward_flops(DENSE.spec_of(operands, options))
