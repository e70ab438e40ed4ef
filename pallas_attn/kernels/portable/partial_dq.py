"""Return dq once the gradients through all keys are computed."""

from jax import Array

from twin_attention.contract.operands import GradientCarry
from twin_attention.contract.spec import PartialSpec
from twin_attention.targets.family import Backend


def partial_dq(
    like: Array, carry: GradientCarry[Array], spec: PartialSpec, backend: Backend
) -> Array:
    return carry.dq.astype(like.dtype)
