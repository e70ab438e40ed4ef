"""Tiles of keys, as the kernels of dk and dv work on them: where they are, and what they load."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.items import (
    Items,
    Place,
    allocate_hand_over,
    for_each_place,
    next_item,
    own_item,
)
from pallas_attn.kernels.explicit.programs import for_each_tile
from pallas_attn.kernels.explicit.steps import count_steps, tile_start
from pallas_attn.kernels.explicit.tma import Tiles, load_tile
from pallas_attn.kernels.explicit.wgmma import WGMMA_ROWS
from pallas_attn.kernels.library.sequences import first_tile
from pallas_attn.kernels.library.tiles import ROW_PADDING, cdiv, maximum, visible_tiles
from pallas_attn.kernels.sm90.gradient_tiles import (
    ds_width,
    make_tiles,
    value_columns,
    values_and_factors,
)


class Inputs(NamedTuple):
    """References to the operands, as `flash_bwd_dq_kernel` takes them.

    schedule: the tiles of keys of each program. It is None for packed sequences, whose programs
        take tiles from the counter; counter and offsets are None otherwise.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    lse2: Any
    delta: Any
    cu_seqlens_q: Any
    cu_seqlens_kv: Any
    schedule: Any
    counter: Any

    @property
    def packed(self) -> bool:
        """The operands are packed sequences."""
        return self.cu_seqlens_q is not None


class Problem(NamedTuple):
    """Numbers that all tiles have in common.

    Attributes:
        seq_q, seq_kv, diagonal, window_left, window_right: as the kernels have them.
        group_size: query heads of a kv head.
        members: how many of these a work item visits.
        parts: work items of a tile of keys of all heads.
        block_q, block_kv: rows of a tile of queries, and of one of keys.
        hides_missing: keys that do not exist are hidden in every tile of queries.
    """

    seq_q: int
    seq_kv: int
    diagonal: int
    window_left: int | None
    window_right: int | None
    group_size: int
    members: int
    parts: int
    block_q: int
    block_kv: int
    hides_missing: bool


class Memory(NamedTuple):
    """Shared memory of a program, in the order of addresses.

    Attributes:
        delta_rows, lse2_rows: numbers of the rows of each tile of dout and of q.
        dout_tiles, q_tiles: tiles of queries.
        k_tiles, v_tiles: a tile of 64 rows for each consumer.
        kv_full, kv_empty: barriers of each consumer's k and v: loaded, and free.
        dout_full, dout_empty, q_full, q_empty: likewise of each tile of dout and of q.
        ds_tiles: two tiles of dsᵀ of each consumer, where dq is summed, else None.
        dq_tiles: each consumer's part of a tile of dq, likewise.
        hand_over: where a program's warps find their next tile of packed sequences, else None.
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
    q_empty: Any
    q_full: Any
    q_tiles: Any
    v_tiles: Any

    def as_tiles(self) -> Memory:
        """Return it with `Tiles` of k and v, and of q and dout as both products see them."""
        return self._replace(
            k_tiles=Tiles(*self.k_tiles),
            v_tiles=Tiles(*self.v_tiles),
            q_tiles=Queries(*values_and_factors(self.q_tiles)),
            dout_tiles=Queries(*values_and_factors(self.dout_tiles)),
        )


class Queries(NamedTuple):
    """Tiles of q or dout: as ds or p multiplies them, and as scores do."""

    values: Tiles
    factors: Tiles


class Work(NamedTuple):
    """A tile of keys and its query heads, and the tiles of queries that see it.

    Attributes:
        batch, head_kv, part: which ones; part is that of the query heads.
        start_kv, end_kv: its first key, and the end of its sequence's.
        first_q, end_q: the first row of its sequence's queries, and how many these are.
        first_row: the first row of the sequence's lse2 and delta.
        diagonal: the key position of query 0 of the sequence.
        start_q: the first query of a step's tile, counted from the sequence's.
        masked_steps, steps: how many tiles of queries are at edges, which come first, and in all.
    """

    batch: Any
    head_kv: Any
    part: Any
    start_kv: Any
    end_kv: Any
    first_q: Any
    end_q: Any
    first_row: Any
    diagonal: Any
    start_q: Callable[..., Any]
    masked_steps: Any
    steps: Any


def locate(problem: Problem, tile: Any) -> Work:
    """Locate a tile of keys and its query heads, and the tiles of queries that see it.

    tile: its number, or its `Place` among packed sequences.
    """
    block_q, block_kv = problem.block_q, problem.block_kv
    if isinstance(tile, Place):
        # Keys are counted from the first of all, queries from the sequence's first.
        part, _number, start_kv, end_kv, first_q, end_q, sequence = tile
        batch, diagonal = part * 0, end_kv - end_q
        first_row = first_tile(first_q, sequence, ROW_PADDING) * ROW_PADDING
    else:
        num_tiles = pl.cdiv(problem.seq_kv, block_kv)
        start_kv = tile % num_tiles * block_kv
        batch, part = tile // num_tiles // problem.parts, tile // num_tiles % problem.parts
        first_q, end_q, first_row = 0, problem.seq_q, 0
        end_kv, diagonal = problem.seq_kv, problem.diagonal
    head_kv = part // (problem.group_size // problem.members)
    begin, before, full, after = visible_tiles(
        start_kv, end_kv, end_q, -diagonal, problem.window_right, problem.window_left, block_kv,
        block_q,
    )  # fmt: skip
    last_start = maximum(cdiv(end_q, block_q) * block_q - block_q, 0)
    if problem.hides_missing:
        ends = start_kv + block_kv > problem.seq_kv
        before = jnp.where(ends, before + full + after, before)
        full, after = (jnp.where(ends, 0, tiles) for tiles in (full, after))

    def start_q(step):
        return tile_start(step, begin, before, full, after, block_q, last_start)

    return Work(
        batch, head_kv, part, start_kv, end_kv, first_q, end_q, first_row, diagonal, start_q,
        *count_steps(before, full, after),
    )  # fmt: skip


def for_each(inputs: Inputs, program: Any, body: Callable, next_place: Callable | None) -> Any:
    """Call body(tile, steps before) for each tile of keys of a program; return all its steps.

    next_place: returns the next `Place` of packed sequences.
    """
    if inputs.packed:
        return for_each_place(next_place, body)
    return for_each_tile(inputs.schedule, program, body)


def for_each_own(inputs: Inputs, memory: Memory, program: Any, body: Callable) -> Any:
    """Call body as `for_each` does, for the tiles that the producer was given: in a consumer."""
    return for_each(inputs, program, body, lambda: own_item(memory.hand_over))


def release_all(memory: Memory, w: int) -> None:
    """Tell the producer that all tiles are free; the first step gives the last one of q back."""
    plgpu.barrier_arrive(memory.kv_empty.at[w])
    for slot in range(memory.q_empty.shape[0] - 1):
        plgpu.barrier_arrive(memory.q_empty.at[slot])
    for slot in range(memory.dout_empty.shape[0]):
        plgpu.barrier_arrive(memory.dout_empty.at[slot])
    if memory.hand_over is not None:
        plgpu.barrier_arrive(memory.hand_over.read)


def produce(inputs: Inputs, memory: Memory, problem: Problem, program: Any) -> None:
    """Load what the consumers work on, as soon as there is room: in the producer's warp.

    Where dq is summed, consumers start scores a tile ahead: one more tile of q is loaded at the
    end, for scores that are not used.
    """

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

    def load_all(tile, step):
        work = locate(problem, tile)
        batch, head_kv, steps = work.batch, work.head_kv, work.steps
        first_q, first_row, start_kv = work.first_q, work.first_row, work.start_kv
        if inputs.packed:
            # Without queries all factors are 0: what is past the last row. Keys may be padding,
            # which may be NaN.
            has_queries = work.end_q > 0
            first_q = jnp.where(has_queries, first_q, problem.seq_q)
            first_row = jnp.where(has_queries, first_row, inputs.lse2.shape[2])
            start_kv = jnp.where(has_queries, start_kv, problem.seq_kv)

        def load_keys():
            for w in range(memory.kv_full.shape[0]):
                start, full = start_kv + w * WGMMA_ROWS, memory.kv_full.at[w]
                plgpu.barrier_wait(memory.kv_empty.at[w])
                load_tile(inputs.k, memory.k_tiles.tile(w), batch, head_kv, start, full)
                load_tile(inputs.v, memory.v_tiles.tile(w), batch, head_kv, start, full)

        def load_queries(index):
            now = step + index
            start = work.start_q(index % steps)
            place = batch, work.part * problem.members + index // steps, start, start
            if inputs.packed:
                place = *place[:2], first_q + start, first_row + start
            load_q(now, *place)
            # After q, which does not wait for the end of the tile before.
            pl.when(index == 0)(load_keys)
            load_dout(now, *place)

        pl.loop(0, steps * problem.members)(load_queries)
        return step + steps * problem.members

    items = Items(
        inputs.cu_seqlens_kv, inputs.cu_seqlens_q, problem.seq_kv, problem.seq_q, problem.parts,
        problem.block_kv, last_first=False,
    )  # fmt: skip
    end = for_each(
        inputs, program, load_all, lambda: next_item(inputs.counter, items, memory.hand_over)
    )
    if memory.dq_tiles is not None:
        load_q(end, *[program * 0] * 4)


def allocate_memory(spec, config, packed: bool = False, sums_dq: bool = False) -> Memory:
    """Return the types of what a program has in shared memory.

    Args:
        spec, config: problem and configuration.
        packed: the operands are packed sequences.
        sums_dq: dq is summed as well: with one more tile of q, and ds in shared memory.
    """
    warpgroups, stages = config.num_warps // 4 - 1, config.num_stages
    queries, douts = (stages + sums_dq, config.block_q), (stages, config.block_q)
    tiles, pieces = make_tiles(
        spec,
        sums_dq,
        ("dout_tiles",) if sums_dq else ("q_tiles", "dout_tiles"),
        k_tiles=(warpgroups, WGMMA_ROWS),
        v_tiles=(warpgroups, WGMMA_ROWS),
        q_tiles=queries,
        dout_tiles=douts,
    )
    ds_tiles = dq_tiles = None
    if sums_dq:
        width = ds_width(spec.head_dim)
        ds_tiles = plgpu.SMEM(
            (2, warpgroups, WGMMA_ROWS, config.block_q),
            jnp.dtype(spec.dtype),
            transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)),
        )
        size = WGMMA_ROWS * min(64, value_columns(spec.head_dim))
        dq_tiles = plgpu.SMEM((warpgroups, size), jnp.float32)
    of_keys = pieces["k_tiles"] + pieces["v_tiles"]
    return Memory(
        **tiles,
        ds_tiles=ds_tiles,
        dq_tiles=dq_tiles,
        lse2_rows=plgpu.SMEM(queries, jnp.float32),
        delta_rows=plgpu.SMEM(douts, jnp.float32),
        kv_full=plgpu.Barrier(num_arrivals=of_keys, num_barriers=warpgroups),
        kv_empty=plgpu.Barrier(num_barriers=warpgroups),
        q_full=plgpu.Barrier(num_arrivals=pieces["q_tiles"] + 1, num_barriers=queries[0]),
        q_empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=queries[0]),
        dout_full=plgpu.Barrier(num_arrivals=pieces["dout_tiles"] + 1, num_barriers=stages),
        dout_empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        hand_over=allocate_hand_over(warpgroups) if packed else None,
    )
