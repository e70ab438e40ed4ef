"""dq of what the gradients through all keys left."""

from jax import Array

from twin_attention.contract.operands import GradientCarry
from twin_attention.contract.spec import PartialSpec
from twin_attention.targets.family import Backend


def partial_dq(
    like: Array, carry: GradientCarry[Array], spec: PartialSpec, backend: Backend
) -> Array:
    """Return dq of the carry.

    Args:
        like: an array of dq's shape and dtype.
        carry: what `partial_bwd` returned of the last keys.
        spec, backend: as `partial_bwd` had them.
    """
    return carry.dq.astype(like.dtype)
