"""Tiles of keys in the kernels of dk and dv: where they are, and what they load."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.items import Place, Queue, allocate_hand_over
from pallas_attn.kernels.explicit.steps import count_steps, tile_start
from pallas_attn.kernels.explicit.tma import Tiles, load_tile
from pallas_attn.kernels.explicit.wgmma import WGMMA_ROWS
from pallas_attn.kernels.explicit.wgmma_launch import Problem
from pallas_attn.kernels.gradients import Inputs
from pallas_attn.kernels.library.sequences import first_tile
from pallas_attn.kernels.library.tiles import ROW_PADDING, visible_tiles
from pallas_attn.kernels.sm90.gradient_tiles import (
    ds_width,
    make_tiles,
    value_columns,
    values_and_factors,
)
from pallas_attn.kernels.sm90.work import CONSUMERS, Work, last_tile, own_tile, place_of


class Group(NamedTuple):
    """The query heads of a kv head, `members` an item; hides_missing: in every tile."""

    members: int
    size: int
    heads: int
    hides_missing: bool


class Memory(NamedTuple):
    """Shared memory of a program, in the order of addresses.

    Attributes:
        delta_rows, lse2_rows: delta of each tile of dout's rows, lse2 of each tile of q's.
        k_tiles, v_tiles: 64 rows for each consumer, for one work item, or for two to load the next
            one early.
        ds_tiles, dq_tiles: if dq is summed, two tiles of dsᵀ for each consumer, and its part of a
            tile of dq.
        places: each consumer's copy of its tile's place if dq of packed sequences is summed.
    """

    delta_rows: Any
    dout_empty: Any
    dout_full: Any
    dout_tiles: Any
    dq_tiles: Any
    ds_tiles: Any
    hand_over: Any
    k_tiles: Any
    kv_empty: Any
    kv_full: Any
    lse2_rows: Any
    places: Any
    q_empty: Any
    q_full: Any
    q_tiles: Any
    v_tiles: Any

    def as_tiles(self) -> Memory:
        return self._replace(
            k_tiles=Tiles(*self.k_tiles),
            v_tiles=Tiles(*self.v_tiles),
            q_tiles=Queries(*values_and_factors(self.q_tiles)),
            dout_tiles=Queries(*values_and_factors(self.dout_tiles)),
        )


class Queries(NamedTuple):
    """Tiles of q or dout: as the operand of ds or p, and as that of the scores."""

    values: Tiles
    factors: Tiles


def locate(problem: Problem, group: Group, item: Any) -> Work:
    """Return the work of an item, a tile of keys; its place's head counts parts of GQA groups."""
    block_q, block_kv, window = problem.block_q, problem.block_kv, problem.window
    parts = group.heads // group.members
    batch, place = place_of(item, problem.seq_kv, problem.seq_q, parts, block_kv)
    diagonal, num_queries = place.end - place.size_other, place.size_other
    first_row = first_tile(place.first_other, place.sequence, ROW_PADDING) * ROW_PADDING
    head_kv = place.head // (group.size // group.members)
    visible = visible_tiles(
        place.start, place.end, num_queries, -diagonal, window.right, window.left, block_kv, block_q
    )
    last_start = last_tile(num_queries, block_q)
    if group.hides_missing:
        visible = visible.mask_all(place.start + block_kv > place.end)

    def visited(step):
        return tile_start(step, visible, block_q, last_start)

    return Work(batch, place, head_kv, first_row, diagonal, visited, *count_steps(visible))


def release_all(memory: Memory, w: int) -> None:
    """Tell the producer that all tiles are free; the first step releases the last tile of q."""
    for tile in range(w, memory.kv_empty.shape[0], CONSUMERS):
        plgpu.barrier_arrive(memory.kv_empty.at[tile])
    for slot in range(memory.q_empty.shape[0] - 1):
        plgpu.barrier_arrive(memory.q_empty.at[slot])
    for slot in range(memory.dout_empty.shape[0]):
        plgpu.barrier_arrive(memory.dout_empty.at[slot])
    if memory.hand_over is not None:
        memory.hand_over.free()


def produce(inputs: Inputs, memory: Memory, problem: Problem, group: Group, queue: Queue) -> None:
    """Load the consumers' tiles; with sums of dq also a last tile of q, for unused scores."""

    def load(matrix, tiles, vector, rows, full, empty, now, batch, head, start, row):
        slot = now % rows.shape[0]
        plgpu.barrier_wait(empty.at[slot])
        load_tile(matrix, tiles.values.tile(slot), batch, head, start, full.at[slot])
        plgpu.copy_gmem_to_smem(
            vector.at[batch, head, pl.ds(row, problem.block_q)], rows.at[slot], full.at[slot]
        )

    load_q = functools.partial(
        load, inputs.q, memory.q_tiles, inputs.lse2, memory.lse2_rows, memory.q_full,
        memory.q_empty,
    )  # fmt: skip
    load_dout = functools.partial(
        load, inputs.dout, memory.dout_tiles, inputs.delta, memory.delta_rows, memory.dout_full,
        memory.dout_empty,
    )  # fmt: skip

    def load_all(item, step, turn):
        work = locate(problem, group, item)
        batch, place, steps = work.batch, work.place, work.steps
        head_kv, start_kv = work.head_kv, place.start
        first_q, first_row = place.first_other, work.first_row
        if problem.packed:
            # Keys without queries may be padding, and NaN: their factors are loaded from past the
            # last row, as 0.
            has_queries = place.size_other > 0
            first_q = jnp.where(has_queries, first_q, problem.seq_q)
            first_row = jnp.where(has_queries, first_row, inputs.lse2.shape[2])
            start_kv = jnp.where(has_queries, start_kv, problem.seq_kv)

        def load_keys():
            for w in range(CONSUMERS):
                tile = own_tile(memory.kv_full, turn, w)
                start, full = start_kv + w * WGMMA_ROWS, memory.kv_full.at[tile]
                plgpu.barrier_wait(memory.kv_empty.at[tile])
                load_tile(inputs.k, memory.k_tiles.tile(tile), batch, head_kv, start, full)
                load_tile(inputs.v, memory.v_tiles.tile(tile), batch, head_kv, start, full)

        def load_queries(index):
            now = step + index
            start = work.visited(index % steps)
            head = place.head * group.members + index // steps
            rows = (first_q + start, first_row + start) if problem.packed else (start, start)
            load_q(now, batch, head, *rows)
            # After q, which does not wait for the end of the previous tile.
            pl.when(index == 0)(load_keys)
            load_dout(now, batch, head, *rows)

        pl.loop(0, steps * group.members)(load_queries)
        return step + steps * group.members

    end = queue.give(load_all)
    if memory.dq_tiles is not None:
        load_q(end, *[queue.program * 0] * 4)


def allocate_memory(
    spec, config, packed: bool = False, sums_dq: bool = False, kv_stages: int = 1
) -> Memory:
    """Return the types of a program's memory, with tiles of k and v for kv_stages items."""
    warpgroups, stages = config.num_warps // 4 - 1, config.num_stages
    queries, douts = (stages + sums_dq, config.block_q), (stages, config.block_q)
    tiles, pieces = make_tiles(
        spec,
        sums_dq,
        ("dout_tiles",) if sums_dq else ("q_tiles", "dout_tiles"),
        k_tiles=(kv_stages * warpgroups, WGMMA_ROWS),
        v_tiles=(kv_stages * warpgroups, WGMMA_ROWS),
        q_tiles=queries,
        dout_tiles=douts,
    )
    ds_tiles = dq_tiles = places = None
    if sums_dq:
        width = ds_width(spec.head_dim)
        ds_tiles = plgpu.SMEM(
            (2, warpgroups, WGMMA_ROWS, config.block_q),
            jnp.dtype(spec.dtype),
            transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)),
        )
        size = WGMMA_ROWS * min(64, value_columns(spec.head_dim))
        dq_tiles = plgpu.SMEM((warpgroups, size), jnp.float32)
        if packed:
            places = plgpu.SMEM((warpgroups, len(Place._fields)), jnp.int32)
    of_keys = pieces["k_tiles"] + pieces["v_tiles"]
    return Memory(
        **tiles,
        ds_tiles=ds_tiles,
        dq_tiles=dq_tiles,
        places=places,
        lse2_rows=plgpu.SMEM(queries, jnp.float32),
        delta_rows=plgpu.SMEM(douts, jnp.float32),
        kv_full=plgpu.Barrier(num_arrivals=of_keys, num_barriers=kv_stages * warpgroups),
        kv_empty=plgpu.Barrier(num_barriers=kv_stages * warpgroups),
        q_full=plgpu.Barrier(num_arrivals=pieces["q_tiles"] + 1, num_barriers=queries[0]),
        q_empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=queries[0]),
        dout_full=plgpu.Barrier(num_arrivals=pieces["dout_tiles"] + 1, num_barriers=stages),
        dout_empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        hand_over=allocate_hand_over(warpgroups + sums_dq) if packed else None,
    )
