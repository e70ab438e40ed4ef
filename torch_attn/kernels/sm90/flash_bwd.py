"""Flash attention, backward, for SM90.

The same formulas as `torch_attn.kernels.portable.flash_bwd`. What the compiler decides there is
written here: a warp that does nothing but load, warpgroups that do nothing but compute, and which
products run under which arithmetic. There are two ways to dq: a kernel of its own, which prepares
the rows as well and makes the same bits every time, with seven products in all; or float32
additions from the kernel of dk and dv, in any order, with five. Shah et al. 2024, FlashAttention-3,
appendix B.
"""

from torch_attn.kernels.gradients import make_flash_bwd, prepare_postprocess
from torch_attn.kernels.portable.flash_bwd import preprocess
from torch_attn.kernels.sm90.flash_bwd_dkdv import flash_bwd_dkdv_kernel, prepare_dkdv
from torch_attn.kernels.sm90.flash_bwd_dq import flash_bwd_dq_kernel, prepare_dq
from torch_attn.kernels.sm90.sums import flash_bwd_postprocess_kernel, sum_columns

# Four warps are one consumer; Triton adds those of the other parts.
flash_bwd = make_flash_bwd(
    preprocess,
    dq=(flash_bwd_dq_kernel, prepare_dq),
    dkdv=(flash_bwd_dkdv_kernel, prepare_dkdv),
    postprocess=(flash_bwd_postprocess_kernel, prepare_postprocess),
    sum_columns=sum_columns,
    num_sums=3,
    dq_prepares_rows=True,
    num_warps=4,
)
