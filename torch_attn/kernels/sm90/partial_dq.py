"""dq from the carry that the gradients through all keys left."""

from torch import Tensor

from torch_attn.kernels.gradients import prepare_postprocess
from torch_attn.kernels.sm90.sums import flash_bwd_postprocess_kernel
from torch_attn.launch import launch
from twin_attention.contract.operands import GradientCarry
from twin_attention.contract.spec import PartialSpec
from twin_attention.targets.family import Backend


def partial_dq(
    like: Tensor, carry: GradientCarry[Tensor], spec: PartialSpec, backend: Backend
) -> Tensor:
    """Return dq as the portable `partial_dq` does, or from the kernel's sums."""
    if "flash_bwd_fused" not in backend.configs(spec):
        return carry.dq.to(like.dtype)
    dq = like.new_empty(like.shape)
    launch(
        "flash_bwd_postprocess", flash_bwd_postprocess_kernel, prepare_postprocess,
        (carry.dq, dq, None), spec, backend,
    )  # fmt: skip
    return dq
