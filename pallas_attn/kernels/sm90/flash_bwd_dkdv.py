"""The backward's kernel of dk and dv, for head sizes up to 128."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import warpgroup_barrier
from pallas_attn.kernels.explicit.items import Items, Queue, item_counter
from pallas_attn.kernels.explicit.programs import run_warpgroups
from pallas_attn.kernels.explicit.registers import as_columns, iota
from pallas_attn.kernels.explicit.rows import store_rows_of_pieces
from pallas_attn.kernels.explicit.schedule import make_schedule
from pallas_attn.kernels.explicit.steps import step_ranges
from pallas_attn.kernels.explicit.tma import clear_values, store_tile
from pallas_attn.kernels.explicit.wgmma import (
    WGMMA,
    WGMMA_ROWS,
    accumulator,
    add_scores,
    add_values,
    wait_for,
    zeros,
)
from pallas_attn.kernels.explicit.wgmma_launch import Problem, launch, size_of
from pallas_attn.kernels.explicit.wgmma_scores import hide_queries, visible_scores
from pallas_attn.kernels.gradients import Inputs
from pallas_attn.kernels.library.sequences import count_sequence_tiles
from pallas_attn.kernels.sm90.gradient_tiles import value_columns
from pallas_attn.kernels.sm90.keys import (
    Group,
    Memory,
    allocate_memory,
    locate,
    produce,
    release_all,
)
from pallas_attn.kernels.sm90.work import CONSUMERS, Work, own_tile
from pallas_attn.targets import num_sms
from twin_attention.contract.spec import Window
from twin_attention.contract.validate.errors import fail
from twin_attention.targets.steps import exchange_sides
from twin_attention.targets.target import SHARED_MEMORY_LIMIT


class Outputs(NamedTuple):
    dk: Any
    dv: Any


def flash_bwd_dkdv_kernel(inputs, offsets, schedule, outputs, counter, *, memory, problem):
    """One program computes tiles of block_kv rows of dk and dv of a kv head, one after the other.

    Loop invariant: dv is Σ pᵀ dout over the query heads and queries so far, dk is Σ dsᵀ q over
    those before the previous tile, and ds is that tile's.

    Packed sequences: the first tiles of keys come first. Keys whose sequence has no queries have
    factors of 0. Rows of q and dout past the sequence's end are cleared.
    """
    heads_q, heads_kv = inputs.q.shape[2], inputs.k.shape[2]
    size = heads_q // heads_kv
    items = Items(
        *reversed(offsets), problem.seq_kv, problem.seq_q, heads_kv, problem.block_kv,
        last_first=False,
    )  # fmt: skip
    queue = Queue(lax.axis_index("program"), schedule, counter, items, memory.hand_over)
    kernel = Consumers(
        inputs, outputs, memory.as_tiles(), problem, Group(size, size, heads_q, False), queue,
        value_columns(inputs.k.shape[3]), value_columns(inputs.v.shape[3]),
    )  # fmt: skip
    run_warpgroups(
        CONSUMERS,
        functools.partial(consume, kernel),
        functools.partial(produce, inputs, kernel.memory, problem, kernel.group, queue),
    )


class Consumers(NamedTuple):
    """size, size_v: columns of dk and of dv, padded."""

    inputs: Inputs
    outputs: Outputs
    memory: Memory
    problem: Problem
    group: Group
    queue: Queue
    size: int
    size_v: int


def consume(kernel, w):
    release_all(kernel.memory, w)
    kernel.queue.take(functools.partial(compute_tile, kernel, w))
    plgpu.wait_smem_to_gmem(0)


class Keys(NamedTuple):
    """A warpgroup's rows of a tile of keys; first_step: the number of steps before this tile."""

    tile: Any
    work: Work
    first_step: Any
    start_row: Any


def compute_tile(kernel, w, item, step, turn):
    memory, members = kernel.memory, kernel.group.members
    work = locate(kernel.problem, kernel.group, item)
    tile, has_two = own_tile(memory.kv_full, turn, w), memory.kv_full.shape[0] > CONSUMERS
    keys = Keys(tile, work, step, work.place.start + w * WGMMA_ROWS)
    no_ds = zeros(WGMMA_ROWS, kernel.problem.block_q).astype(kernel.inputs.k.dtype)
    plgpu.barrier_wait(memory.kv_full.at[tile])
    if has_two:
        # Once the previous item's dk and dv are out, its place is free.
        @pl.when(turn > 0)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(memory.kv_empty.at[tile ^ CONSUMERS])

    end = step + work.steps * members

    # Visit the tiles of queries that see these keys; only tiles at the edges are masked.
    carry = no_ds, zeros(WGMMA_ROWS, kernel.size), zeros(WGMMA_ROWS, kernel.size_v)
    ranges = step_ranges(work.masked_steps, work.steps)

    def visit_head(member, carry):
        for masked, lower, upper in ranges:
            body = functools.partial(visit, kernel, keys, member, masked)
            carry = lax.fori_loop(lower, upper, body, carry)
        return carry

    if members > 1:
        ds, dk, dv = lax.fori_loop(0, members, visit_head, carry)
    else:
        ds, dk, dv = visit_head(kernel.queue.program * 0, carry)

    # dk += dsᵀ q of the last tile.
    def last(dk_ref):
        dk_ref[...] = dk
        slot = (end - 1) % memory.lse2_rows.shape[0]
        add_values(dk_ref, ds, memory.q_tiles.values.tile(slot))
        return wait_for(dk_ref, 0, ds)

    dk = pl.run_scoped(last, accumulator(*dk.shape))
    warpgroup_barrier()
    store(kernel, keys, dk, dv)
    if not has_two:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(memory.kv_empty.at[tile])
    return end


class Step(NamedTuple):
    """A tile of queries of one head.

    Attributes:
        x: its number among the tiles that see the keys; masked ones come first.
        q_slot, previous, slot: the slots of its q, of the previous q, and of its dout.
        fresh: 0, but unknown to the compiler if it should not hoist the descriptors of k and v.
        multiplied: the previous q, which ds multiplies; in the first step its own, as ds is 0 then.
    """

    x: Any
    masked: bool
    q_slot: Any
    previous: Any
    slot: Any
    fresh: Any
    multiplied: Any


def visit(kernel, keys, member, masked, x, carry):
    """Add a tile of queries to dv, and the previous tile's dsᵀ q to dk; carry: its ds, dk, dv."""
    memory, block_q = kernel.memory, kernel.problem.block_q
    q_stages, num_stages = memory.lse2_rows.shape[0], memory.delta_rows.shape[0]
    work = keys.work
    index = member * work.steps + x
    now = keys.first_step + index
    slot, q_slot = now % num_stages, lax.rem(now, q_stages)
    previous = lax.rem(now + (q_stages - 1), q_stages)
    fresh = now >> 30 if kernel.problem.packed else 0
    multiplied = memory.q_tiles.values.tile(jnp.where(index == fresh, q_slot, previous))
    if kernel.problem.packed and masked:
        # Rows past the sequence's end may be NaN. Cleared while no product is in flight: otherwise
        # ptxas would wait for each product.
        plgpu.barrier_wait(memory.q_full.at[q_slot])
        plgpu.barrier_wait(memory.dout_full.at[slot])
        left = work.place.size_other - work.visited(x)
        clear_values(memory.q_tiles.values.tile(q_slot), left)
        clear_values(memory.dout_tiles.values.tile(slot), left)
    _, dk, dv = carry
    current = Step(x, masked, q_slot, previous, slot, fresh, multiplied)
    return pl.run_scoped(
        functools.partial(overlap, kernel, keys, current, now, carry),
        *[accumulator(WGMMA_ROWS, block_q)] * 2,
        accumulator(*dk.shape),
        accumulator(*dv.shape),
    )


def overlap(kernel, keys, step, now, carry, s_ref, dp_ref, dk_ref, dv_ref):
    """Compute dp during the exponentials, and dv during ds."""
    inputs, _outputs, memory, problem, *_ = kernel
    ds, dk, dv = carry
    dout = memory.dout_tiles.values.tile(step.slot)
    work, start_row = keys.work, keys.start_row
    has_window = problem.window != Window()
    may_end = problem.packed and step.masked

    # Start dk += dsᵀ q of the previous tile, sᵀ = scale · k qᵀ, dpᵀ = v doutᵀ.
    if not may_end:
        plgpu.barrier_wait(memory.q_full.at[step.q_slot])
    dk_ref[...] = dk
    add_values(dk_ref, ds, step.multiplied)
    k = memory.k_tiles.tile(keys.tile + step.fresh)
    add_scores(s_ref, k, memory.q_tiles.factors.tile(step.q_slot))
    if problem.block_q > WGMMA_ROWS:
        # dp takes the registers of ds.
        dk_new = wait_for(dk_ref, len(k.multiplied), ds)
        plgpu.barrier_arrive(memory.q_empty.at[step.previous])
    if may_end:
        # Never true. Without a branch ptxas runs out of registers and waits for each product.
        pl.when(now < 0)(lambda: plgpu.barrier_wait(memory.dout_full.at[step.slot]))
    else:
        plgpu.barrier_wait(memory.dout_full.at[step.slot])
    v = memory.v_tiles.tile(keys.tile + step.fresh)
    add_scores(dp_ref, v, memory.dout_tiles.factors.tile(step.slot))
    # pᵀ = exp(sᵀ - lse)
    s = wait_for(s_ref, len(v.multiplied))
    if problem.block_q <= WGMMA_ROWS:
        dk_new = plgpu.wgmma_accumulator_load(dk_ref, wait_n=None)
        s, dk_new, _ = lax.optimization_barrier((s, dk_new, ds))
        plgpu.barrier_arrive(memory.q_empty.at[step.previous])
    position = key = None
    if step.masked and not problem.packed:
        position = iota(s.shape, 1, WGMMA) + work.visited(step.x)
        diagonal = problem.seq_kv - problem.seq_q
        key = iota(s.shape, 0, WGMMA) + (start_row - diagonal)  # in query coordinates
    s, exp2_scale, dcap = visible_scores(
        s, position, key, None, problem.rule, problem.window,
        step.masked and not problem.packed,
    )  # fmt: skip
    if may_end and has_window:
        # With bounds that are data, this form takes fewer registers.
        place = start_row - work.diagonal, work.visited(step.x), None
        s = hide_queries(s, *place, problem.window)
    lse2 = plgpu.load(memory.lse2_rows.at[step.q_slot], layout=WGMMA.reduce(0))
    p = jnp.exp2(s * exp2_scale - as_columns(lse2, s, WGMMA))
    # dv += pᵀ dout
    p_cast = p.astype(inputs.k.dtype)
    dv_ref[...] = dv
    add_values(dv_ref, p_cast, dout)
    # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
    dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=len(dout.multiplied))
    dp, weight = lax.optimization_barrier((dp, p_cast))
    weight = weight.astype(jnp.float32) if problem.rule.softcap is None else p * dcap
    delta = plgpu.load(memory.delta_rows.at[step.slot], layout=WGMMA.reduce(0))
    ds_new = (weight * (dp - as_columns(delta, dp, WGMMA))).astype(inputs.k.dtype)
    dv_new = wait_for(dv_ref, 0, p_cast)
    plgpu.barrier_arrive(memory.dout_empty.at[step.slot])
    return ds_new, dk_new, dv_new


def store(kernel, keys, dk, dv):
    work = keys.work
    k, v = kernel.memory.k_tiles.tile(keys.tile), kernel.memory.v_tiles.tile(keys.tile)
    dk = dk * kernel.problem.rule.scale
    place = work.batch, work.head_kv, keys.start_row
    if kernel.problem.packed:
        store_rows_of_pieces(dk, k, kernel.outputs.dk, *place, work.place.end)
        store_rows_of_pieces(dv, v, kernel.outputs.dv, *place, work.place.end)
    else:
        store_tile(dk, k, kernel.outputs.dk, *place)
        store_tile(dv, v, kernel.outputs.dv, *place)


def launch_dkdv(inputs, spec, backend, mask):
    offsets, is_packed = mask.offsets, mask.offsets.num_sequences is not None
    name = "flash_bwd_dkdv"
    config = backend.configs(spec)[name]
    if is_packed and config.num_stages < 2:
        # Clearing waits for the next tile of queries, before the previous one is released.
        fail(NotImplementedError, name, "num_stages=2 for packed sequences", config)
    programs = num_sms(backend.target)
    if is_packed:
        num_tiles = count_sequence_tiles(spec.seq_kv, offsets.num_sequences, config.block_kv)
        schedule = min(num_tiles * spec.heads_kv, programs)
    else:
        turned = replace(exchange_sides(spec), heads_q=spec.heads_kv, heads_kv=spec.heads_kv)
        schedule = make_schedule(turned, config.block_kv, config.block_q, programs)
    for kv_stages in (2, 1):
        memory = allocate_memory(spec, config, packed=is_packed, kv_stages=kv_stages)
        if size_of(memory) <= SHARED_MEMORY_LIMIT["sm90"]:
            break
    dk, dv, *_counter = launch(
        name,
        flash_bwd_dkdv_kernel,
        (inputs, offsets),
        schedule,
        (
            Outputs(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs.k, inputs.v))),
            item_counter() if is_packed else None,
        ),
        {"memory": memory},
        spec,
        config,
        num_sums=int(is_packed),
    )
    return dk, dv
