"""dq of what the gradients through all keys left."""

from torch import Tensor

from twin_attention.contract.operands import GradientCarry
from twin_attention.contract.spec import PartialSpec
from twin_attention.targets.family import Backend


def partial_dq(
    like: Tensor, carry: GradientCarry[Tensor], spec: PartialSpec, backend: Backend
) -> Tensor:
    """Return dq of the carry.

    Args:
        like: a tensor of dq's shape and dtype.
        carry: what `partial_bwd` returned of the last keys.
        spec, backend: as `partial_bwd` had them.
    """
    return carry.dq.to(like.dtype)
