"""The common part of the kernels of dk and of dv, for head sizes above 128."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import warpgroup_barrier
from pallas_attn.kernels.explicit.items import Place
from pallas_attn.kernels.explicit.programs import for_each_tile, run_warpgroups
from pallas_attn.kernels.explicit.registers import as_columns, iota
from pallas_attn.kernels.explicit.schedule import make_schedule
from pallas_attn.kernels.explicit.steps import count_steps, step_ranges, tile_start
from pallas_attn.kernels.explicit.tma import Tiles, load_tile, store_tile
from pallas_attn.kernels.explicit.wgmma import WGMMA, WGMMA_ROWS, accumulator, add_values, wait_for
from pallas_attn.kernels.explicit.wgmma_launch import Problem, launch
from pallas_attn.kernels.explicit.wgmma_scores import visible_scores
from pallas_attn.kernels.gradients import Inputs
from pallas_attn.kernels.library.tiles import split_step, visible_tiles
from pallas_attn.kernels.sm90.gradient_tiles import block_tiles, values_and_factors
from pallas_attn.kernels.sm90.work import Work
from pallas_attn.targets import num_sms
from twin_attention.targets.steps import exchange_sides


class Memory(NamedTuple):
    """Shared memory of a program, in the order of addresses.

    delta_rows, lse2_rows: as in `keys.Memory`. k_and_dv_tiles: a tile of k for each consumer, whose
    memory its tile of dv takes; None for dk. k_tiles, v_tiles: 64 rows for each consumer; None for
    dv.
    """

    delta_rows: Any
    dout_empty: Any
    dout_full: Any
    dout_tiles: Any
    k_and_dv_tiles: Any
    k_full: Any
    k_tiles: Any
    kv_empty: Any
    lse2_rows: Any
    q_empty: Any
    q_full: Any
    q_tiles: Any
    v_full: Any
    v_tiles: Any


class Rows(NamedTuple):
    """Tiles of q or dout in shared memory, with a number for each row.

    tiles, factors: its tiles, as the operand of ds or p, and as that of the scores.
    vector, rows: lse2 or delta, in global and in shared memory; or None.
    """

    matrix: object
    tiles: Tiles
    factors: Tiles
    vector: object
    rows: object
    full: object
    empty: object

    def slot(self, step):
        return step % self.tiles.multiplied[0].shape[0]

    def load(self, step, batch, head, start):
        slot = self.slot(step)
        plgpu.barrier_wait(self.empty.at[slot])
        load_tile(self.matrix, self.tiles.tile(slot), batch, head, start, self.full.at[slot])
        if self.vector is not None:
            block_q = self.rows.shape[1]
            values = self.vector.at[batch, head, pl.ds(start, block_q)]
            plgpu.copy_gmem_to_smem(values, self.rows.at[slot], self.full.at[slot])


class Kernel(NamedTuple):
    """State of the producer and of the consumer warpgroups.

    Attributes:
        k, v: functions that return a consumer's tiles; v is None for dv.
        stored: likewise, the tiles from which the gradient is stored, in the memory of k.
        visit: adds a tile of queries to the gradient; see `compute_tile`.
    """

    inputs: Inputs
    gradient: Any
    memory: Memory
    problem: Problem
    schedule: Any
    program: Any
    k: Callable
    v: Callable | None
    stored: Callable
    queries: Rows
    douts: Rows
    visit: Callable

    @property
    def multiplied(self) -> Rows:
        return self.douts if self.v is None else self.queries


def flash_bwd_large_kernel(inputs, schedule, gradient, *, memory, problem, visit):
    """One program computes tiles of block_kv rows of dk or dv of a kv head, one after the other.

    Shared memory has one more tile of what ds or p multiplies; dv has no v and delta.
    """
    q_tiles, dout_tiles = map(values_and_factors, (memory.q_tiles, memory.dout_tiles))
    if memory.v_tiles is None:
        pairs = [(Tiles(*x[:2]).tile(0), Tiles(*x[2:]).tile(0)) for x in memory.k_and_dv_tiles]
        k, v, stored = (lambda w: pairs[w][0]), None, (lambda w: pairs[w][1])
    else:
        k, v = Tiles(*memory.k_tiles).tile, Tiles(*memory.v_tiles).tile
        stored = k
    kernel = Kernel(
        inputs, gradient, memory, problem, schedule, lax.axis_index("program"), k, v, stored,
        Rows(inputs.q, *q_tiles, inputs.lse2, memory.lse2_rows, memory.q_full, memory.q_empty),
        Rows(
            inputs.dout, *dout_tiles, inputs.delta, memory.delta_rows, memory.dout_full,
            memory.dout_empty,
        ),
        visit,
    )  # fmt: skip
    run_warpgroups(
        memory.k_full.shape[0],
        functools.partial(consume, kernel),
        functools.partial(produce, kernel),
    )


def locate(kernel, item):
    """Return the work of a tile of keys: its steps are tiles of its group's queries.

    `visited` returns the query head and the first row of a step. Rows that pad the last tile count
    as existing: their p is 0 without a mask.
    """
    problem, heads_kv = kernel.problem, kernel.inputs.k.shape[2]
    group_size, window = kernel.inputs.q.shape[2] // heads_kv, problem.window
    block_q, block_kv = problem.block_q, problem.block_kv
    num_tiles = pl.cdiv(problem.seq_kv, block_kv)
    batch, head_kv = item // num_tiles // heads_kv, item // num_tiles % heads_kv
    start_kv = item % num_tiles * block_kv
    padded_rows = pl.cdiv(problem.seq_q, block_q) * block_q
    diagonal = problem.seq_kv - problem.seq_q
    visible = visible_tiles(
        start_kv, problem.seq_kv, padded_rows, -diagonal, window.right, window.left, block_kv,
        block_q,
    )  # fmt: skip
    masked_steps, steps = count_steps(visible)

    def visited(step):
        # Edge tiles of all heads go first, then the full ones.
        is_edge = step < masked_steps * group_size
        member, index = split_step(
            jnp.where(is_edge, step, step - masked_steps * group_size),
            jnp.where(is_edge, masked_steps, steps - masked_steps),
            group_size,
        )
        index = jnp.where(is_edge, index, index + masked_steps)
        start = tile_start(index, visible, block_q, padded_rows - block_q)
        return head_kv * group_size + member, start

    place = Place(head_kv, None, start_kv, problem.seq_kv, 0, problem.seq_q, 0)
    counts = masked_steps * group_size, steps * group_size
    return Work(batch, place, head_kv, 0, diagonal, visited, *counts)


def produce(kernel):
    memory, inputs = kernel.memory, kernel.inputs
    keys = [(inputs.k, kernel.k, memory.k_full)]
    if kernel.v is not None:
        keys.append((inputs.v, kernel.v, memory.v_full))

    def load_all(item, step, _turn):
        work = locate(kernel, item)
        batch, place = work.batch, work.place

        def load_queries(index):
            head, start = work.visited(index)
            kernel.queries.load(step + index, batch, head, start)

            @pl.when(index == 0)  # after q, which does not wait for the end of the previous tile
            def _():
                for w in range(memory.kv_empty.shape[0]):
                    plgpu.barrier_wait(memory.kv_empty.at[w])
                for matrix, tiles, full in keys:
                    for w in range(memory.kv_empty.shape[0]):
                        start_row = place.start + w * WGMMA_ROWS
                        load_tile(matrix, tiles(w), batch, place.head, start_row, full.at[w])

            kernel.douts.load(step + index, batch, head, start)

        pl.loop(0, work.steps)(load_queries)
        return step + work.steps

    for_each_tile(kernel.schedule, kernel.program, load_all)


def consume(kernel, w):
    plgpu.barrier_arrive(kernel.memory.kv_empty.at[w])
    for rows in (kernel.queries, kernel.douts):
        for slot in range(rows.empty.shape[0]):
            plgpu.barrier_arrive(rows.empty.at[slot])
    for_each_tile(kernel.schedule, kernel.program, functools.partial(compute_tile, kernel, w))
    plgpu.wait_smem_to_gmem(0)


class Keys(NamedTuple):
    w: int
    work: Work
    first_step: Any
    start_row: Any


def compute_tile(kernel, w, item, step, _turn):
    """Compute the gradient of a warpgroup's rows of a tile; return the steps so far.

    kernel.visit(kernel, keys, masked, x, carry) returns ds or p of step x, and the gradient without
    it; carry is its result for the previous step, None at first.
    """
    work, rows = locate(kernel, item), kernel.multiplied
    keys = Keys(w, work, step, work.place.start + w * WGMMA_ROWS)
    plgpu.barrier_wait(kernel.memory.k_full.at[w])

    # Visit the tiles of queries that see these keys; only tiles at the edges are masked. The first
    # one has no product to overlap with its exponentials.
    ranges = step_ranges(work.masked_steps, work.steps, first=1)
    carry = kernel.visit(kernel, keys, ranges[0][0], kernel.program * 0, None)
    for masked, lower, upper in ranges:
        body = functools.partial(kernel.visit, kernel, keys, masked)
        carry = lax.fori_loop(lower, upper, body, carry)
    factor, gradient = carry

    # Add the product of the last tile: dsᵀ q or pᵀ dout.
    end = step + work.steps
    previous = rows.slot(end - 1)
    if kernel.v is None:
        plgpu.barrier_wait(rows.full.at[previous])

    def last(ref):
        ref[...] = gradient
        add_values(ref, factor, rows.tiles.tile(previous))
        return wait_for(ref, 0, factor)

    gradient = pl.run_scoped(last, accumulator(*gradient.shape))
    plgpu.barrier_arrive(rows.empty.at[previous])

    # Scale dk; store the gradient where k was, which no other warpgroup reads.
    warpgroup_barrier()
    if kernel.v is not None:
        gradient = gradient * kernel.problem.rule.scale
    place = work.batch, work.head_kv, keys.start_row
    store_tile(gradient, kernel.stored(w), kernel.gradient, *place)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(kernel.memory.kv_empty.at[w])
    return end


def exponents(kernel, keys, s, lse2, x, masked):
    """Return the exponents of pᵀ = 2^(sᵀ - lse2) at step x, and the derivative of the cap."""
    problem = kernel.problem
    position = key = None
    if masked:
        position = iota(s.shape, 1, WGMMA) + keys.work.visited(x)[1]
        key = iota(s.shape, 0, WGMMA) + (keys.start_row - keys.work.diagonal)  # query coordinates
    s, exp2_scale, dcap = visible_scores(
        s, position, key, None, problem.rule, problem.window, masked
    )
    return s * exp2_scale - as_columns(lse2, s, WGMMA), dcap


def launch_large(kernel_name, visit, inputs, gradient, memory, values, stages, spec, backend):
    """Call `flash_bwd_large_kernel` for `gradient`; ds or p multiplies the tiles `values`."""
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
        flash_bwd_large_kernel,
        (inputs,),
        make_schedule(turned, config.block_kv, config.block_q, num_sms(backend.target)),
        (jax.ShapeDtypeStruct(gradient.shape, gradient.dtype),),
        {"memory": Memory(*map(memory.get, Memory._fields))},
        spec,
        config,
        kernel_name=kernel_name,
        visit=visit,
    )
    return result
