"""Flash attention, backward, in the ways of its twin, which describes them.

A step begins with the last products of the previous step, so that these and the next scores are in
flight together.
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
    run = _flash_bwd_large if has_large_heads(spec) else _flash_bwd_small
    return run(dout, dlse, operands, out, lse, rest, spec, backend)
