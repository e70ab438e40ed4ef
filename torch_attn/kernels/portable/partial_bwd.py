"""Gradients through some of the keys, added to the dq through other keys.

Liu et al. 2023 (Ring Attention), appendix A.
"""

from torch import Tensor

from torch_attn.kernels.library.mask import mask_of_keys, mask_of_queries
from torch_attn.kernels.library.sequences import num_padded_rows
from torch_attn.kernels.library.terms import Terms
from torch_attn.kernels.portable.flash_bwd import (
    flash_bwd_dkdv_kernel,
    flash_bwd_dq_kernel,
    prepare_dkdv,
    prepare_dq,
)
from torch_attn.kernels.preprocess import Statistics, preprocess
from torch_attn.launch import launch
from twin_attention.contract.operands import GradientCarry, PartialOperands
from twin_attention.contract.spec import PartialSpec
from twin_attention.targets.family import Backend


def partial_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    operands: PartialOperands[Tensor],
    out: Tensor,
    lse: Tensor,
    carry: GradientCarry[Tensor] | None,
    spec: PartialSpec,
    backend: Backend,
) -> tuple[GradientCarry[Tensor], Tensor, Tensor]:
    """Add dq to the carry in place; return it, and dk and dv, float32; out is over all keys."""
    q, k, v = operands[:3]
    if carry is None:
        rows = (spec.batch, spec.heads_q, num_padded_rows(spec))
        carry = GradientCarry(
            q.new_zeros(q.shape, dtype=lse.dtype), *(lse.new_empty(rows) for _ in range(2))
        )
        statistics = Statistics(lse, dlse, carry.lse2, carry.delta)
        preprocess(dout, out, statistics, spec, backend, offsets=None, segment_ids=None)
    dk, dv = (x.new_empty(x.shape, dtype=lse.dtype) for x in (k, v))
    inputs = (q, k, v, dout, carry.lse2, carry.delta)
    of_dq = (*inputs, carry.dq, Terms(), mask_of_keys(operands, spec))
    launch("flash_bwd_dq", flash_bwd_dq_kernel, prepare_dq, of_dq, spec, backend)
    of_dkdv = (*inputs, dk, dv, Terms(), mask_of_queries(operands, spec))
    launch("flash_bwd_dkdv", flash_bwd_dkdv_kernel, prepare_dkdv, of_dkdv, spec, backend)
    return carry, dk, dv
