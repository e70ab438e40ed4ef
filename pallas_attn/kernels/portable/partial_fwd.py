"""Attention over some of the keys, added to a result over others: the forward with a carry."""

from jax import Array

from pallas_attn.kernels.parts import result_before
from pallas_attn.kernels.portable.flash_fwd import Result, launch_forward
from twin_attention.contract.operands import PartialOperands
from twin_attention.contract.spec import PartialSpec
from twin_attention.targets.family import Backend


def partial_fwd(
    operands: PartialOperands[Array],
    carry: Array | None,
    lse: Array | None,
    spec: PartialSpec,
    backend: Backend,
) -> tuple[Array, Array]:
    """Return out and lse with the keys added, in the carry's memory; the last out in q's dtype."""
    result = Result(*result_before(carry, lse, spec))
    out, lse = launch_forward(operands, result, spec, backend)
    return (out.astype(operands.q.dtype) if spec.last else out), lse
