"""Flash attention, backward.

With p recomputed from lse, ``dp = dout vᵀ`` and ``delta = rowsum(dout ∘ out) - dlse``:
``ds = p ∘ (dp - delta) ∘ dcap``, where dcap is the softcap's derivative, ``dq = scale · ds k``,
``dk = scale · dsᵀ q``, ``dv = pᵀ dout``. A sink is a score without a value, so that its dp is 0.
Dao 2023, FlashAttention-2, algorithm 2. There are two ways to dq: a kernel of its own, which
prepares the rows as well and makes the same bits every time, with seven products in all; or float32
additions from the kernel of dk and dv, in any order, with five.

Placed by hand, as in the forward: a producer warp loads tiles by TMA; consumer warpgroups multiply,
with p and ds from registers where they were computed. A step begins with the last products of the
step before, so that they and the next scores are in flight together.
"""

from pallas_attn.kernels.gradients import make_flash_bwd, prepare_rows
from pallas_attn.kernels.sm90.flash_bwd_dkdv import launch_dkdv, launch_fused
from pallas_attn.kernels.sm90.flash_bwd_dq import launch_dq

flash_bwd = make_flash_bwd(
    prepare_rows, launch_dq, launch_dkdv, launch_fused, dq_prepares_rows=True
)
