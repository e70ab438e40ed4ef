"""Attention over some keys, added to a result over other keys: the forward kernel with a carry."""

from torch import Tensor

from torch_attn.kernels.parts import result_memory
from torch_attn.kernels.sm90.flash_fwd import launch_forward
from torch_attn.kernels.sm90.flash_fwd_rows import Results
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
    out, lse = result_memory(operands.q, carry, lse, spec)
    launch_forward(operands, Results(out, lse, None, carry), spec, backend)
    return out, lse
