"""Gradients through some of the keys: the backward kernels, adding to the dq through other keys."""

import jax.numpy as jnp
from jax import Array

from pallas_attn.kernels.gradients import Inputs, Sources
from pallas_attn.kernels.library.mask import mask_of_keys, mask_of_queries
from pallas_attn.kernels.library.tiles import ROW_PADDING
from pallas_attn.kernels.portable.flash_bwd import launch_dkdv, launch_dq, launch_preprocess
from twin_attention.contract.operands import GradientCarry, PartialOperands
from twin_attention.contract.spec import PartialSpec
from twin_attention.targets.family import Backend


def partial_bwd(
    dout: Array,
    dlse: Array | None,
    operands: PartialOperands[Array],
    out: Array,
    lse: Array,
    carry: GradientCarry[Array] | None,
    spec: PartialSpec,
    backend: Backend,
) -> tuple[GradientCarry[Array], Array, Array]:
    q, k, v, mask = *operands[:3], mask_of_keys(operands, spec)
    if carry is None:
        rows = launch_preprocess(Sources(q, k, v, dout, out, lse, dlse), spec, backend, mask)
        # Every family uses this shape, so that a program may mix families.
        rows = (x[..., : spec.seq_q] for x in rows)
        carry = GradientCarry(jnp.zeros(q.shape, jnp.float32), *rows)
    padding = ((0, 0), (0, 0), (0, -spec.seq_q % ROW_PADDING))
    lse2 = jnp.pad(carry.lse2, padding, constant_values=float("inf"))
    inputs = Inputs(q, k, v, dout, lse2, jnp.pad(carry.delta, padding))
    dq = launch_dq(inputs, spec, backend, mask, carry.dq)
    dk, dv = launch_dkdv(inputs, spec, backend, mask_of_queries(operands, spec), jnp.float32)
    return carry._replace(dq=dq), dk, dv
