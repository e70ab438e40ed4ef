"""dk, for head sizes above 128."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.registers import as_columns
from pallas_attn.kernels.explicit.softmax import add_columns
from pallas_attn.kernels.explicit.wgmma import (
    WGMMA,
    WGMMA_ROWS,
    accumulator,
    add_scores,
    add_values,
    finish_before_wait,
    wait_for,
    zeros,
)
from pallas_attn.kernels.sm90.flash_bwd_large import exponents, launch_large
from pallas_attn.kernels.sm90.gradient_tiles import block_tiles


def visit(kernel, keys, masked, x, carry):
    """Add the previous tile's dsᵀ q to dk; return this tile's ds, and dk."""
    memory, queries, douts = kernel.memory, kernel.queries, kernel.douts
    now = keys.first_step + x
    slot_q, slot, previous = queries.slot(now), douts.slot(now), queries.slot(now - 1)
    # w, but unknown to the compiler, which would hoist the descriptors of k and v out of the loop:
    # there are no registers for them.
    own = keys.w + (now >> 30)
    k, v = kernel.k(own), kernel.v(own)
    scores_type = accumulator(WGMMA_ROWS, kernel.problem.block_q)

    def overlap(dk_ref=None):
        # Start dk += dsᵀ q of the previous tile, sᵀ = scale · k qᵀ, dpᵀ = v doutᵀ.
        if dk_ref is not None:
            ds, dk = carry
            dk_ref[...] = dk
            add_values(dk_ref, ds, queries.tiles.tile(previous))
        plgpu.barrier_wait(queries.full.at[slot_q])
        return pl.run_scoped(functools.partial(scores, dk_ref), scores_type)

    def scores(dk_ref, s_ref):
        add_scores(s_ref, k, queries.factors.tile(slot_q))
        dk = zeros(WGMMA_ROWS, k.columns[-1].stop)
        if dk_ref is None:
            plgpu.barrier_wait(memory.v_full.at[keys.w])
        else:
            dk = wait_for(dk_ref, len(k.multiplied), carry[0])
            plgpu.barrier_arrive(queries.empty.at[previous])
        plgpu.barrier_wait(douts.full.at[slot])
        return pl.run_scoped(functools.partial(differences, s_ref), scores_type), dk

    def differences(s_ref, dp_ref):
        add_scores(dp_ref, v, douts.tiles.tile(slot))
        # pᵀ = exp(sᵀ - lse)
        s = wait_for(s_ref, len(v.multiplied))
        lse2 = plgpu.load(queries.rows.at[slot_q], layout=WGMMA.reduce(0))
        power, dcap = exponents(kernel, keys, s, lse2, x, masked)
        p = lax.optimization_barrier(jnp.exp2(power) * dcap)
        delta = plgpu.load(douts.rows.at[slot], layout=WGMMA.reduce(0))
        finish_before_wait(add_columns(p))
        # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
        dp = wait_for(dp_ref, 0, p)
        ds = (p * (dp - as_columns(delta, dp, WGMMA))).astype(kernel.inputs.k.dtype)
        plgpu.barrier_arrive(douts.empty.at[slot])
        return ds

    if carry is None:
        return overlap()
    return pl.run_scoped(overlap, accumulator(*carry[1].shape))


def launch_dk(inputs, spec, backend):
    config = backend.configs(spec)["flash_bwd_dkdv"]
    warpgroups = config.num_warps // 4 - 1
    rows = warpgroups, WGMMA_ROWS
    memory, pieces = block_tiles(spec, k_tiles=rows, v_tiles=rows)
    memory |= {
        "k_full": plgpu.Barrier(num_arrivals=pieces["k_tiles"], num_barriers=warpgroups),
        "v_full": plgpu.Barrier(num_arrivals=pieces["v_tiles"], num_barriers=warpgroups),
    }
    stages = config.num_stages + 1, config.num_stages
    return launch_large(
        "flash_bwd_dk", visit, inputs, inputs.k, memory, "q_tiles", stages, spec, backend
    )
