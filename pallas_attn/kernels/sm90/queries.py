"""Tiles of queries, as the kernels of dk and dv load and visit them for a tile of keys."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.programs import for_each_tile
from pallas_attn.kernels.explicit.registers import as_columns, iota
from pallas_attn.kernels.explicit.schedule import make_schedule
from pallas_attn.kernels.explicit.steps import count_steps, tile_start
from pallas_attn.kernels.explicit.tma import Tiles, load_tile
from pallas_attn.kernels.explicit.wgmma import WGMMA, WGMMA_ROWS
from pallas_attn.kernels.explicit.wgmma_launch import launch
from pallas_attn.kernels.explicit.wgmma_scores import visible_scores
from pallas_attn.kernels.library.tiles import split_step, visible_tiles
from pallas_attn.kernels.sm90.gradient_tiles import block_tiles
from pallas_attn.targets import num_sms
from twin_attention.targets.steps import exchange_sides


class Rows(NamedTuple):
    """Tiles of queries in shared memory, with a number for each row and their barriers.

    Attributes:
        matrix: q or dout, in global memory.
        tiles: its tiles.
        vector, rows: lse2 or delta, in global and in shared memory; or None.
        full, empty: barriers of each tile.
    """

    matrix: object
    tiles: Tiles
    vector: object
    rows: object
    full: object
    empty: object

    def slot(self, step):
        """Return the number of the tile of a step."""
        return step % self.tiles.multiplied[0].shape[0]

    def load(self, step, batch, head, start):
        """Start to load the tile of a step, as soon as there is room."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.empty.at[slot])
        load_tile(self.matrix, self.tiles.tile(slot), batch, head, start, self.full.at[slot])
        if self.vector is not None:
            block_q = self.rows.shape[1]
            values = self.vector.at[batch, head, pl.ds(start, block_q)]
            plgpu.copy_gmem_to_smem(values, self.rows.at[slot], self.full.at[slot])


def locate_keys(
    tile,
    heads_kv,
    group_size,
    seq_q,
    seq_kv,
    diagonal,
    window_left,
    window_right,
    block_q,
    block_kv,
):
    """Locate a tile of keys, and the tiles of its group's queries that see it.

    Queries up to ROW_PADDING exist for this purpose: their p is 0 without a mask.

    Returns:
        The batch element, the kv head and the first key; a function that returns the query head and
        the first row of a step; how many steps are masked, the first ones, and how many there are.
    """
    num_tiles = pl.cdiv(seq_kv, block_kv)
    batch, head_kv = tile // num_tiles // heads_kv, tile // num_tiles % heads_kv
    start_kv = tile % num_tiles * block_kv
    padded_rows = pl.cdiv(seq_q, block_q) * block_q
    visible = visible_tiles(
        start_kv, seq_kv, padded_rows, -diagonal, window_right, window_left, block_kv, block_q
    )
    masked_steps, steps = count_steps(*visible[1:])

    def locate_queries(step):
        # The tiles at the edges of all heads go first, then the full ones.
        is_edge = step < masked_steps * group_size
        member, index = split_step(
            jnp.where(is_edge, step, step - masked_steps * group_size),
            jnp.where(is_edge, masked_steps, steps - masked_steps),
            group_size,
        )
        index = jnp.where(is_edge, index, index + masked_steps)
        start = tile_start(index, *visible, block_q, padded_rows - block_q)
        return head_kv * group_size + member, start

    return batch, head_kv, start_kv, locate_queries, masked_steps * group_size, steps * group_size


def produce_queries(schedule_ref, program, locate, keys, kv_empty, queries):
    """Load all that the consumers of dk or dv multiply, and what belongs to the queries' rows.

    Args:
        schedule_ref, program: the program's tiles of keys.
        locate: `locate_keys` of a tile.
        keys: k, or k and v: the matrix, and a tile and a barrier for each consumer.
        kv_empty: barriers of these tiles.
        queries: `Rows` of q and of dout.
    """

    def load_all(tile, step):
        batch, head_kv, start_kv, locate_queries, _, steps = locate(tile)

        def load_queries(index):
            head, start = locate_queries(index)
            q, dout = queries
            q.load(step + index, batch, head, start)

            @pl.when(index == 0)  # after q, which does not wait for the end of the tile before
            def _():
                for w in range(kv_empty.shape[0]):
                    plgpu.barrier_wait(kv_empty.at[w])
                for matrix, tiles, full in keys:
                    for w in range(kv_empty.shape[0]):
                        start_row = start_kv + w * WGMMA_ROWS
                        load_tile(matrix, tiles(w), batch, head_kv, start_row, full.at[w])

            dout.load(step + index, batch, head, start)

        pl.loop(0, steps)(load_queries)
        return step + steps

    for_each_tile(schedule_ref, program, load_all)


def exponents(s, lse2, start_q, start_key, rule, window_left, window_right, masked):
    """Return the exponents of pᵀ = 2^(sᵀ - lse2), and the derivative of the cap. Keys are rows.

    start_key: the first key, counted as queries are.
    """
    position = key = None
    if masked:
        position = iota(s.shape, 1, WGMMA) + start_q
        key = iota(s.shape, 0, WGMMA) + start_key
    s, exp2_scale, dcap = visible_scores(
        s, position, key, None, rule, window_left, window_right, masked
    )
    return s * exp2_scale - as_columns(lse2, s, WGMMA), dcap


def launch_keys(kernel_name, kernel, inputs, gradient, memory, values, stages, spec, backend):
    """Call a kernel of dk or of dv.

    Args:
        kernel_name, kernel: its name in the code, and the function over references.
        inputs: operands; None for those that the kernel does not read.
        gradient: the operand whose gradient it computes.
        memory: types of what it has for its keys in shared memory.
        values: the tiles that ds or p multiplies, "q_tiles" or "dout_tiles".
        stages: how many tiles of q and of dout it has there.
        spec, backend: problem and target.

    Returns:
        The gradient.
    """
    config = backend.configs(spec)["flash_bwd_dkdv"]
    warpgroups = config.num_warps // 4 - 1
    of_q, of_dout = ((count, config.block_q) for count in stages)
    tiles, pieces = block_tiles(spec, values, q_tiles=of_q, dout_tiles=of_dout)
    memory = memory | tiles | {"kv_empty": plgpu.Barrier(num_barriers=warpgroups)}
    for name, rows, vector, shape in (
        ("q", "lse2_rows", inputs.lse2, of_q),
        ("dout", "delta_rows", inputs.delta, of_dout),
    ):
        copies = pieces[f"{name}_tiles"]
        if vector is not None:
            memory[rows] = plgpu.SMEM(shape, jnp.float32)
            copies += 1
        memory[f"{name}_full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=shape[0])
        memory[f"{name}_empty"] = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=shape[0])
    turned = replace(exchange_sides(spec), heads_q=spec.heads_kv)
    (result,) = launch(
        "flash_bwd_dkdv",
        kernel,
        inputs,
        make_schedule(turned, config.block_kv, config.block_q, num_sms(backend.target)),
        (jax.ShapeDtypeStruct(gradient.shape, gradient.dtype),),
        memory,
        spec,
        config,
        kernel_name=kernel_name,
    )
    return result
