"""The backward's kernel of dq."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import warpgroup_barrier
from pallas_attn.kernels.explicit.items import Items, Queue, allocate_hand_over, item_counter
from pallas_attn.kernels.explicit.programs import run_warpgroups
from pallas_attn.kernels.explicit.registers import as_rows, iota
from pallas_attn.kernels.explicit.rows import (
    dot_loaded_rows,
    load_row_values,
    store_row_values,
    store_rows_of_pieces,
)
from pallas_attn.kernels.explicit.schedule import make_schedule
from pallas_attn.kernels.explicit.softmax import add_columns
from pallas_attn.kernels.explicit.steps import count_steps, step_ranges, tile_start
from pallas_attn.kernels.explicit.tma import Tiles, clear_values, load_tile, store_tile
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
from pallas_attn.kernels.explicit.wgmma_launch import Problem, launch
from pallas_attn.kernels.explicit.wgmma_scores import hide_keys, visible_scores
from pallas_attn.kernels.gradients import Sources
from pallas_attn.kernels.library.sequences import count_sequence_tiles
from pallas_attn.kernels.library.softmax import lse_to_subtract
from pallas_attn.kernels.library.tiles import ROW_PADDING
from pallas_attn.kernels.sm90.gradient_tiles import block_tiles, make_tiles, values_and_factors
from pallas_attn.kernels.sm90.work import CONSUMERS, locate_queries, own_tile
from pallas_attn.targets import num_sms
from twin_attention.contract.validate.errors import fail
from twin_attention.targets.sm90 import has_large_heads


class Memory(NamedTuple):
    """Shared memory of a program, in the order of addresses.

    q_tiles, dout_tiles and out_tiles have 64 rows for each consumer, for one work item, or for two
    to load the next one early. Without room for out it is read from global memory: out_tiles is
    None, and v has one tile fewer than k.
    """

    dout_tiles: Any
    hand_over: Any
    k_empty: Any
    k_full: Any
    k_tiles: Any
    out_tiles: Any
    q_empty: Any
    q_full: Any
    q_tiles: Any
    v_empty: Any
    v_full: Any
    v_tiles: Any


class Outputs(NamedTuple):
    lse2: Any
    delta: Any
    dq: Any


class Kernel(NamedTuple):
    """Operands and state of all warps; scored_tiles: the tiles of k as the scores multiply them."""

    sources: Sources
    outputs: Outputs
    memory: Memory
    problem: Problem
    queue: Queue
    scored_tiles: Tiles

    @property
    def large(self) -> bool:
        return self.memory.out_tiles is None


def flash_bwd_dq_kernel(sources, offsets, schedule, outputs, counter, *, memory, problem):
    """One program computes tiles of block_q rows of dq of a query head, one after the other.

    Before a tile's products it computes lse2 and delta of its rows, and stores them for the kernel
    of dk and dv, padded to ROW_PADDING, which is block_q. Loop invariant: dq is Σ ds k over the
    keys before the previous tile, and ds is that tile's. Large heads have separate code for the
    first tile of keys. In small heads it would overflow the instruction cache, so they multiply a
    ds of 0.

    Packed sequences, for small heads: rows past a sequence's end are not stored, and those of k and
    v are cleared in shared memory. Queries without a key are loaded as 0.
    """
    k_tiles, scored_tiles = values_and_factors(memory.k_tiles)
    tiles = {
        name: Tiles(*views)
        for name, views in memory._asdict().items()
        if name in ("q_tiles", "dout_tiles", "out_tiles", "v_tiles") and views is not None
    }
    items = Items(
        *offsets, problem.seq_q, problem.seq_kv, sources.q.shape[2], problem.block_q,
        last_first=True,
    )  # fmt: skip
    queue = Queue(lax.axis_index("program"), schedule, counter, items, memory.hand_over)
    memory = memory._replace(k_tiles=k_tiles, **tiles)
    kernel = Kernel(sources, outputs, memory, problem, queue, scored_tiles)
    run_warpgroups(
        CONSUMERS, functools.partial(consume, kernel), functools.partial(produce, kernel)
    )


def locate(kernel, item):
    problem = kernel.problem
    work, visible, last_start = locate_queries(problem, kernel.sources.q.shape[2], item)
    masked_steps, steps = count_steps(visible)

    def visited(step):
        return tile_start(step, visible, problem.block_kv, last_start)

    return work._replace(visited=visited, masked_steps=masked_steps, steps=steps)


def produce(kernel):
    sources, memory, problem = kernel.sources, kernel.memory, kernel.problem
    num_stages, v_stages = memory.k_full.shape[0], memory.v_full.shape[0]
    of_queries = (sources.q, memory.q_tiles), (sources.dout, memory.dout_tiles)
    if not kernel.large:
        of_queries = *of_queries, (sources.out, memory.out_tiles)

    def load_all(item, step, turn):
        work = locate(kernel, item)
        batch, place, steps = work.batch, work.place, work.steps
        head, start_q = place.head, place.start
        head_kv = head // (sources.q.shape[2] // sources.k.shape[2])
        if problem.packed:
            # Queries without a key may be padding, and NaN: they are read past the last row, as 0.
            start_q = jnp.where(place.size_other > 0, start_q, problem.seq_q)
        for w in range(CONSUMERS):
            tile = own_tile(memory.q_full, turn, w)
            start, full = start_q + w * WGMMA_ROWS, memory.q_full.at[tile]
            plgpu.barrier_wait(memory.q_empty.at[tile])
            for matrix, tiles in of_queries:
                load_tile(matrix, tiles.tile(tile), batch, head, start, full)

        @pl.loop(0, steps)
        def _(x):
            slot, start = (step + x) % num_stages, work.visited(x)
            if problem.packed:
                start = place.first_other + start
            full, k = memory.k_full.at[slot], memory.k_tiles.tile(slot)
            plgpu.barrier_wait(memory.k_empty.at[slot])
            load_tile(sources.k, k, batch, head_kv, start, full)
            slot = (step + x) % v_stages
            full, v = memory.v_full.at[slot], memory.v_tiles.tile(slot)
            plgpu.barrier_wait(memory.v_empty.at[slot])
            load_tile(sources.v, v, batch, head_kv, start, full)

        return step + steps

    kernel.queue.give(load_all)


def consume(kernel, w):
    memory, packed = kernel.memory, kernel.problem.packed
    num_stages, v_stages = memory.k_full.shape[0], memory.v_full.shape[0]

    # All tiles are free. In small heads the first step releases the last tile of keys.
    for tile in range(w, memory.q_empty.shape[0], CONSUMERS):
        plgpu.barrier_arrive(memory.q_empty.at[tile])
    for slot in range(num_stages if kernel.large else num_stages - 1):
        plgpu.barrier_arrive(memory.k_empty.at[slot])
    for slot in range(v_stages):
        plgpu.barrier_arrive(memory.v_empty.at[slot])
    if packed:
        memory.hand_over.free()

    kernel.queue.take(functools.partial(compute_tile, kernel, w))
    if not packed:
        plgpu.wait_smem_to_gmem(0)


class Rows(NamedTuple):
    """A warpgroup's rows of a tile of queries; first_step: the number of steps before this tile."""

    tile: Any
    work: Any
    first_step: Any
    start_row: Any
    lse2: Any
    delta: Any


def compute_tile(kernel, w, item, step, turn):
    memory, problem = kernel.memory, kernel.problem
    num_stages = memory.k_full.shape[0]
    tile, has_two = own_tile(memory.q_full, turn, w), memory.q_full.shape[0] > CONSUMERS
    work = locate(kernel, item)
    start_row = work.place.start + w * WGMMA_ROWS
    rows = Rows(tile, work, step, start_row, *prepare_rows(kernel, tile, work, start_row))
    q = memory.q_tiles.tile(tile)
    if has_two:
        # Once the previous item's dq is out, its place is free.
        @pl.when(turn > 0)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(memory.q_empty.at[tile ^ CONSUMERS])

    masked_steps, steps = work.masked_steps, work.steps

    # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
    if kernel.large:
        # The first tile of keys has no ds k to overlap with its exponentials.
        ranges = step_ranges(masked_steps, steps, first=1)
        carry = visit(kernel, rows, ranges[0][0], kernel.queue.program * 0, None)
    else:
        ranges = step_ranges(masked_steps, steps)
        no_ds = zeros(WGMMA_ROWS, problem.block_kv).astype(kernel.sources.k.dtype)
        carry = no_ds, zeros(WGMMA_ROWS, q.columns[-1].stop)
    for masked, lower, upper in ranges:
        body = functools.partial(visit, kernel, rows, masked)
        carry = lax.fori_loop(lower, upper, body, carry)
    ds, dq = carry

    # dq += ds k of the last tile
    previous = (step + steps - 1) % num_stages

    def last(dq_ref):
        dq_ref[...] = dq
        add_values(dq_ref, ds, memory.k_tiles.tile(previous))
        return wait_for(dq_ref, 0, ds)

    dq = pl.run_scoped(last, accumulator(*dq.shape))
    if kernel.large:
        plgpu.barrier_arrive(memory.k_empty.at[previous])

    # Scale and store.
    warpgroup_barrier()
    dq = dq * kernel.problem.rule.scale
    place = kernel.outputs.dq, work.batch, work.place.head, start_row
    if kernel.problem.packed:
        store_rows_of_pieces(dq, q, *place, work.place.end)
    else:
        store_tile(dq, q, *place)
    if not has_two:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(memory.q_empty.at[tile])
    return step + steps


def prepare_rows(kernel, tile, work, start_row):
    """Wait for a warpgroup's tile; store and return lse2 and delta of its rows."""
    sources, memory, problem = kernel.sources, kernel.memory, kernel.problem
    packed, of_row = problem.packed, WGMMA.reduce(1)
    place = work.batch, work.place.head, start_row
    num_rows = work.place.end if packed or problem.seq_q % problem.block_q else None
    lse = load_row_values(sources.lse, *place, num_rows, float("inf"))
    dlse = 0.0
    if sources.dlse is not None:
        dlse = load_row_values(sources.dlse, *place, num_rows, 0.0)
        dlse = jnp.where(lse == float("-inf"), 0.0, dlse)
    # delta = rowsum(dout ∘ out) - dlse; lse2 is +inf where a row saw no key or does not exist
    if kernel.large:
        delta = dot_loaded_rows(sources.dout, sources.out, *place, num_rows) - dlse
        plgpu.barrier_wait(memory.q_full.at[tile])
    else:
        plgpu.barrier_wait(memory.q_full.at[tile])
        delta = dot_rows(memory.dout_tiles.tile(tile), memory.out_tiles.tile(tile))
        if packed:
            # The next sequence's rows, or padding.
            delta = jnp.where(lse == float("inf"), 0.0, delta)
        delta = delta - dlse
    lse2 = lse_to_subtract(lse)
    place = work.batch, work.place.head, work.first_row + (start_row - work.place.start)
    store_row_values(lse2, kernel.outputs.lse2, *place, None, of_row)
    store_row_values(delta, kernel.outputs.delta, *place, None, of_row)
    if packed:
        # The gradient of padding's lse may be NaN.
        delta = jnp.where(work.place.size_other > 0, delta, 0.0)
    return lse2, delta


class Step(NamedTuple):
    """A tile of keys.

    Attributes:
        x, now: its number among the tiles that the queries see, and among all of the program.
        slot, previous, slot_v: the slots of its k, of the previous k, and of its v.
        own: the tile of the warpgroup's queries; see `visit`.
    """

    x: Any
    masked: bool
    now: Any
    slot: Any
    previous: Any
    slot_v: Any
    own: Any


def visit(kernel, rows, masked, x, carry):
    """Add the previous tile's ds k to dq; return this tile's ds, and dq, the next carry."""
    memory, packed = kernel.memory, kernel.problem.packed
    num_stages, v_stages = memory.k_full.shape[0], memory.v_full.shape[0]
    now = rows.first_step + x
    slot, slot_v, previous = now % num_stages, now % v_stages, (now - 1) % num_stages
    if packed and masked:
        # As in `flash_bwd_dkdv.visit`.
        plgpu.barrier_wait(memory.k_full.at[slot])
        plgpu.barrier_wait(memory.v_full.at[slot_v])
        left = rows.work.place.size_other - rows.work.visited(x)
        clear_values(memory.k_tiles.tile(slot), left)
        clear_values(memory.v_tiles.tile(slot_v), left)
    own = rows.tile
    if kernel.large or packed:
        # The same, but unknown to the compiler, which would hoist the descriptors of q and dout out
        # of the loop: there are no registers for them.
        own = rows.tile + (now >> 30)
    step = Step(x, masked, now, slot, previous, slot_v, own)
    run = functools.partial(overlap, kernel, rows, step, carry)
    if carry is None:
        return run()
    sums = accumulator(*carry[1].shape)
    if kernel.large:
        return pl.run_scoped(lambda dq_ref: run(dq_ref=dq_ref), sums)
    scores = accumulator(WGMMA_ROWS, kernel.problem.block_kv)
    return pl.run_scoped(run, *[scores] * 2, sums)


def overlap(kernel, rows, step, carry, s_ref=None, dp_ref=None, dq_ref=None):
    """Compute ds k of the previous tile and dp during the exponentials; return ds and dq."""
    memory, problem = kernel.memory, kernel.problem
    may_end = problem.packed and step.masked
    slot, slot_v = step.slot, step.slot_v
    q, dout = memory.q_tiles.tile(step.own), memory.dout_tiles.tile(step.own)

    # Start dq += ds k of the previous tile, s = scale · q kᵀ, dp = dout vᵀ.
    if not kernel.large and not may_end:
        plgpu.barrier_wait(memory.k_full.at[slot])
    if dq_ref is not None:
        ds, dq = carry
        dq_ref[...] = dq
        multiplied = step.previous
        if not kernel.large:
            multiplied = jnp.where(step.x == 0, slot, step.previous)  # ds is 0 at first
        add_values(dq_ref, ds, memory.k_tiles.tile(multiplied))
    if kernel.large:
        plgpu.barrier_wait(memory.k_full.at[slot])

    def with_sums(ref, function):
        if ref is not None:
            return function(ref)
        return pl.run_scoped(function, accumulator(WGMMA_ROWS, problem.block_kv))

    def scores(s_ref):
        add_scores(s_ref, q, kernel.scored_tiles.tile(slot))
        dq = zeros(WGMMA_ROWS, q.columns[-1].stop)
        if dq_ref is not None:
            dq = wait_for(dq_ref, len(q.multiplied), carry[0])
            plgpu.barrier_arrive(memory.k_empty.at[step.previous])
        if problem.packed:
            # Never true. Without a branch ptxas runs out of registers and waits for each product.
            pl.when(step.now < 0)(lambda: plgpu.barrier_wait(memory.v_full.at[slot_v]))
        if not may_end:
            plgpu.barrier_wait(memory.v_full.at[slot_v])
        return with_sums(dp_ref, functools.partial(differences, s_ref)), dq

    def differences(s_ref, dp_ref):
        add_scores(dp_ref, dout, memory.v_tiles.tile(slot_v))
        # p = exp(s - lse)
        s = wait_for(s_ref, len(dout.multiplied))
        p = probabilities(kernel, rows, step, s)
        if kernel.large:
            p = lax.optimization_barrier(p)
            finish_before_wait(add_columns(p))
        # ds = p ∘ (dp - delta) ∘ dcap
        dp = wait_for(dp_ref, 0, p)
        plgpu.barrier_arrive(memory.v_empty.at[slot_v])
        return (p * (dp - as_rows(rows.delta, dp))).astype(kernel.sources.k.dtype)

    return with_sums(s_ref, scores)


def probabilities(kernel, rows, step, s):
    problem, work = kernel.problem, rows.work
    start_kv = work.visited
    hides = step.masked and not kernel.problem.packed
    position = key = None
    if hides:
        position = iota(s.shape, 0, WGMMA) + (rows.start_row + work.diagonal)
        key = iota(s.shape, 1, WGMMA) + start_kv(step.x)
    end = problem.seq_kv if problem.seq_kv % problem.block_kv else None
    s, exp2_scale, dcap = visible_scores(s, position, key, end, problem.rule, problem.window, hides)
    if kernel.problem.packed and step.masked:
        # With bounds that are data, this form takes fewer registers.
        place = rows.start_row + work.diagonal, start_kv(step.x), work.place.size_other
        s = hide_keys(s, *place, problem.window)
    return jnp.exp2(s * exp2_scale - as_rows(rows.lse2, s)) * dcap


def dot_rows(a, b):
    total = 0.0
    for pieces in zip(a.multiplied, b.multiplied, strict=True):
        x, y = (plgpu.load(piece, layout=WGMMA).astype(jnp.float32) for piece in pieces)
        total = total + jnp.sum(x * y, axis=1)
    return total


def launch_dq(sources, spec, backend, mask):
    offsets, is_packed = mask.offsets, mask.offsets.num_sequences is not None
    config = backend.configs(spec)["flash_bwd_dq"]
    stages = config.num_stages
    has_two = max(spec.head_dim, spec.head_dim_v) <= 64 and not is_packed
    rows, keys = (2 * CONSUMERS if has_two else CONSUMERS, WGMMA_ROWS), (stages, config.block_kv)
    if has_large_heads(spec):
        v_stages = stages - 1
        tiles, pieces = block_tiles(
            spec,
            "k_tiles",
            q_tiles=rows,
            dout_tiles=rows,
            k_tiles=keys,
            v_tiles=(v_stages, config.block_kv),
        )
    else:
        v_stages = stages
        tiles, pieces = make_tiles(
            spec, False, q_tiles=rows, dout_tiles=rows, out_tiles=rows, k_tiles=keys, v_tiles=keys
        )
    of_queries = sum(pieces.get(name, 0) for name in ("q_tiles", "dout_tiles", "out_tiles"))
    memory = Memory(
        **{"out_tiles": None} | tiles,
        hand_over=allocate_hand_over(CONSUMERS) if is_packed else None,
        q_full=plgpu.Barrier(num_arrivals=of_queries, num_barriers=rows[0]),
        q_empty=plgpu.Barrier(num_barriers=rows[0]),
        k_full=plgpu.Barrier(num_arrivals=pieces["k_tiles"], num_barriers=stages),
        k_empty=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=pieces["v_tiles"], num_barriers=v_stages),
        v_empty=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=v_stages),
    )
    num_tiles = count_sequence_tiles(spec.seq_q, offsets.num_sequences, ROW_PADDING)
    programs = num_sms(backend.target)
    if is_packed:
        if config.block_q != ROW_PADDING:
            fail(NotImplementedError, "flash_bwd_dq", f"block_q={ROW_PADDING}", config)
        schedule = min(num_tiles * spec.heads_q, programs)
    else:
        schedule = make_schedule(spec, config.block_q, config.block_kv, programs)
    padded_rows = num_tiles * ROW_PADDING
    rows = jax.ShapeDtypeStruct((*sources.lse.shape[:2], padded_rows), jnp.float32)
    dq = jax.ShapeDtypeStruct(sources.q.shape, sources.q.dtype)
    lse2, delta, dq, *_counter = launch(
        "flash_bwd_dq",
        flash_bwd_dq_kernel,
        (sources, offsets),
        schedule,
        (Outputs(rows, rows, dq), item_counter() if is_packed else None),
        {"memory": memory},
        spec,
        config,
        num_sums=int(is_packed),
    )
    return dq, lse2, delta
