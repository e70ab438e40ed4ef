"""The backward's kernel of dk and dv that also adds up dq, for head sizes up to 128."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import (
    exchange_barrier,
    fence_async,
    named_barrier,
    number_barriers,
)
from pallas_attn.kernels.explicit.items import Items, Place, Queue, item_counter
from pallas_attn.kernels.explicit.lowering import AliasingParams
from pallas_attn.kernels.explicit.passes import Sums, postprocess, preprocess
from pallas_attn.kernels.explicit.programs import run_warpgroups
from pallas_attn.kernels.explicit.registers import as_columns
from pallas_attn.kernels.explicit.rows import store_rows_of_pieces
from pallas_attn.kernels.explicit.schedule import make_schedule
from pallas_attn.kernels.explicit.steps import step_ranges
from pallas_attn.kernels.explicit.tma import await_copies, await_reads, clear_values, store_tile
from pallas_attn.kernels.explicit.wgmma import (
    WGMMA,
    WGMMA_ROWS,
    accumulator,
    add_values,
    columns_of,
    wait_for,
    zeros,
)
from pallas_attn.kernels.explicit.wgmma_launch import Problem, launch
from pallas_attn.kernels.explicit.wgmma_scores import hide_queries, visible_scores
from pallas_attn.kernels.explicit.wgmma_sums import add_dq, add_to_sums, read_sums, write_dq
from pallas_attn.kernels.gradients import Inputs
from pallas_attn.kernels.library.sequences import count_sequence_tiles
from pallas_attn.kernels.library.tiles import ROW_PADDING
from pallas_attn.kernels.sm90.gradient_tiles import value_columns
from pallas_attn.kernels.sm90.keys import (
    Group,
    Memory,
    allocate_memory,
    locate,
    produce,
    release_all,
)
from pallas_attn.kernels.sm90.work import CONSUMERS
from pallas_attn.targets import num_sms
from twin_attention.contract.spec import Window
from twin_attention.contract.validate.errors import fail
from twin_attention.targets.steps import exchange_sides, splits_group

NUMBERS = number_barriers(CONSUMERS)
# Threads that meet at the barriers of dq: a consumer's and the adding warp's.
ADDERS = 128 + 32
SUMS = Sums(AliasingParams, value_columns, read_sums)


class Outputs(NamedTuple):
    """dk and dv, or their sums, and dq's sums, in the order of `add_to_sums`."""

    dk: Any
    dv: Any
    dq_sum: Any
    dk_sum: Any
    dv_sum: Any


def flash_bwd_fused_kernel(
    inputs, offsets, schedule, outputs, counter, *, memory, problem, members
):
    """One program computes tiles of block_kv rows of dk and dv of a kv head, and adds ds k to dq.

    As `flash_bwd_dkdv_kernel`, except for dq_sum, which is 0 at first and has the rows of lse2; the
    order of the additions is not fixed. A work item visits `members` query heads of a GQA group,
    all or 1. With 1, programs share a tile of keys, and add to dk_sum and dv_sum [B, Hkv, Skv
    rounded up to ROW_PADDING, columns], while dk and dv are None. Otherwise these sums are None.

    Products overlap all arithmetic: dq and dk of the previous tile, and dp, the exponentials; dv,
    ds; s of the next tile, the stores of ds. With a softcap dq leaves its registers before the
    exponentials, and s of the next tile is issued with dv (`Plan`). Packed
    sequences: rows of k and v are cleared as well.
    """
    heads_q, warpgroups = inputs.q.shape[2], memory.kv_full.shape[0]
    hides_missing = problem.packed or problem.seq_kv % problem.block_kv > 0
    group = Group(members, heads_q // inputs.k.shape[2], heads_q, hides_missing)
    items = Items(
        *reversed(offsets), problem.seq_kv, problem.seq_q, inputs.k.shape[2], problem.block_kv,
        last_first=False,
    )  # fmt: skip
    queue = Queue(lax.axis_index("program"), schedule, counter, items, memory.hand_over)
    sizes = inputs.k.shape[3], inputs.v.shape[3]
    kernel = Consumers(
        inputs, outputs, memory.as_tiles(), problem, group, queue,
        Plan.of(problem, members, *sizes, memory.q_full.shape[0], warpgroups, outputs.dk_sum),
    )  # fmt: skip
    run_warpgroups(
        warpgroups,
        functools.partial(consume, kernel),
        functools.partial(produce, inputs, kernel.memory, problem, group, queue),
        functools.partial(add, kernel),
    )


class Plan(NamedTuple):
    """Say how a consumer's registers are used.

    Attributes:
        size, size_v: columns of dk and of dv, padded.
        small: the registers have room for a consumer's rows of k and v.
        capped: they would, but for copies of the cap's derivative.
        s_before_ds: the next scores are issued with dv, into a third tile of q. With two,
            the next tile takes the place of the one that dk frees after that.
        is_tight: with sums of all three, and a window or missing keys, ptxas serializes products
            unless one head is a loop too, and there is no room for the result of `locate`.
        has_columns: a warpgroup's part of dq is some columns over all keys, not its own keys.
    """

    size: int
    size_v: int
    small: bool
    capped: bool
    s_before_ds: bool
    is_tight: bool
    loops_over_heads: bool
    has_columns: bool
    dq_columns: tuple[slice, ...]

    @classmethod
    def of(cls, problem, members, head_dim, head_dim_v, q_stages, warpgroups, dk_sum_ref) -> "Plan":
        size, size_v = value_columns(head_dim), value_columns(head_dim_v)
        small = is_small(head_dim, head_dim_v)
        capped = small and problem.rule.softcap is not None
        hides_more = problem.window.left is not None or problem.seq_kv % problem.block_kv > 0
        is_tight = dk_sum_ref is not None and hides_more and max(size, size_v) > 96
        has_columns = small or size > 64
        dq_columns = tuple(
            slice(min(64 * w, size), min(64 * w + 64, size)) if has_columns else slice(0, size)
            for w in range(warpgroups)
        )
        return cls(
            size, size_v, small, capped, capped and q_stages > 2, is_tight,
            members > 1 or is_tight, has_columns, dq_columns,
        )  # fmt: skip

    @property
    def holds_keys(self) -> bool:
        return self.small and not self.capped

    @property
    def writers(self) -> tuple[int, ...]:
        """Return the warpgroups that have a part of dq."""
        return tuple(w for w, x in enumerate(self.dq_columns) if x.start < x.stop)


class Consumers(NamedTuple):
    inputs: Inputs
    outputs: Outputs
    memory: Memory
    problem: Problem
    group: Group
    queue: Queue
    plan: Plan


def add(kernel):
    """Add the tiles of dq that the consumers write to its sums."""
    plan, members = kernel.plan, kernel.group.members
    if kernel.problem.packed:
        kernel.memory.hand_over.free()

    def add_all(item, step, _turn):
        work = locate(kernel.problem, kernel.group, item)
        batch, steps = work.batch, work.steps
        first_row = work.first_row if kernel.problem.packed else 0

        def add_tile(index):
            head = work.place.head * members + index // steps
            start = first_row + work.visited(index % steps)
            await_reads()
            for w in plan.writers:
                named_barrier("arrive", NUMBERS.dq_free + w, ADDERS)
            for w in plan.writers:
                named_barrier("sync", NUMBERS.dq_written + w, ADDERS)
                dq = kernel.memory.dq_tiles.at[w]
                add_dq(dq, plan.dq_columns[w], kernel.outputs.dq_sum, batch, head, start)

        pl.loop(0, steps * members)(add_tile)
        return step

    kernel.queue.take(add_all)
    await_copies()


def consume(kernel, w):
    release_all(kernel.memory, w)
    kernel.queue.take(functools.partial(compute_tile, kernel, w))
    plgpu.wait_smem_to_gmem(0)


class Keys(NamedTuple):
    """A tile of keys, of one warpgroup.

    steps: how many tiles of queries see it; unknown to the compiler.
    keys, values: its rows of k and v in registers, or None.
    """

    w: int
    item: Any
    work: Any
    first_step: Any
    steps: Any
    keys: Any
    values: Any


def compute_tile(kernel, w, item, step, _turn):
    memory, plan, members = kernel.memory, kernel.plan, kernel.group.members
    q_stages = memory.lse2_rows.shape[0]
    work = locate(kernel.problem, kernel.group, item)
    no_ds = zeros(WGMMA_ROWS, kernel.problem.block_q).astype(kernel.inputs.k.dtype)
    for x in range(len(plan.dq_columns)):
        plgpu.barrier_wait(memory.kv_full.at[x])
    if kernel.problem.packed:
        for i, x in enumerate(item):
            memory.places[w, i] = x
        # Rows past the sequence's end may be NaN.
        left = work.place.end - (work.place.start + w * WGMMA_ROWS)
        clear_values(memory.k_tiles.tile(w), left)
        clear_values(memory.v_tiles.tile(w), left)
    share_ds(kernel, w, no_ds, step - 1)
    keys = values = None
    if plan.holds_keys:
        keys, values = (
            tuple(plgpu.load(x, layout=WGMMA) for x in tiles.tile(w).multiplied)
            for tiles in (memory.k_tiles, memory.v_tiles)
        )
    # Unknown to the compiler, so that it cannot see that `fresh` is constant, nor, in a loop over
    # heads, that steps > 0: if the loop is always entered, ptxas serializes products.
    steps = work.steps + (step & -(2**30) if plan.loops_over_heads else step >> 30)
    own = Keys(w, item, work, step, steps, keys, values)

    # sᵀ = scale · k qᵀ of the first tile; the previous tile of keys waited for its q.
    def first(s_ref):
        q = memory.q_tiles.factors.tile(lax.rem(step, q_stages))
        start_scores(s_ref, keys, memory.k_tiles.tile(w), q)
        return wait_for(s_ref, 0, keys)

    @pl.when(step == 0)
    def _():
        plgpu.barrier_wait(memory.q_full.at[0])

    s = pl.run_scoped(first, accumulator(WGMMA_ROWS, kernel.problem.block_q))
    end = step + steps * members

    # Visit the tiles of queries that see these keys; only tiles at the edges are masked.
    carry = (
        s, no_ds if plan.small else None, zeros(WGMMA_ROWS, plan.size),
        zeros(WGMMA_ROWS, plan.size_v),
    )  # fmt: skip
    # Masked and full tiles share one loop: ptxas has no registers for the s of two loops.
    masked = len(step_ranges(work.masked_steps, steps)) > 1

    def visit_head(member, carry):
        body = functools.partial(visit, kernel, own, member, masked)
        return lax.fori_loop(0, steps, body, carry)

    if not plan.loops_over_heads:
        _, ds, dk, dv = visit_head(kernel.queue.program * 0, carry)
    else:
        heads = members + (step & -(2**30)) if plan.is_tight else members
        _, ds, dk, dv = lax.fori_loop(0, heads, visit_head, carry)
    dk = finish(kernel, w, ds, dk, end)
    exchange_barrier(len(plan.dq_columns))  # the others read these keys too
    store(kernel, own, dk, dv)
    return end


class Step(NamedTuple):
    """A tile of queries, as `flash_bwd_dkdv.Step`, of a program that computes s one tile ahead."""

    x: Any
    masked: bool
    now: Any
    fresh: Any
    is_first: Any
    q_slot: Any
    previous: Any
    following: Any
    slot: Any
    multiplied: Any


def visit(kernel, own, member, masked, x, carry):
    """Add a tile of queries to dv, the previous one to dk and dq; carry: s, ds, dk and dv."""
    memory, plan = kernel.memory, kernel.plan
    q_stages, num_stages = memory.lse2_rows.shape[0], memory.delta_rows.shape[0]
    index = member * own.steps + x
    now = own.first_step + index
    slot, q_slot = now % num_stages, lax.rem(now, q_stages)
    previous, following = (lax.rem(now + x, q_stages) for x in (q_stages - 1, 1))
    fresh = now >> 30
    is_first = index == fresh
    multiplied = memory.q_tiles.values.tile(jnp.where(is_first, q_slot, previous))
    if kernel.problem.packed:
        # While no product is in flight: otherwise ptxas would wait for each product.
        @pl.when(x < own.work.masked_steps)
        def _():
            plgpu.barrier_wait(memory.dout_full.at[slot])
            work = locate_again(kernel, own, fresh)
            left = work.place.size_other - work.visited(x)
            clear_values(memory.q_tiles.values.tile(q_slot), left)
            clear_values(memory.dout_tiles.values.tile(slot), left)

    step = Step(
        x, masked, now, fresh, is_first, q_slot, previous, following, slot, multiplied
    )  # fmt: skip
    *_, dk, dv = carry
    refs = [accumulator(WGMMA_ROWS, kernel.problem.block_q)] * 2
    refs += [accumulator(*dk.shape), accumulator(*dv.shape)]
    if own.w in plan.writers:
        refs.append(accumulator_of_dq(plan, own.w))
    return pl.run_scoped(functools.partial(overlap, kernel, own, step, carry), *refs)


def overlap(kernel, own, step, carry, s_ref, dp_ref, dk_ref, dv_ref, dq_ref=None):
    """Overlap dq, dk and dp with the exponentials, dv with ds, and compute s one tile ahead."""
    inputs, _outputs, memory, problem, _group, _queue, plan = kernel
    w, slot, dtype = own.w, step.slot, inputs.k.dtype
    s, ds, dk, dv = carry
    multiplied = step.multiplied
    dout = memory.dout_tiles.values.tile(slot)
    of_k = len(memory.k_tiles.multiplied)

    def start_dp():
        dp_ref[...] = zeros(WGMMA_ROWS, problem.block_q)
        v = memory.v_tiles.tile(w + step.fresh)
        start_scores(dp_ref, own.values, v, memory.dout_tiles.factors.tile(slot))

    def finish_dq(pending, *read):
        if dq_ref is not None:
            dq = wait_for(dq_ref, pending, *read)
            pl.when(jnp.logical_not(step.is_first))(lambda: write_part(kernel, w, dq))

    def start_next_scores():
        # sᵀ = scale · k qᵀ of the next tile; unused after the last one.
        plgpu.barrier_wait(memory.q_full.at[step.following])
        s_ref[...] = zeros(WGMMA_ROWS, problem.block_q)
        k = memory.k_tiles.tile(w + step.fresh)
        start_scores(s_ref, own.keys, k, memory.q_tiles.factors.tile(step.following))

    # Start dq = ds k and dk += dsᵀ q of the previous tile.
    stored = (step.now - 1) % 2
    if dq_ref is not None:
        start_dq(kernel, w, dq_ref, stored)
    dk_ref[...] = dk
    add_values(dk_ref, ds if plan.small else memory.ds_tiles.at[stored, w], multiplied)
    # Wait before dq is stored: testing a barrier later would wait until the stores are done.
    if problem.packed:
        not_awaited = step.x >= own.work.masked_steps
        pl.when(not_awaited)(lambda: plgpu.barrier_wait(memory.dout_full.at[slot]))
    else:
        plgpu.barrier_wait(memory.dout_full.at[slot])
    # Start dpᵀ = v doutᵀ.
    if plan.small:
        start_dp()
    # pᵀ = exp(sᵀ - lse)
    hides = functools.partial(hide_at_edges, kernel, own, step)
    visible, exp2_scale, dcap = visible_scores(s, None, None, None, problem.rule, Window(), False)
    if step.masked and not plan.capped:
        visible = hides(visible)
    if plan.capped:
        # p and p ∘ dcap take the registers of dq.
        visible = lax.optimization_barrier(visible)
        finish_dq(len(multiplied.multiplied) + len(dout.multiplied))
    lse2 = plgpu.load(memory.lse2_rows.at[step.q_slot], layout=WGMMA.reduce(0))
    power = visible * exp2_scale - as_columns(lse2, visible, WGMMA)
    if plan.capped and step.masked:
        power = hides(power)
    if not plan.small:
        # dp takes the registers of dq.
        power = lax.optimization_barrier(power)
        finish_dq(len(multiplied.multiplied))
        start_dp()
    p = jnp.exp2(power)
    p_cast, p = p.astype(dtype), p * dcap
    if plan.holds_keys:
        p_cast, p = lax.optimization_barrier((p_cast, p))
        finish_dq(len(multiplied.multiplied) + len(dout.multiplied), p_cast)
    # Start dv += pᵀ dout.
    dv_ref[...] = dv
    add_values(dv_ref, p_cast, dout)
    pending = len(dout.multiplied)
    if plan.s_before_ds:
        start_next_scores()
        pending += of_k
    # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
    dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=pending)
    dk_new = plgpu.wgmma_accumulator_load(dk_ref, wait_n=None)
    dp, dk_new, p, _ = lax.optimization_barrier((dp, dk_new, p, ds))
    plgpu.barrier_arrive(memory.q_empty.at[step.previous])
    delta = plgpu.load(memory.delta_rows.at[slot], layout=WGMMA.reduce(0))
    ds_new = (p * (dp - as_columns(delta, dp, WGMMA))).astype(dtype)
    ds_new = lax.optimization_barrier(ds_new)
    if not plan.s_before_ds:
        start_next_scores()
    share_ds(kernel, w, ds_new, step.now)
    dv_new = wait_for(dv_ref, of_k, p_cast)
    plgpu.barrier_arrive(memory.dout_empty.at[slot])
    return wait_for(s_ref, 0), ds_new if plan.small else None, dk_new, dv_new


def hide_at_edges(kernel, own, step, s):
    problem, group = kernel.problem, kernel.group

    def hide(s):
        work = locate_again(kernel, own, step.fresh)
        diagonal = work.diagonal if problem.packed else problem.seq_kv - problem.seq_q
        # Keys are in query coordinates, so both end at one number.
        end = work.place.size_other if problem.packed else problem.seq_kv - diagonal
        return hide_queries(
            s,
            first_key=work.place.start + own.w * WGMMA_ROWS - diagonal,
            start_q=work.visited(step.x),
            end=end if group.hides_missing else None,
            window=problem.window,
            end_q=end if problem.packed else None,
        )

    return lax.cond(step.x < own.work.masked_steps, hide, lambda s: s, s)


def locate_again(kernel, own, fresh):
    """Return the work of a tile of keys; recompute it if keeping it takes registers."""
    if kernel.problem.packed:
        places = kernel.memory.places
        place = Place(*(places[own.w, i + fresh] for i in range(len(Place._fields))))
        return locate(kernel.problem, kernel.group, place)
    if kernel.plan.is_tight:
        return locate(kernel.problem, kernel.group, own.item + fresh)
    return own.work


def finish(kernel, w, ds, dk, end):
    """Add the last tile's dsᵀ q to dk and return it; hand its dq to the adding warp."""
    memory, plan = kernel.memory, kernel.plan
    stored = (end - 1) % 2

    def last(dk_ref, dq_ref=None):
        if dq_ref is not None:
            start_dq(kernel, w, dq_ref, stored)
        dk_ref[...] = dk
        left = memory.ds_tiles.at[stored, w] if ds is None else ds
        slot = (end - 1) % memory.lse2_rows.shape[0]
        add_values(dk_ref, left, memory.q_tiles.values.tile(slot))
        if dq_ref is not None:
            write_part(kernel, w, wait_for(dq_ref, len(memory.k_tiles.multiplied)))
        return wait_for(dk_ref, 0, ds)

    refs = [accumulator(*dk.shape)]
    if w in plan.writers:
        refs.append(accumulator_of_dq(plan, w))
    return pl.run_scoped(last, *refs)


def store(kernel, own, dk, dv):
    """Store a warpgroup's rows of dk and dv, or add them to the sums; free k and v."""
    memory, outputs, w = kernel.memory, kernel.outputs, own.w
    work = locate_again(kernel, own, own.steps >> 30) if kernel.problem.packed else own.work
    place = work.batch, work.head_kv, work.place.start + w * WGMMA_ROWS
    if kernel.problem.packed:
        k, v = memory.k_tiles.tile(w), memory.v_tiles.tile(w)
        dk = dk * kernel.problem.rule.scale
        store_rows_of_pieces(dk, k, outputs.dk, *place, work.place.end)
        store_rows_of_pieces(dv, v, outputs.dv, *place, work.place.end)
    elif outputs.dk_sum is None:
        store_tile(dk * kernel.problem.rule.scale, memory.k_tiles.tile(w), outputs.dk, *place)
        store_tile(dv, memory.v_tiles.tile(w), outputs.dv, *place)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(memory.kv_empty.at[w])
    if outputs.dk_sum is not None:
        for x, sums in ((dk, outputs.dk_sum), (dv, outputs.dv_sum)):
            add_to_sums(x, sums, *place)


def start_dq(kernel, w, dq_ref, stored):
    memory, plan = kernel.memory, kernel.plan
    columns = plan.dq_columns[w]
    for x in range(len(plan.dq_columns)) if plan.has_columns else (w,):
        ds = memory.ds_tiles.at[stored, x].T
        keys = memory.k_tiles.tile(x)
        for piece, held in zip(keys.multiplied, keys.columns, strict=True):
            lower, upper = max(held.start, columns.start), min(held.stop, columns.stop)
            if lower < upper:
                plgpu.wgmma(
                    columns_of(dq_ref, lower - columns.start, upper - columns.start),
                    ds,
                    columns_of(piece, lower - held.start, upper - held.start),
                )


def accumulator_of_dq(plan, w):
    return accumulator(WGMMA_ROWS, plan.dq_columns[w].stop - plan.dq_columns[w].start)


def write_part(kernel, w, dq):
    named_barrier("sync", NUMBERS.dq_free + w, ADDERS)
    write_dq(dq, kernel.memory.dq_tiles.at[w])
    named_barrier("arrive", NUMBERS.dq_written + w, ADDERS)


def share_ds(kernel, w, ds, step):
    kernel.memory.ds_tiles.at[step % 2, w][...] = ds
    fence_async()
    exchange_barrier(len(kernel.plan.dq_columns))


def start_scores(s, rows, q, k):
    """Start s += q kᵀ as `add_scores` does; rows: q in registers, or None for shared memory."""
    for q_piece, k_piece in zip(rows or q.multiplied, k.multiplied, strict=True):
        plgpu.wgmma(s, q_piece, k_piece.T)


def is_small(head_dim, head_dim_v):
    return max(head_dim, head_dim_v) <= 64


def launch_fused(sources, spec, backend, mask):
    name = "flash_bwd_fused"
    config, programs = backend.configs(spec)[name], num_sms(backend.target)
    if config.block_q != WGMMA_ROWS:
        fail(NotImplementedError, name, f"block_q={WGMMA_ROWS}", config)
    q, k, v, dout, *_ = sources
    offsets, is_packed = mask.offsets, mask.offsets.num_sequences is not None
    lse2, delta, dq_sum = preprocess(sources, offsets.cu_seqlens_q, SUMS, has_sums=True)
    is_split = not is_packed and splits_group(spec, config.block_q, config.block_kv, programs)
    members = 1 if is_split else spec.group_size
    if is_packed:
        num_tiles = count_sequence_tiles(spec.seq_kv, offsets.num_sequences, config.block_kv)
        schedule = min(num_tiles * spec.heads_kv, programs)
    else:
        parts = spec.heads_q // members
        turned = replace(exchange_sides(spec), heads_q=parts, heads_kv=parts)
        schedule = make_schedule(turned, config.block_kv, config.block_q, programs, members=members)
    of_queries, *of_keys = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (dq_sum, k, v))
    outputs = Outputs(*of_keys, of_queries, None, None)
    if is_split:
        rows = pl.cdiv(spec.seq_kv, ROW_PADDING) * ROW_PADDING
        shapes = ((spec.batch, spec.heads_kv, rows, value_columns(x.shape[3])) for x in (k, v))
        of_keys = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        outputs = Outputs(None, None, of_queries, *of_keys)
    results = launch(
        name,
        flash_bwd_fused_kernel,
        (Inputs(q, k, v, dout, lse2, delta), offsets),
        schedule,
        (outputs, item_counter() if is_packed else None),
        {"memory": allocate_memory(spec, config, packed=is_packed, sums_dq=True)},
        spec,
        config,
        num_sums=2 * is_split + is_packed,
        aliased=(dq_sum,),
        members=members,
    )
    if is_split:
        dq_sum, dk, dv = results
        dk, dv = postprocess(dk, k, SUMS, spec.scale), postprocess(dv, v, SUMS)
    else:
        dk, dv, dq_sum, *_counter = results
    dq = postprocess(dq_sum, q, SUMS, spec.scale, offsets.cu_seqlens_q)
    return dq, dk, dv, lse2, delta
