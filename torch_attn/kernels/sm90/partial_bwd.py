"""Gradients through some of the keys: the backward kernels, adding to dq through other keys.

As `torch_attn.kernels.portable.partial_bwd`, in either of the two ways to dq of `flash_bwd`. The
carry's dq is the kernel's sums, if it has them.
"""

from torch import Tensor

from torch_attn.kernels.explicit.items import item_counter
from torch_attn.kernels.gradients import Sums
from torch_attn.kernels.library.mask import mask_of_keys, mask_of_queries
from torch_attn.kernels.library.sequences import num_padded_rows
from torch_attn.kernels.library.terms import Terms
from torch_attn.kernels.preprocess import Statistics, preprocess
from torch_attn.kernels.sm90.flash_bwd import NUM_WARPS
from torch_attn.kernels.sm90.flash_bwd_dkdv import flash_bwd_dkdv_kernel, prepare_dkdv
from torch_attn.kernels.sm90.flash_bwd_dq import flash_bwd_dq_kernel, prepare_dq
from torch_attn.kernels.sm90.sums import sum_columns
from torch_attn.launch import launch
from twin_attention.contract.operands import GradientCarry, PartialOperands
from twin_attention.contract.spec import PartialSpec
from twin_attention.targets.family import Backend, portable_backend


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
    q, k, v = operands[:3]
    has_sums = "flash_bwd_fused" in backend.configs(spec)
    if carry is None:
        rows = (spec.batch, spec.heads_q, num_padded_rows(spec))
        sums = (*rows, sum_columns(spec.head_dim))
        dq = q.new_zeros(sums if has_sums else q.shape, dtype=lse.dtype)
        carry = GradientCarry(dq, *(lse.new_empty(rows) for _ in range(2)))
        statistics = Statistics(lse, dlse, carry.lse2, carry.delta)
        portable = portable_backend("torch_attn", backend.target)
        preprocess(dout, out, statistics, spec, portable, None, segment_ids=None)
    dk, dv = (x.new_empty(x.shape, dtype=lse.dtype) for x in (k, v))
    of_rows, sums = (carry.lse2, carry.delta), Sums(carry.dq) if has_sums else Sums()
    if not has_sums:
        rows = Statistics(None, None, *of_rows)
        counter, mask = item_counter(q, spec), mask_of_keys(operands, spec)
        of_dq = (q, k, v, dout, None, rows, carry.dq, counter, Terms(), mask)
        launch(
            "flash_bwd_dq", flash_bwd_dq_kernel, prepare_dq, of_dq, spec, backend,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    name = "flash_bwd_fused" if has_sums else "flash_bwd_dkdv"
    counter, mask = item_counter(q, spec), mask_of_queries(operands, spec)
    of_dkdv = (q, k, v, dout, *of_rows, dk, dv, counter, sums, Terms(), mask)
    launch(name, flash_bwd_dkdv_kernel, prepare_dkdv, of_dkdv, spec, backend, num_warps=NUM_WARPS)
    return carry, dk, dv
