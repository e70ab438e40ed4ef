"""Attention over some of the keys, added to a result over others: the forward kernel with a carry.

The twin of `torch_attn.kernels.portable.partial_fwd`.
"""

from dataclasses import replace

from torch import Tensor

from torch_attn.kernels.sm90.flash_fwd import Results, launch_forward
from twin_attention.contract.operands import PartialOperands
from twin_attention.contract.spec import PartialSpec
from twin_attention.targets.family import Backend

# Whether the kernel that reads no result over other keys runs. No GPU has run it.
STARTS_FROM_NOTHING = False


def partial_fwd(
    operands: PartialOperands[Tensor],
    out: Tensor,
    lse: Tensor,
    spec: PartialSpec,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Add the keys of the operands to a result, in place: as the portable `partial_fwd`."""
    spec = replace(spec, first=spec.first and STARTS_FROM_NOTHING)
    launch_forward(operands, Results(out, lse, None), spec, backend)
    return out, lse
