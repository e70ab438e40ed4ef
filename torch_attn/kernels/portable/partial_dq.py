"""Return dq once the gradients through all keys are computed."""

from torch import Tensor

from twin_attention.contract.operands import GradientCarry
from twin_attention.contract.spec import PartialSpec
from twin_attention.targets.family import Backend


def partial_dq(
    like: Tensor, carry: GradientCarry[Tensor], spec: PartialSpec, backend: Backend
) -> Tensor:
    """Return the carry's dq in the dtype of `like`."""
    return carry.dq.to(like.dtype)
