"""Attention over some of the keys, added to a result over others: the forward kernel with a carry.

Liu et al. 2023 (Ring Attention), algorithm 1: the running softmax is carried in float32.
"""

from torch import Tensor

from torch_attn.kernels.parts import result_memory
from torch_attn.kernels.portable.flash_fwd import launch_forward
from twin_attention.contract.operands import PartialOperands
from twin_attention.contract.spec import PartialSpec
from twin_attention.targets.family import Backend


def partial_fwd(
    operands: PartialOperands[Tensor],
    carry: Tensor | None,
    lse: Tensor | None,
    spec: PartialSpec,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Add the keys of the operands to a result, in place; return out and lse.

    carry and lse are that result, [B, Sq, Hq, Dv] and [B, Hq, Sq] float32, contiguous; None if the
    spec says that there is none. Where lse is -inf, the carry may hold anything, which stays in a
    row that sees no key here either. The last out is in q's dtype, with 0 there.
    """
    out, lse = result_memory(operands.q, carry, lse, spec)
    launch_forward(operands, out, lse, spec, backend, carry=carry)
    return out, lse
