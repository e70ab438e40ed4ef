"""dv, for head sizes above 128."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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
    """Add the previous tile's pᵀ dout to dv; return this tile's p, and dv."""
    queries, douts = kernel.queries, kernel.douts
    k = kernel.k(keys.w)
    now = keys.first_step + x
    slot, previous = queries.slot(now), douts.slot(now - 1)
    plgpu.barrier_wait(queries.full.at[slot])

    def overlap(s_ref, dv_ref=None):
        # Start sᵀ = scale · k qᵀ, and dv += pᵀ dout of the previous tile.
        add_scores(s_ref, k, queries.tiles.tile(slot))
        pending = 0
        if dv_ref is not None:
            plgpu.barrier_wait(douts.full.at[previous])
            p, dv = carry
            dout = douts.tiles.tile(previous)
            dv_ref[...] = dv
            add_values(dv_ref, p, dout)
            pending = len(dout.multiplied)
        # pᵀ = exp(sᵀ - lse)
        s = wait_for(s_ref, pending)
        lse2 = plgpu.load(queries.rows.at[slot], layout=WGMMA.reduce(0))
        plgpu.barrier_arrive(queries.empty.at[slot])
        power, _dcap = exponents(kernel, keys, s, lse2, x, masked)
        p_new = lax.optimization_barrier(jnp.exp2(power))
        dv_new = zeros(WGMMA_ROWS, kernel.stored(keys.w).columns[-1].stop)
        if dv_ref is not None:
            finish_before_wait(add_columns(p_new))
            dv_new = wait_for(dv_ref, 0, p)
            plgpu.barrier_arrive(douts.empty.at[previous])
        return p_new.astype(kernel.inputs.k.dtype), dv_new

    refs = [accumulator(WGMMA_ROWS, kernel.problem.block_q)]
    if carry is not None:
        refs.append(accumulator(*carry[1].shape))
    return pl.run_scoped(overlap, *refs)


def launch_dv(inputs, spec, backend):
    config = backend.configs(spec)["flash_bwd_dkdv"]
    warpgroups = config.num_warps // 4 - 1
    tiles, pieces = block_tiles(spec, k_tiles=(1, WGMMA_ROWS), dv_tiles=(1, WGMMA_ROWS))
    k, dv = (tiles[name].refs for name in ("k_tiles", "dv_tiles"))
    # A tile of dv takes the place of its tile of k, which no other warpgroup reads.
    memory = {
        "k_and_dv_tiles": [plgpu.RefUnion(*k, *dv) for _ in range(warpgroups)],
        "k_full": plgpu.Barrier(num_arrivals=pieces["k_tiles"], num_barriers=warpgroups),
    }
    stages = (config.num_stages + 1,) * 2
    read = inputs._replace(v=None, delta=None)
    return launch_large(
        "flash_bwd_dv", visit, read, inputs.v, memory, "dout_tiles", stages, spec, backend
    )
