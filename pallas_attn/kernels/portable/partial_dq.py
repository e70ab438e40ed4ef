"""Return dq once the gradients through all keys are computed."""

from jax import Array

from twin_attention.contract.operands import GradientCarry
from twin_attention.contract.spec import PartialSpec
from twin_attention.targets.family import Backend


def partial_dq(
    like: Array, carry: GradientCarry[Array], spec: PartialSpec, backend: Backend
) -> Array:
    """Return the carry's dq in the dtype of the first array."""
    return carry.dq.astype(like.dtype)
