"""Flash attention, backward.

With p recomputed from lse, ``dp = dout vᵀ`` and ``delta = rowsum(dout ∘ out) - dlse``:
``ds = p ∘ (dp - delta) ∘ dcap``, where dcap is the softcap's derivative, ``dq = scale · ds k``,
``dk = scale · dsᵀ q``, ``dv = pᵀ dout``. A sink is a score without a value, so its dp is 0.
Dao 2023, FlashAttention-2, algorithm 2. dq is computed in one of two ways. Its own kernel, which
also prepares the rows, makes the same bits every time, with seven products in all. Or the kernel of
dk and dv adds it up in float32, in any order, with five.

For head sizes above 128 the accumulator of one gradient fills the registers. dq, dk and dv then
each have a kernel, with eight products in all.

As in the forward, a producer warp loads tiles by TMA, and consumer warpgroups multiply, with p and
ds from the registers where they were computed. A step begins with the last products of the previous
step, so that these and the next scores are in flight together. Where dq is summed, the next scores
are issued a step ahead.
"""

from jax import Array

from pallas_attn.kernels.gradients import make_flash_bwd
from pallas_attn.kernels.sm90.flash_bwd_dk import launch_dk
from pallas_attn.kernels.sm90.flash_bwd_dkdv import launch_dkdv
from pallas_attn.kernels.sm90.flash_bwd_dq import launch_dq
from pallas_attn.kernels.sm90.flash_bwd_dv import launch_dv
from pallas_attn.kernels.sm90.flash_bwd_fused import launch_fused
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.sm90 import has_large_heads


def _launch_dk_and_dv(inputs, spec, backend, _masks):
    """Call the kernels of dk and of dv."""
    return launch_dk(inputs, spec, backend), launch_dv(inputs, spec, backend)


_flash_bwd_small = make_flash_bwd(None, launch_dq, launch_dkdv, launch_fused)
_flash_bwd_large = make_flash_bwd(None, launch_dq, _launch_dk_and_dv)


def flash_bwd(
    dout: Array,
    dlse: Array | None,
    operands: AttentionOperands[Array],
    out: Array,
    lse: Array,
    rest: Array | None,
    spec: AttentionSpec,
    backend: Backend,
) -> AttentionOperands[Array]:
    """Call the kernels of the backward for the head size: see `make_flash_bwd`."""
    run = _flash_bwd_large if has_large_heads(spec) else _flash_bwd_small
    return run(dout, dlse, operands, out, lse, rest, spec, backend)
