"""Attention over some of the keys, added to a result over others: the forward kernel with a carry.

Liu et al. 2023 (Ring Attention), algorithm 1: the running softmax goes from one set of keys to the
next, in float32.
"""

from torch import Tensor

from torch_attn.kernels.portable.flash_fwd import launch_forward
from twin_attention.contract.operands import PartialOperands
from twin_attention.contract.spec import PartialSpec
from twin_attention.targets.family import Backend


def partial_fwd(
    operands: PartialOperands[Tensor],
    out: Tensor,
    lse: Tensor,
    spec: PartialSpec,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Add the keys of the operands to a result, in place.

    Args:
        operands, spec: the problem.
        out, lse: the result over other keys, [B, Sq, Hq, Dv] and [B, Hq, Sq] float32, contiguous.
            Where lse is -inf there is none, whatever out holds, which may stay there in a row that
            sees no key here either.
        backend: what runs.

    Returns:
        out and lse.
    """
    launch_forward(operands, out, lse, spec, backend)
    return out, lse
