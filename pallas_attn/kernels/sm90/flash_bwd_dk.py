"""The backward's kernel of dk alone, of heads above 128.

`pallas_attn.kernels.sm90.flash_bwd` has the formulas.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import warpgroup_barrier
from pallas_attn.kernels.explicit.programs import for_each_tile, run_warpgroups
from pallas_attn.kernels.explicit.registers import as_columns
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
from pallas_attn.kernels.sm90.gradient_tiles import block_tiles, values_and_factors
from pallas_attn.kernels.sm90.queries import (
    Rows,
    exponents,
    launch_keys,
    locate_keys,
    produce_queries,
)


def flash_bwd_dk_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    schedule_ref,
    dk_ref,
    *,
    k_tiles,
    v_tiles,
    q_tiles,
    dout_tiles,
    lse2_rows,
    delta_rows,
    k_full,
    v_full,
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
    """One program computes tiles of block_kv rows of dk of a kv head, one after the other.

    Operands, loop invariant and accumulation: as in `flash_bwd_dkdv_kernel`. In shared memory a
    tile of 64 rows of k and of v for each consumer warpgroup, num_stages + 1 tiles of q with lse2
    of their rows, num_stages of dout with delta, and their barriers. dv is that of
    `flash_bwd_dv_kernel`: the registers have room for one of the two.
    """
    warpgroups = num_warps // 4 - 1
    program = lax.axis_index("program")
    locate = functools.partial(
        locate_keys, heads_kv=k_ref.shape[2], group_size=group_size, seq_q=seq_q, seq_kv=seq_kv,
        diagonal=diagonal, window_left=window_left, window_right=window_right, block_q=block_q,
        block_kv=block_kv,
    )  # fmt: skip
    k_tiles, v_tiles = (Tiles(*tiles) for tiles in (k_tiles, v_tiles))
    q_tiles, q_blocks = values_and_factors(q_tiles)
    queries = Rows(q_ref, q_tiles, lse2_ref, lse2_rows, q_full, q_empty)
    douts = Rows(dout_ref, Tiles(*dout_tiles), delta_ref, delta_rows, dout_full, dout_empty)

    def produce():
        keys = (k_ref, k_tiles.tile, k_full), (v_ref, v_tiles.tile, v_full)
        produce_queries(schedule_ref, program, locate, keys, kv_empty, (queries, douts))

    def consume(w):
        """Compute the rows of consumer warpgroup w, a number: each has its own code."""
        k = k_tiles.tile(w)
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
                slot_q, slot, previous = queries.slot(now), douts.slot(now), queries.slot(now - 1)
                # w, which the compiler does not know: it would compute the descriptors of k and v
                # before the loop, for which there are no registers.
                own = w + (now >> 30)
                k, v = k_tiles.tile(own), v_tiles.tile(own)

                def overlap(dk_ref=None):
                    # Start dk += dsᵀ q of the tile before, sᵀ = scale · k qᵀ, dpᵀ = v doutᵀ.
                    if dk_ref is not None:
                        ds, dk = carry
                        dk_ref[...] = dk
                        add_values(dk_ref, ds, queries.tiles.tile(previous))
                    plgpu.barrier_wait(q_full.at[slot_q])
                    return pl.run_scoped(
                        functools.partial(scores, dk_ref), accumulator(WGMMA_ROWS, block_q)
                    )

                def scores(dk_ref, s_ref):
                    add_scores(s_ref, k, q_blocks.tile(slot_q))
                    dk = zeros(WGMMA_ROWS, k.columns[-1].stop)
                    if dk_ref is None:
                        plgpu.barrier_wait(v_full.at[w])
                    else:
                        dk = wait_for(dk_ref, len(k.multiplied), carry[0])
                        plgpu.barrier_arrive(q_empty.at[previous])
                    plgpu.barrier_wait(dout_full.at[slot])
                    ds = pl.run_scoped(
                        functools.partial(differences, s_ref), accumulator(WGMMA_ROWS, block_q)
                    )
                    return ds, dk

                def differences(s_ref, dp_ref):
                    add_scores(dp_ref, v, douts.tiles.tile(slot))
                    # pᵀ = exp(sᵀ - lse)
                    s = wait_for(s_ref, len(v.multiplied))
                    lse2 = plgpu.load(lse2_rows.at[slot_q], layout=WGMMA.reduce(0))
                    start_q = locate_queries(x)[1] if masked else None
                    power, dcap = exponents(
                        s, lse2, start_q, start_row - diagonal, rule, window_left, window_right,
                        masked,
                    )  # fmt: skip
                    p = lax.optimization_barrier(jnp.exp2(power) * dcap)
                    delta = plgpu.load(delta_rows.at[slot], layout=WGMMA.reduce(0))
                    finish_before_wait(add_columns(p))
                    # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
                    dp = wait_for(dp_ref, 0, p)
                    ds = (p * (dp - as_columns(delta, dp, WGMMA))).astype(k_ref.dtype)
                    plgpu.barrier_arrive(dout_empty.at[slot])
                    return ds

                if carry is None:
                    return overlap()
                return pl.run_scoped(overlap, accumulator(*carry[1].shape))

            # The first tile of queries has no dsᵀ q to run under its exponentials.
            ranges = step_ranges(masked_steps, steps, first=1)
            carry = visit(program * 0, None, masked=ranges[0][0])
            for masked, lower, upper in ranges:
                carry = lax.fori_loop(lower, upper, functools.partial(visit, masked=masked), carry)
            ds, dk = carry

            # dk += dsᵀ q of the last tile
            previous = queries.slot(step + steps - 1)

            def last(dk_ref):
                dk_ref[...] = dk
                add_values(dk_ref, ds, queries.tiles.tile(previous))
                return wait_for(dk_ref, 0, ds)

            dk = pl.run_scoped(last, accumulator(*dk.shape))
            plgpu.barrier_arrive(q_empty.at[previous])

            # Scale dk and store it where k was, whose rows nobody else reads.
            warpgroup_barrier()
            store_tile(dk * rule.scale, k, dk_ref, batch, head_kv, start_row)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(kv_empty.at[w])
            return step + steps

        for_each_tile(schedule_ref, program, compute)
        plgpu.wait_smem_to_gmem(0)

    run_warpgroups(warpgroups, consume, produce)


def launch_dk(inputs, spec, backend):
    """Call `flash_bwd_dk_kernel`; returns dk."""
    config = backend.configs(spec)["flash_bwd_dkdv"]
    warpgroups = config.num_warps // 4 - 1
    rows = warpgroups, WGMMA_ROWS
    memory, pieces = block_tiles(spec, k_tiles=rows, v_tiles=rows)
    memory |= {
        "k_full": plgpu.Barrier(num_arrivals=pieces["k_tiles"], num_barriers=warpgroups),
        "v_full": plgpu.Barrier(num_arrivals=pieces["v_tiles"], num_barriers=warpgroups),
    }
    stages = config.num_stages + 1, config.num_stages
    return launch_keys(
        "flash_bwd_dk", flash_bwd_dk_kernel, inputs, inputs.k, memory, "q_tiles", stages, spec,
        backend,
    )  # fmt: skip
