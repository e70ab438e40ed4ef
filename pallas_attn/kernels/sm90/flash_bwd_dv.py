"""The backward's kernel of dv alone, of heads above 128.

`pallas_attn.kernels.sm90.flash_bwd` has the formulas.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import warpgroup_barrier
from pallas_attn.kernels.explicit.programs import for_each_tile, run_warpgroups
from pallas_attn.kernels.explicit.softmax import add_columns
from pallas_attn.kernels.explicit.steps import step_ranges
from pallas_attn.kernels.explicit.tma import Tiles, store_tile
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
from pallas_attn.kernels.sm90.gradient_tiles import block_tiles
from pallas_attn.kernels.sm90.queries import (
    Rows,
    exponents,
    launch_keys,
    locate_keys,
    produce_queries,
)


def flash_bwd_dv_kernel(
    q_ref,
    k_ref,
    _v_ref,
    dout_ref,
    lse2_ref,
    _delta_ref,
    schedule_ref,
    dv_ref,
    *,
    k_and_dv_tiles,
    q_tiles,
    dout_tiles,
    lse2_rows,
    k_full,
    kv_empty,
    q_full,
    q_empty,
    dout_full,
    dout_empty,
    group_size,
    seq_q,
    seq_kv,
    diagonal,
    rule,
    window_left,
    window_right,
    head_dim,
    head_dim_v,
    block_q,
    block_kv,
    num_warps,
    num_stages,
):
    """One program computes tiles of block_kv rows of dv of a kv head, one after the other.

    As `flash_bwd_dk_kernel`, with pᵀ dout in place of dsᵀ q, and so without v and delta, and
    num_stages + 1 tiles of dout.
    """
    warpgroups = num_warps // 4 - 1
    program = lax.axis_index("program")
    locate = functools.partial(
        locate_keys, heads_kv=k_ref.shape[2], group_size=group_size, seq_q=seq_q, seq_kv=seq_kv,
        diagonal=diagonal, window_left=window_left, window_right=window_right, block_q=block_q,
        block_kv=block_kv,
    )  # fmt: skip
    # A tile of dv takes the memory of its keys, which nobody else reads.
    k_tiles, dv_tiles = zip(*((Tiles(*x[:2]), Tiles(*x[2:])) for x in k_and_dv_tiles), strict=True)
    k_tiles, dv_tiles = ([x.tile(0) for x in tiles] for tiles in (k_tiles, dv_tiles))
    queries = Rows(q_ref, Tiles(*q_tiles), lse2_ref, lse2_rows, q_full, q_empty)
    douts = Rows(dout_ref, Tiles(*dout_tiles[:2]), None, None, dout_full, dout_empty)

    def produce():
        keys = ((k_ref, k_tiles.__getitem__, k_full),)
        produce_queries(schedule_ref, program, locate, keys, kv_empty, (queries, douts))

    def consume(w):
        """Compute the rows of consumer warpgroup w, a number: each has its own code."""
        k = k_tiles[w]
        plgpu.barrier_arrive(kv_empty.at[w])
        for rows in (queries, douts):
            for slot in range(rows.empty.shape[0]):
                plgpu.barrier_arrive(rows.empty.at[slot])

        def compute(tile, step):
            batch, head_kv, start_kv, locate_queries, masked_steps, steps = locate(tile)
            start_row = start_kv + w * WGMMA_ROWS
            plgpu.barrier_wait(k_full.at[w])

            # Visit the tiles of queries that see these keys; only tiles at the edges are masked.
            def visit(x, carry, masked):
                now = step + x
                slot, previous = queries.slot(now), douts.slot(now - 1)
                plgpu.barrier_wait(q_full.at[slot])

                def overlap(s_ref, dv_ref=None):
                    # Start sᵀ = scale · k qᵀ, and dv += pᵀ dout of the tile before.
                    add_scores(s_ref, k, queries.tiles.tile(slot))
                    pending = 0
                    if dv_ref is not None:
                        plgpu.barrier_wait(dout_full.at[previous])
                        p, dv = carry
                        dout = douts.tiles.tile(previous)
                        dv_ref[...] = dv
                        add_values(dv_ref, p, dout)
                        pending = len(dout.multiplied)
                    # pᵀ = exp(sᵀ - lse)
                    s = wait_for(s_ref, pending)
                    lse2 = plgpu.load(lse2_rows.at[slot], layout=WGMMA.reduce(0))
                    plgpu.barrier_arrive(q_empty.at[slot])
                    start_q = locate_queries(x)[1] if masked else None
                    power, _dcap = exponents(
                        s, lse2, start_q, start_row - diagonal, rule, window_left, window_right,
                        masked,
                    )  # fmt: skip
                    p_new = lax.optimization_barrier(jnp.exp2(power))
                    dv_new = zeros(WGMMA_ROWS, dv_tiles[w].columns[-1].stop)
                    if dv_ref is not None:
                        finish_before_wait(add_columns(p_new))
                        dv_new = wait_for(dv_ref, 0, p)
                        plgpu.barrier_arrive(dout_empty.at[previous])
                    return p_new.astype(k_ref.dtype), dv_new

                refs = [accumulator(WGMMA_ROWS, block_q)]
                if carry is not None:
                    refs.append(accumulator(*carry[1].shape))
                return pl.run_scoped(overlap, *refs)

            # The first tile of queries has no pᵀ dout to run under its exponentials.
            ranges = step_ranges(masked_steps, steps, first=1)
            carry = visit(program * 0, None, masked=ranges[0][0])
            for masked, lower, upper in ranges:
                carry = lax.fori_loop(lower, upper, functools.partial(visit, masked=masked), carry)
            p, dv = carry

            # dv += pᵀ dout of the last tile
            previous = douts.slot(step + steps - 1)
            plgpu.barrier_wait(dout_full.at[previous])

            def last(dv_ref):
                dv_ref[...] = dv
                add_values(dv_ref, p, douts.tiles.tile(previous))
                return wait_for(dv_ref, 0, p)

            dv = pl.run_scoped(last, accumulator(*dv.shape))
            plgpu.barrier_arrive(dout_empty.at[previous])

            # Store dv where k was, whose rows nobody else reads.
            warpgroup_barrier()
            store_tile(dv, dv_tiles[w], dv_ref, batch, head_kv, start_row)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(kv_empty.at[w])
            return step + steps

        for_each_tile(schedule_ref, program, compute)
        plgpu.wait_smem_to_gmem(0)

    run_warpgroups(warpgroups, consume, produce)


def launch_dv(inputs, spec, backend):
    """Call `flash_bwd_dv_kernel`; returns dv."""
    config = backend.configs(spec)["flash_bwd_dkdv"]
    warpgroups = config.num_warps // 4 - 1
    tiles, pieces = block_tiles(spec, k_tiles=(1, WGMMA_ROWS), dv_tiles=(1, WGMMA_ROWS))
    k, dv = (tiles[name].refs for name in ("k_tiles", "dv_tiles"))
    memory = {
        "k_and_dv_tiles": [plgpu.RefUnion(*k, *dv) for _ in range(warpgroups)],
        "k_full": plgpu.Barrier(num_arrivals=pieces["k_tiles"], num_barriers=warpgroups),
    }
    stages = (config.num_stages + 1,) * 2
    read = inputs._replace(v=None, delta=None)
    return launch_keys(
        "flash_bwd_dv", flash_bwd_dv_kernel, read, inputs.v, memory, "dout_tiles", stages, spec,
        backend,
    )  # fmt: skip
