"""Paged attention of long chunks of new tokens, for SM90.

The formula of `pallas_attn.kernels.portable.paged_attention`, with the division of work of
`pallas_attn.kernels.sm90.flash_fwd`: one warp loads, with a TMA copy for each page of a tile of
keys, and warpgroups compute.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import pass_turn, take_turn
from pallas_attn.kernels.explicit.pages import find_pages, load_pages
from pallas_attn.kernels.explicit.programs import run_warpgroups
from pallas_attn.kernels.explicit.registers import as_rows, iota
from pallas_attn.kernels.explicit.rows import store_rows_of_heads
from pallas_attn.kernels.explicit.sequences import locate_tokens
from pallas_attn.kernels.explicit.softmax import add_columns, rescale
from pallas_attn.kernels.explicit.steps import tile_start
from pallas_attn.kernels.explicit.tma import (
    Tiles,
    clear_values,
    is_whole,
    padded_columns,
    tile_views,
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
from pallas_attn.kernels.explicit.wgmma_launch import launch_programs
from pallas_attn.kernels.explicit.wgmma_scores import hide_keys, scaled_scores, softmax_update
from pallas_attn.kernels.library.pages import keys_of_tokens, share_of_tiles, tiles_at_edges
from pallas_attn.kernels.library.softmax import LN2, LOG2E
from twin_attention.contract.operands import PagedOperands
from twin_attention.contract.paged_spec import PagedSpec
from twin_attention.contract.spec import Window
from twin_attention.targets.family import Backend
from twin_attention.targets.splits import num_row_tiles


class Inputs(NamedTuple):
    """Operands: q [Tq, Hq, D], pools [P, page_size, Hkv, D] and Dv, sinks [Hq] float32 or None."""

    q: Any
    k: Any
    v: Any
    tables: Any
    lens: Any
    cu_seqlens_q: Any
    sinks: Any


class Outputs(NamedTuple):
    """Outputs: out [Tq, Hq, Dv], and lse [Hq, Tq], float32, natural log."""

    out: Any
    lse: Any


class Memory(NamedTuple):
    k_empty: Any
    k_full: Any
    k_tiles: Any
    q_full: Any
    q_tiles: Any
    v_empty: Any
    v_full: Any
    v_tiles: Any


class Kernel(NamedTuple):
    inputs: Inputs
    outputs: Outputs
    memory: Memory
    rule: Any
    window: Window
    block_q: int
    block_kv: int
    ping_pong: bool

    @property
    def warpgroups(self) -> int:
        return self.memory.q_full.shape[0]

    @property
    def num_stages(self) -> int:
        return self.memory.k_full.shape[0]

    @property
    def group_size(self) -> int:
        return self.inputs.q.shape[1] // self.inputs.k.shape[2]


class Work(NamedTuple):
    """A program's rows, and the keys that they see.

    Attributes:
        first_token, tokens: the sequence's first token, and how many new ones it has.
        first: the tile's first token, counted from the sequence's.
        diagonal: key position of the sequence's first token.
        begin, end: the first key that the rows see, and the end of the keys.
        first_tile, visible: the first tile of keys, and which tiles need a mask.
        end_masked: the first step after the masked ones.
    """

    program: Any
    head_kv: Any
    sequence: Any
    first_token: Any
    tokens: Any
    first: Any
    diagonal: Any
    begin: Any
    end: Any
    first_tile: Any
    visible: Any
    steps: Any
    end_masked: Any


def paged_attention_kernel(
    inputs, outputs, *, memory, rule, window, block_q, block_kv, num_warps, num_stages, ping_pong
):
    """One program computes block_q rows of one kv head of a sequence.

    Rows, and what they see, are those of the portable `paged_attention_kernel`, without splits. The
    group size is a power of two up to 64, and the page size a power of two from 16 on. Grid: (kv
    heads, row tiles of `locate_tokens`) in one axis, kv heads fastest and the last tiles first, as
    they see most keys. Loop invariant: as in `flash_fwd_kernel`.
    """
    memory = memory._replace(
        q_tiles=[Tiles(*tile) for tile in memory.q_tiles],
        k_tiles=Tiles(*memory.k_tiles),
        v_tiles=Tiles(*memory.v_tiles),
    )
    kernel = Kernel(inputs, outputs, memory, rule, window, block_q, block_kv, ping_pong)
    work = locate(kernel)
    has_rows = work.first < work.tokens
    run_warpgroups(
        kernel.warpgroups,
        lambda w: pl.when(has_rows)(lambda: consume(kernel, work, w)),
        lambda: pl.when(has_rows)(lambda: produce(kernel, work)),
    )


def locate(kernel):
    inputs, block_q, block_kv = kernel.inputs, kernel.block_q, kernel.block_kv
    _, page_size, heads_kv, _ = inputs.k.shape
    num_sequences, max_pages = inputs.tables.shape
    group_size, left = kernel.group_size, kernel.window.left
    program = lax.axis_size("program") - 1 - lax.axis_index("program")
    head_kv = lax.rem(program, heads_kv)
    sequence, first_token, tokens, start_row = locate_tokens(
        inputs.cu_seqlens_q, lax.div(program, heads_kv), inputs.q.shape[0], group_size, block_q
    )
    is_sequence = sequence < num_sequences
    sequence = jnp.minimum(sequence, num_sequences - 1)
    length = jnp.clip(inputs.lens[sequence], 0, max_pages * page_size)
    length = jnp.where(is_sequence, length, 0)
    diagonal = length - tokens
    first = lax.div(start_row, group_size)
    last = jnp.minimum(lax.div(start_row + block_q - 1, group_size), tokens - 1)
    begin, end = keys_of_tokens(length, tokens, first, last, left)
    first_tile, count, _ = share_of_tiles(begin, end, 0, 1, block_kv)
    visible = tiles_at_edges(diagonal + first, diagonal + last, first_tile, count, left, block_kv)
    # Where no tile is seen, visit one, fully masked.
    steps = jnp.maximum(count, 1)
    end_masked = jnp.clip(visible.before + visible.after, 1, steps)
    return Work(
        program, head_kv, sequence, first_token, tokens, first, diagonal, begin, end, first_tile,
        visible, steps, end_masked,
    )  # fmt: skip


def key_of(kernel, work, step):
    of_sequence = work.visible._replace(begin=work.first_tile * kernel.block_kv)
    last_start = kernel.inputs.tables.shape[1] * kernel.inputs.k.shape[1]
    return tile_start(step, of_sequence, kernel.block_kv, last_start)


def produce(kernel, work):
    inputs, memory, head_kv = kernel.inputs, kernel.memory, work.head_kv
    num_pages, page_size, *_ = inputs.k.shape

    def load(pool, tiles, full, empty, step):
        slot, start = lax.rem(step, kernel.num_stages), key_of(kernel, work, step)
        pages = find_pages(
            inputs.tables, work.sequence, start, work.end, num_pages, page_size, kernel.block_kv
        )
        plgpu.barrier_wait(empty.at[slot])
        load_pages(pool, tiles.tile(slot), pages, start, head_kv, page_size, full.at[slot])

    def load_k(step):
        load(inputs.k, memory.k_tiles, memory.k_full, memory.k_empty, step)

    def load_v(step):
        load(inputs.v, memory.v_tiles, memory.v_full, memory.v_empty, step)

    load_k(work.program * 0)
    for w in range(kernel.warpgroups):
        token = work.first_token + work.first + w * (WGMMA_ROWS // kernel.group_size)
        head = head_kv * kernel.group_size
        _load_queries(inputs.q, memory.q_tiles[w], token, head, memory.q_full.at[w])

    @pl.loop(1, work.steps)
    def _(step):
        load_k(step)
        load_v(step - 1)

    load_v(work.steps - 1)


class Queries(NamedTuple):
    """A consumer warpgroup's rows; start_token: in the sequence; sink: in base 2, or None."""

    w: int
    start_token: Any
    sink: Any


def consume(kernel, work, w):
    inputs, memory, group_size = kernel.inputs, kernel.memory, kernel.group_size
    start_token = work.first + w * (WGMMA_ROWS // group_size)

    # All tiles are free, and the first warpgroup has the first turn.
    for slot in range(kernel.num_stages):
        plgpu.barrier_arrive(memory.k_empty.at[slot])
        plgpu.barrier_arrive(memory.v_empty.at[slot])
    if kernel.ping_pong and w == kernel.warpgroups - 1:
        pass_turn(w, kernel.warpgroups)

    sink = None
    m_i = plgpu.layout_cast(jnp.full((WGMMA_ROWS,), float("-inf"), jnp.float32), WGMMA.reduce(1))
    if inputs.sinks is not None:
        # Start the maximum at the sink, so that acc is not rescaled for it at the end.
        sink = _sinks_of_rows(inputs.sinks, work.head_kv * group_size, group_size, m_i) * LOG2E
        m_i = sink
    queries = Queries(w, start_token, sink)

    # s = scale · q kᵀ and p of the first tile of keys
    first = work.program * 0
    plgpu.barrier_wait(memory.q_full.at[w])
    plgpu.barrier_wait(memory.k_full.at[0])

    def first_scores(s_ref):
        q = memory.q_tiles[w]
        add_scores(s_ref, q, memory.k_tiles.tile(0).cut(q.columns))
        return s_ref[...]

    s = pl.run_scoped(first_scores, accumulator(WGMMA_ROWS, kernel.block_kv))
    plgpu.barrier_arrive(memory.k_empty.at[0])
    p, m_i, _ = softmax(kernel, work, queries, s, first, m_i, True)
    l_i = add_columns(p)
    p = p.astype(inputs.v.dtype)
    acc = zeros(WGMMA_ROWS, padded_columns(inputs.v.shape[3]))
    wait_for_edge(kernel, work, first)
    if kernel.window.left is not None:
        hidden = work.begin - work.first_tile * kernel.block_kv
        clear_values(memory.v_tiles.tile(0), hidden, before=True)

    # Visit the other tiles of keys that these rows see; only tiles at the edges are masked.
    carry = p, m_i, l_i, acc
    for masked, lower, upper in ((True, 1, work.end_masked), (False, work.end_masked, work.steps)):
        body = functools.partial(visit, kernel, work, queries, masked)
        carry = lax.fori_loop(lower, upper, body, carry)
    finish(kernel, work, queries, *carry)


def softmax(kernel, work, queries, s, step, m_i, masked):
    if masked:
        position, start = work.diagonal + queries.start_token, key_of(kernel, work, step)
        s = scaled_scores(s, kernel.rule)
        s = hide_keys(s, position, start, work.end, kernel.window, kernel.group_size)
    return softmax_update(s, m_i, kernel.rule, masked, bounded=False)


def wait_for_edge(kernel, work, step):
    slot = lax.rem(step, kernel.num_stages)
    plgpu.barrier_wait(kernel.memory.v_full.at[slot])
    clear_values(kernel.memory.v_tiles.tile(slot), work.end - key_of(kernel, work, step))


def visit(kernel, work, queries, masked, step, carry):
    num_stages, memory, *_, acc = kernel.num_stages, kernel.memory, *carry
    slot, previous = lax.rem(step, num_stages), lax.rem(step - 1, num_stages)
    plgpu.barrier_wait(memory.k_full.at[slot])
    if not masked:
        # Values of edge tiles were already waited for.
        v_full = memory.v_full.at[previous]
        pl.when(step > work.end_masked)(lambda: plgpu.barrier_wait(v_full))
    if kernel.ping_pong:
        take_turn(queries.w, kernel.warpgroups)
    carry = pl.run_scoped(
        functools.partial(overlap, kernel, work, queries, masked, step, slot, previous, carry),
        accumulator(WGMMA_ROWS, kernel.block_kv),
        accumulator(*acc.shape),
    )
    if masked:
        wait_for_edge(kernel, work, step)
    return carry


def overlap(kernel, work, queries, masked, step, slot, previous, carry, s_ref, acc_ref):
    memory = kernel.memory
    p, m_i, l_i, acc = carry
    # Start s = scale · q kᵀ, and acc += p v of the previous tile.
    q = memory.q_tiles[queries.w]
    add_scores(s_ref, q, memory.k_tiles.tile(slot).cut(q.columns))
    acc_ref[...] = acc
    v = memory.v_tiles.tile(previous)
    add_values(acc_ref, p, v)
    if kernel.ping_pong:
        pass_turn(queries.w, kernel.warpgroups)
    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=len(v.multiplied))
    s = lax.optimization_barrier(s)
    plgpu.barrier_arrive(memory.k_empty.at[slot])
    # p = exp(s - max)
    p_new, m_new, alpha = softmax(kernel, work, queries, s, step, m_i, masked)
    p_new, m_new, sums, alpha = lax.optimization_barrier((p_new, m_new, add_columns(p_new), alpha))
    finish_before_wait(sums)
    # Rescale what was accumulated.
    new = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
    new, _ = lax.optimization_barrier((new, p))
    plgpu.barrier_arrive(memory.v_empty.at[previous])
    new, l_new = rescale(new, l_i, as_rows(alpha, l_i), WGMMA)
    return p_new.astype(p.dtype), m_new, l_new + sums, new


def finish(kernel, work, queries, p, m_i, l_i, acc):
    group_size, memory, start_token = kernel.group_size, kernel.memory, queries.start_token
    slot = lax.rem(work.steps - 1, kernel.num_stages)
    pl.when(work.steps > work.end_masked)(lambda: plgpu.barrier_wait(memory.v_full.at[slot]))

    def last_values(acc_ref):
        acc_ref[...] = acc
        add_values(acc_ref, p, memory.v_tiles.tile(slot))
        # Reduce the row sums over each quad.
        total = l_i.sum(axis=1)
        if queries.sink is not None:
            m_safe = jnp.where(m_i == float("-inf"), 0.0, m_i)
            total = total + jnp.exp2(queries.sink - m_safe)
        l_safe = jnp.where(total == 0.0, 1.0, total)
        return wait_for(acc_ref, 0, p), m_i * LN2 + jnp.log(l_safe), 1.0 / l_safe

    acc, lse, factor = pl.run_scoped(last_values, accumulator(*acc.shape))
    store_rows_of_heads(
        acc * as_rows(factor, acc), lse, *kernel.outputs, work.first_token + start_token,
        work.head_kv * group_size, (work.tokens - start_token) * group_size, group_size,
    )  # fmt: skip


def _load_queries(q_ref, tile, token, head, barrier):
    for piece, columns in zip(tile.copied, tile.columns, strict=True):
        tokens, group_size, width = piece.shape
        first = columns.start + 0 * token  # traced: JAX refuses a static slice past the end
        rows = q_ref.at[pl.ds(token, tokens), pl.ds(head, group_size), pl.ds(first, width)]
        plgpu.copy_gmem_to_smem(rows, piece, barrier)


def _sinks_of_rows(sinks_ref, head, group_size, like):
    of_group = lax.rem(iota(like.shape, 0, WGMMA.reduce(1)), group_size)
    sinks = like
    for i in range(group_size):
        sinks = jnp.where(of_group == i, sinks_ref[head + i], sinks)
    return sinks


def paged_attention(
    operands: PagedOperands[Array], spec: PagedSpec, backend: Backend
) -> tuple[Array, Array]:
    dtype, cache = operands.q.dtype, spec.cache
    config = backend.configs(spec)["paged_attention"]
    warpgroups, stages = config.num_warps // 4 - 1, config.num_stages
    pages = config.block_kv // min(cache.page_size, config.block_kv)
    k, v = (
        tile_views(dtype, (stages, config.block_kv), size, is_whole(size, cache.page_size))
        for size in (spec.head_dim, spec.head_dim_v)
    )
    q = _query_views(dtype, spec.group_size, spec.head_dim)
    memory = Memory(
        k_empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        k_full=plgpu.Barrier(num_arrivals=pages * len(k[0]), num_barriers=stages),
        k_tiles=plgpu.RefUnion(*k),
        q_full=plgpu.Barrier(num_arrivals=len(q[0]), num_barriers=warpgroups),
        q_tiles=[plgpu.RefUnion(*q) for _ in range(warpgroups)],
        v_empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=pages * len(v[0]), num_barriers=stages),
        v_tiles=plgpu.RefUnion(*v),
    )
    return launch_programs(
        "paged_attention",
        paged_attention_kernel,
        num_row_tiles(spec, config.block_q) * spec.heads_kv,
        (Inputs(*operands[: PagedOperands._fields.index("k_scale")]),),
        (
            Outputs(
                jax.ShapeDtypeStruct((spec.tokens, spec.heads_q, spec.head_dim_v), dtype),
                jax.ShapeDtypeStruct((spec.heads_q, spec.tokens), jnp.float32),
            ),
        ),
        {"memory": memory},
        config,
        rule=spec.scores,
        window=Window(spec.bounded_window.left, 0),
        **vars(config),
    )


def _query_views(dtype, group_size, size):
    copied, multiplied = tile_views(dtype, (WGMMA_ROWS,), size, False)
    shape = WGMMA_ROWS // group_size, group_size
    copied = tuple(
        plgpu.SMEM((*shape, x.shape[-1]), dtype, transforms=x.transforms) for x in copied
    )
    return copied, multiplied
