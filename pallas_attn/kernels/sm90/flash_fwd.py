"""Flash attention, forward: the formula and division of work of the twin.

Here consumers take turns issuing their products, and m_i grows only if a score passes it by
RESCALE_ABOVE, as in `pallas_attn.kernels.sm80.flash_fwd`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import exchange_barrier, pass_turn, take_turn
from pallas_attn.kernels.explicit.block_mask import find_list, kept_row, kept_tiles
from pallas_attn.kernels.explicit.cp_async import allocate_tile
from pallas_attn.kernels.explicit.items import Items, Queue, allocate_hand_over, item_counter
from pallas_attn.kernels.explicit.programs import run_warpgroups
from pallas_attn.kernels.explicit.registers import as_rows
from pallas_attn.kernels.explicit.rows import store_row_values, store_rows_of_tile
from pallas_attn.kernels.explicit.schedule import make_schedule
from pallas_attn.kernels.explicit.softmax import add_columns, rescale
from pallas_attn.kernels.explicit.steps import tile_start
from pallas_attn.kernels.explicit.tma import (
    BLOCK,
    Tiles,
    clear_values,
    count_boxes,
    is_whole,
    load_tile,
    padded_columns,
    store_tile,
    tile_views,
    value_views,
)
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
from pallas_attn.kernels.explicit.wgmma_launch import Problem, launch, size_of
from pallas_attn.kernels.explicit.wgmma_scores import (
    hide_keys,
    rounding_of_one_key,
    scaled_scores,
    softmax_update,
)
from pallas_attn.kernels.library.block_mask import Lists, list_arguments, lists_of_keys
from pallas_attn.kernels.library.sequences import (
    Offsets,
    count_sequence_tiles,
    num_sequences_of,
    offsets_of,
    with_batch,
    without_batch,
)
from pallas_attn.kernels.library.softmax import LOG2E, row_statistics
from pallas_attn.kernels.library.tiles import cdiv
from pallas_attn.kernels.sm90.work import locate_queries
from pallas_attn.targets import num_sms
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.target import SHARED_MEMORY_LIMIT

# Head sizes above this visit the last tiles first.
LARGE_HEAD = 224
# Above this head size all consumers share one code: compiled once, and faster under a mask.
ONE_CODE_HEAD = 128


class Inputs(NamedTuple):
    """Operands; None for what a problem lacks. Packed sequences are a batch of one."""

    q: Any
    k: Any
    v: Any
    sinks: Any
    offsets: Offsets
    lists: Lists


class Outputs(NamedTuple):
    """Outputs: out [B, Sq, Hq, Dv], and lse [B, Hq, Sq], float32, natural log."""

    out: Any
    lse: Any


class Memory(NamedTuple):
    hand_over: Any
    k_empty: Any
    k_full: Any
    k_tiles: Any
    q_and_out: Any
    q_empty: Any
    q_full: Any
    v_empty: Any
    v_full: Any
    v_tiles: Any


class Kernel(NamedTuple):
    """State of the producer and of the consumer warpgroups.

    Attributes:
        list_tile: queries and keys of a tile of the block mask, or None.
        last_first: visit the last tiles of keys first, which only the later warpgroups see.
        ping_pong: turns begin with the second tile of keys, or, at 2, the first.
        bounded: m_i stays 0, as capped scores need no maximum in a dtype with float32's range.
        out_sizes: columns of out that are stored at a time.
    """

    inputs: Inputs
    outputs: Outputs
    memory: Memory
    problem: Problem
    queue: Queue
    q_tiles: Tiles
    out_tiles: tuple
    list_tile: tuple
    last_first: bool
    ping_pong: int
    bounded: bool
    out_sizes: tuple[int, ...]

    @property
    def warpgroups(self) -> int:
        return self.memory.q_full.shape[0]

    @property
    def num_stages(self) -> int:
        return self.memory.k_full.shape[0]


def flash_fwd_kernel(
    inputs, schedule, outputs, counter, *, memory, problem, tile_q, tile_kv, ping_pong, out_sizes
):
    """One program computes tiles of block_q rows of a query head, one after the other.

    out_sizes: how many columns of out each store takes, all through the same memory; one number if
    there is room for all. Loop invariant: as in `pallas_attn.kernels.sm80.flash_fwd`.

    Packed sequences: instead of a schedule, programs take items from counter [1], which is 0 at
    first. Items are tiles of a head, the last ones first, as they see most keys. tile_q and tile_kv
    are the sizes of a block mask's tiles.
    """
    q, _k, v, _sinks, offsets, lists = inputs
    large = max(q.shape[3], v.shape[3]) > LARGE_HEAD
    last_first = large and problem.block_q >= 2 * problem.block_kv
    last_first = last_first and problem.window.right is not None
    last_first = last_first and not problem.packed and lists.tiles is None
    q_tiles, out_tiles = memory.q_and_out
    items = Items(
        *offsets, problem.seq_q, problem.seq_kv, q.shape[2], problem.block_q, last_first=True
    )
    kernel = Kernel(
        inputs, outputs,
        memory._replace(k_tiles=Tiles(*memory.k_tiles), v_tiles=Tiles(*memory.v_tiles)), problem,
        Queue(lax.axis_index("program"), schedule, counter, items, memory.hand_over),
        Tiles(*q_tiles), out_tiles, (tile_q, tile_kv), last_first, ping_pong,
        problem.rule.small_cap and v.dtype == jnp.bfloat16, out_sizes,
    )  # fmt: skip
    run_warpgroups(
        kernel.warpgroups,
        functools.partial(consume, kernel),
        functools.partial(produce, kernel),
        alike=max(q.shape[3], v.shape[3]) > ONE_CODE_HEAD,
    )


def locate(kernel, item):
    """Return the work of an item; `visited` also returns where keys end, or None past the tile."""
    inputs, problem = kernel.inputs, kernel.problem
    lists, block_kv = inputs.lists, problem.block_kv
    work, visible, last_start = locate_queries(problem, inputs.q.shape[2], item)
    if lists.tiles is not None:
        tile_q, tile_kv = kernel.list_tile
        kept = find_list(lists, work.batch, work.place.head, work.place.start // tile_q, tile_kv)
        visible = kept_tiles(kept, visible, problem.window, block_kv)
    _begin, before, full, after = visible

    def visited(step):
        if kernel.last_first:
            step = jnp.where(step < before + after, before + after - 1 - step, step)
        start = tile_start(step, visible, block_kv, last_start)
        if lists.tiles is not None:
            return kept_row(kept, start, problem.seq_kv)
        may_end = problem.packed or problem.seq_kv % block_kv
        return start, work.place.size_other if may_end else None

    # If no tile is seen, visit one, fully masked.
    steps = jnp.maximum(before + full + after, 1)
    return work._replace(visited=visited, masked_steps=before + after, steps=steps)


def produce(kernel):
    inputs, memory = kernel.inputs, kernel.memory
    group_size = inputs.q.shape[2] // inputs.k.shape[2]

    def load_all(item, step, _turn, take_next):
        work = locate(kernel, item)
        batch, place, steps = work.batch, work.place, work.steps

        def load(matrix, tiles, full, empty, x):
            start, _ = work.visited(x)
            if kernel.problem.packed:
                start = place.first_other + start
            slot = (step + x) % kernel.num_stages
            plgpu.barrier_wait(empty.at[slot])
            head_kv = place.head // group_size
            load_tile(matrix, tiles.tile(slot), batch, head_kv, start, full.at[slot])

        def load_k(x):
            load(inputs.k, memory.k_tiles, memory.k_full, memory.k_empty, x)

        def load_v(x):
            load(inputs.v, memory.v_tiles, memory.v_full, memory.v_empty, x)

        load_k(kernel.queue.program * 0)
        for w in range(kernel.warpgroups):
            plgpu.barrier_wait(memory.q_empty.at[w])
            start, full = place.start + w * WGMMA_ROWS, memory.q_full.at[w]
            load_tile(inputs.q, kernel.q_tiles.tile(w), batch, place.head, start, full)

        @pl.loop(1, steps)
        def _(x):
            load_k(x)
            load_v(x - 1)
            if kernel.problem.packed:
                # The counter and the search for a sequence take longer than a step, so the next
                # tile is taken while the consumers still have loaded tiles to visit.
                pl.when(x == jnp.maximum(steps - 2, 1))(take_next)

        load_v(steps - 1)
        if kernel.problem.packed:
            pl.when(steps == 1)(take_next)
        return step + steps

    kernel.queue.give_ahead(load_all)


class Turns(NamedTuple):
    """Decide when a consumer issues its products; waits: for tiles, not only for its turn."""

    w: Any
    warpgroups: int
    taken: bool
    waits: Any

    def begin(self, full, in_turn=True):
        """Wait for the turn, and for the mbarrier of a tile if it is given."""
        if full is not None:
            self.wait(full)
        if self.taken and in_turn:
            take_turn(self.w, self.warpgroups)

    def wait(self, full):
        pl.when(self.waits)(lambda: plgpu.barrier_wait(full))

    def end(self, in_turn=True):
        if self.taken and in_turn:
            pass_turn(self.w, self.warpgroups)


def consume(kernel, w):
    memory = kernel.memory
    taken = kernel.ping_pong and kernel.warpgroups > 1
    turns = Turns(w, kernel.warpgroups, taken, kernel.ping_pong < 2 or not taken or w == 0)

    # All tiles are free, and the first warpgroup has the first turn.
    plgpu.barrier_arrive(memory.q_empty.at[w])
    for slot in range(kernel.num_stages):
        plgpu.barrier_arrive(memory.k_empty.at[slot])
        plgpu.barrier_arrive(memory.v_empty.at[slot])
    if kernel.problem.packed:
        memory.hand_over.free()
    pl.when(w == kernel.warpgroups - 1)(turns.end)

    kernel.queue.take(functools.partial(compute_tile, kernel, turns))
    plgpu.wait_smem_to_gmem(0)


class Queries(NamedTuple):
    """A warpgroup's rows of a tile of queries; end_masked: the first step after the masked ones."""

    work: Any
    first_step: Any
    start_row: Any
    sink: Any
    end_masked: Any


def compute_tile(kernel, turns, item, step, _turn):
    """Compute out and lse of a warpgroup's rows of a tile; return the steps so far."""
    work = locate(kernel, item)
    memory, problem, w = kernel.memory, kernel.problem, turns.w
    num_stages, from_first = kernel.num_stages, kernel.ping_pong == 2
    masked_steps, steps = work.masked_steps, work.steps
    start_row = work.place.start + w * WGMMA_ROWS
    has_masked = not (isinstance(masked_steps, int) and masked_steps == 0)
    sinks = kernel.inputs.sinks
    sink = None if sinks is None else sinks[work.place.head] * LOG2E

    # Skip tiles of keys past the last key that these rows see.
    skipped = 0
    if kernel.last_first:
        last_key = start_row + WGMMA_ROWS - 1 + work.diagonal + problem.window.right
        skipped = cdiv(work.visited(kernel.queue.program * 0)[0] - last_key, problem.block_kv)
        skipped = jnp.clip(skipped, 0, steps - 1)

    def pass_over(full, empty, in_turn=True):
        @pl.loop(0, skipped)
        def _(x):
            slot = (step + x) % num_stages
            turns.begin(full.at[slot], in_turn)
            turns.end(in_turn)
            plgpu.barrier_arrive(empty.at[slot])

    if kernel.last_first:
        pass_over(memory.k_full, memory.k_empty, from_first)

    # s = scale · q kᵀ and p of the first tile of keys
    slot = (step + skipped) % num_stages
    plgpu.barrier_wait(memory.q_full.at[w])
    turns.begin(memory.k_full.at[slot], from_first)

    def first(s_ref):
        add_scores(s_ref, kernel.q_tiles.tile(w), memory.k_tiles.tile(slot))
        turns.end(from_first)
        return s_ref[...]

    s = pl.run_scoped(first, accumulator(WGMMA_ROWS, problem.block_kv))
    plgpu.barrier_arrive(memory.k_empty.at[slot])
    start = float("-inf") if sink is None else sink
    m_i = jnp.full((WGMMA_ROWS,), 0.0 if kernel.bounded else start, jnp.float32)
    m_i = plgpu.layout_cast(m_i, WGMMA.reduce(1))
    queries = Queries(work, step, start_row, sink, None)
    p, m_i, _ = softmax(kernel, queries, s, kernel.queue.program * 0 + skipped, m_i, has_masked)
    l_i = add_columns(p)
    p = p.astype(kernel.inputs.v.dtype)
    acc = zeros(WGMMA_ROWS, memory.v_tiles.columns[-1].stop)
    if kernel.problem.packed:
        wait_for_edge(kernel, turns, queries, kernel.queue.program * 0)
    if kernel.last_first:
        pass_over(memory.v_full, memory.v_empty)

    # Visit the other tiles of keys that these queries see; only tiles at the edges are masked.
    carry = p, m_i, l_i, acc
    second = end_masked = skipped + 1
    if has_masked:
        end_masked = jnp.clip(masked_steps, second, steps)
        masked = functools.partial(visit, kernel, turns, queries, True)
        carry = lax.fori_loop(second, end_masked, masked, carry)
    queries = queries._replace(end_masked=end_masked)
    full = functools.partial(visit, kernel, turns, queries, False)
    p, m_i, l_i, acc = lax.fori_loop(end_masked, steps, full, carry)

    # acc += p v of the last tile
    plgpu.barrier_arrive(memory.q_empty.at[w])
    slot = (step + steps - 1) % num_stages
    wait_for_values(kernel, turns, queries, steps - 1, slot)
    turns.begin(None, from_first)

    def last(acc_ref):
        acc_ref[...] = acc
        add_values(acc_ref, p, memory.v_tiles.tile(slot))
        turns.end(from_first)
        factor = finish_rows(kernel, queries, m_i, l_i)
        return wait_for(acc_ref, 0, p), factor

    acc, factor = pl.run_scoped(last, accumulator(*acc.shape))
    plgpu.barrier_arrive(memory.v_empty.at[slot])
    store_out(kernel, queries, w, acc * as_rows(factor, acc))
    return step + steps


def softmax(kernel, queries, s, x, m_i, masked):
    problem = kernel.problem
    if masked:
        position = queries.start_row + queries.work.diagonal
        s = scaled_scores(s, kernel.problem.rule)
        s = hide_keys(s, position, *queries.work.visited(x), problem.window)
    return softmax_update(s, m_i, kernel.problem.rule, masked, kernel.bounded)


def wait_for_edge(kernel, turns, queries, x):
    @pl.when(turns.waits)
    def _():
        slot = (queries.first_step + x) % kernel.num_stages
        plgpu.barrier_wait(kernel.memory.v_full.at[slot])
        start, end = queries.work.visited(x)
        clear_values(kernel.memory.v_tiles.tile(slot), end - start)


def wait_for_values(kernel, turns, queries, x, slot):
    """Wait for a tile of values, unless `wait_for_edge` did."""
    full = kernel.memory.v_full.at[slot]
    if kernel.problem.packed:
        pl.when(x >= queries.end_masked)(lambda: turns.wait(full))
    else:
        turns.wait(full)


def visit(kernel, turns, queries, masked, x, carry):
    """Start the products of step x: its scores, and the values of the previous tile."""
    memory, packed = kernel.memory, kernel.problem.packed
    now = queries.first_step + x
    slot, previous = now % kernel.num_stages, (now - 1) % kernel.num_stages
    *_, acc = carry

    if packed and not masked:
        wait_for_values(kernel, turns, queries, x - 1, previous)
    # Before the accumulator is allocated, so that the assembler need not zero it.
    turns.begin(memory.k_full.at[slot])
    carry = pl.run_scoped(
        functools.partial(overlap, kernel, turns, queries, masked, x, slot, previous, carry),
        accumulator(WGMMA_ROWS, kernel.problem.block_kv),
        accumulator(*acc.shape),
    )
    if packed and masked:
        wait_for_edge(kernel, turns, queries, x)
    return carry


def overlap(kernel, turns, queries, masked, x, slot, previous, carry, s_ref, acc_ref):
    """Compute p v of the previous tile during the softmax of this one."""
    memory = kernel.memory
    p, m_i, l_i, acc = carry
    # Start s = scale · q kᵀ, and acc += p v of the previous tile.
    add_scores(s_ref, kernel.q_tiles.tile(turns.w), memory.k_tiles.tile(slot))
    if not kernel.problem.packed:
        wait_for_values(kernel, turns, queries, x - 1, previous)
    acc_ref[...] = acc
    v = memory.v_tiles.tile(previous)
    add_values(acc_ref, p, v)
    turns.end()
    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=len(v.multiplied))
    s = lax.optimization_barrier(s)
    plgpu.barrier_arrive(memory.k_empty.at[slot])
    # p = exp(s - max)
    p_new, m_new, alpha = softmax(kernel, queries, s, x, m_i, masked)
    p_new, m_new, sums, alpha = lax.optimization_barrier((p_new, m_new, add_columns(p_new), alpha))
    finish_before_wait(sums)
    # Rescale what was accumulated.
    new = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
    new, _ = lax.optimization_barrier((new, p))
    plgpu.barrier_arrive(memory.v_empty.at[previous])
    l_new = l_i
    if not kernel.bounded:
        new, l_new = rescale(new, l_i, as_rows(alpha, l_i), WGMMA)
    return p_new.astype(p.dtype), m_new, l_new + sums, new


def finish_rows(kernel, queries, m_i, l_i):
    problem, work, sink = kernel.problem, queries.work, queries.sink
    packed, start_row = problem.packed, queries.start_row
    total, m_end, alpha = l_i.sum(axis=1), m_i, 1.0
    if kernel.bounded:
        m_end = jnp.where(total == 0.0, float("-inf"), 0.0)
        num_keys = work.visited(kernel.queue.program * 0)[1] if packed else problem.seq_kv
        factor = rounding_of_one_key(
            total, start_row + work.diagonal, num_keys, problem.window,
            kernel.inputs.v.dtype,
        )  # fmt: skip
        if sink is not None:
            m_end = jnp.maximum(m_end, sink)
            alpha = jnp.exp2(-jnp.maximum(m_end, 0.0))
            total = total * alpha
        alpha = alpha * factor
    if sink is not None:
        m_safe = jnp.where(m_end == float("-inf"), 0.0, m_end)
        total = total + jnp.exp2(sink - m_safe)
    l_safe, lse = row_statistics(m_end, total)
    num_rows = work.place.end if packed or problem.seq_q % problem.block_q else None
    place = work.batch, work.place.head, start_row, num_rows
    store_row_values(lse, kernel.outputs.lse, *place, WGMMA.reduce(1))
    return alpha / l_safe


def store_out(kernel, queries, w, out):
    """Store a warpgroup's rows of out, as many columns at a time as fit in shared memory."""
    work, start_row = queries.work, queries.start_row
    for i, size in enumerate(kernel.out_sizes):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if len({*kernel.out_sizes}) > 1:  # a warpgroup's place differs from part to part
            exchange_barrier(kernel.warpgroups)
        matrix, first = kernel.outputs.out, sum(kernel.out_sizes[:i])
        part = out[:, first : first + padded_columns(size)]
        if len(kernel.out_sizes) > 1:
            matrix = kernel.outputs.out.at[:, :, :, pl.ds(first, size)]
        place = matrix, work.batch, work.place.head, start_row
        if kernel.problem.packed:
            store_rows_of_tile(part, kernel.out_tiles[i].at[w], *place, work.place.end)
        else:
            store_tile(part, Tiles(*kernel.out_tiles[2 * i : 2 * i + 2]).tile(w), *place)


def flash_fwd(
    operands: AttentionOperands[Array], spec: AttentionSpec, backend: Backend
) -> tuple[Array, Array]:
    q, k, v = with_batch(spec, operands.q, operands.k, operands.v)
    dtype, num_sequences = q.dtype, num_sequences_of(spec)
    is_packed = num_sequences is not None  # sequences' tiles begin at any row
    scores_whole = not is_packed and is_whole(spec.head_dim, spec.seq_q, spec.seq_kv)
    v_whole = not is_packed and is_whole(spec.head_dim_v, spec.seq_kv)
    out_whole = not is_packed and is_whole(spec.head_dim_v, spec.seq_q)

    config = backend.configs(spec)["flash_fwd"]

    warpgroups = config.num_warps // 4 - 1

    def out_views(size):
        if is_packed:
            return (allocate_tile(dtype, warpgroups, WGMMA_ROWS, size),)
        return tile_views(dtype, (warpgroups, WGMMA_ROWS), size, out_whole)

    def memory(out_sizes):
        stages = config.num_stages
        q = tile_views(dtype, (warpgroups, WGMMA_ROWS), spec.head_dim, scores_whole)
        out = [views for size in out_sizes for views in out_views(size)]
        k = tile_views(dtype, (stages, config.block_kv), spec.head_dim, scores_whole)
        v = tile_views(dtype, (stages, config.block_kv), spec.head_dim_v, v_whole)
        if spec.head_dim_v > LARGE_HEAD and not v_whole:  # 256 columns
            v = value_views(dtype, stages, config.block_kv, cdiv(spec.head_dim_v, BLOCK) * BLOCK)
        elif is_packed:
            v = value_views(dtype, stages, config.block_kv, spec.head_dim_v)
        q_full, k_full, v_full = (
            plgpu.Barrier(num_arrivals=count_boxes(views), num_barriers=count)
            for views, count in ((q, warpgroups), (k, stages), (v, stages))
        )
        return Memory(
            hand_over=allocate_hand_over(warpgroups, slots=2) if is_packed else None,
            k_empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            k_full=k_full,
            k_tiles=plgpu.RefUnion(*k),
            q_and_out=[plgpu.RefUnion(*x) for x in (q, out)],
            q_empty=plgpu.Barrier(num_barriers=warpgroups),
            q_full=q_full,
            v_empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            v_full=v_full,
            v_tiles=plgpu.RefUnion(*v),
        )

    # In large heads, shared memory has no room for all columns of out at a time.
    size_v = spec.head_dim_v
    for most in (size_v, 128, 64):
        out_sizes = tuple(min(most, size_v - first) for first in range(0, size_v, most))
        if size_of(memory(out_sizes)) <= SHARED_MEMORY_LIMIT["sm90"]:
            break
    programs = num_sms(backend.target)
    if is_packed:
        num_tiles = count_sequence_tiles(spec.seq_q, num_sequences, config.block_q)
        schedule = min(num_tiles * spec.heads_q, programs)
    else:
        schedule = make_schedule(spec, config.block_q, config.block_kv, programs)
    out, lse, *_counter = launch(
        "flash_fwd",
        flash_fwd_kernel,
        (Inputs(q, k, v, operands.sinks, offsets_of(operands), lists_of_keys(operands)),),
        schedule,
        (
            Outputs(
                jax.ShapeDtypeStruct((*q.shape[:3], spec.head_dim_v), dtype),
                jax.ShapeDtypeStruct((spec.batch, spec.heads_q, spec.seq_q), jnp.float32),
            ),
            item_counter() if is_packed else None,
        ),
        {"memory": memory(out_sizes)},
        spec,
        config,
        num_sums=int(is_packed),
        ping_pong=config.ping_pong,
        out_sizes=out_sizes,
        **list_arguments(spec),
    )
    return without_batch(spec, out, lse)
