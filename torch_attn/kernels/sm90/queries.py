"""Tiles of queries in the kernels of dk and dv: how they are loaded and visited."""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_attn.kernels.explicit.barriers import (
    BIAS_READ,
    DO_READ,
    Q_READ,
    READERS,
    arrive,
    wait_for_all,
)
from torch_attn.kernels.explicit.hidden import hide_queries, load_queries, mark_keys
from torch_attn.kernels.explicit.intervals import load_windows
from torch_attn.kernels.explicit.items import (
    Own,
    are_counted,
    has_unknown_lengths,
    head_and_tile,
    locate_pairs,
    next_item,
    persistent,
    tiles_of_list,
)
from torch_attn.kernels.explicit.query_ranges import Limits
from torch_attn.kernels.explicit.sections import await_begun, section_of
from torch_attn.kernels.explicit.steps import group_step, group_step_has_padding, rows_have_padding
from torch_attn.kernels.explicit.terms import (
    TileTerms,
    bias_box_bytes,
    head_terms,
    load_bias_box,
    prepare_tile,
)
from torch_attn.kernels.explicit.tma import (
    clear_padding,
    clear_rows,
    load_box,
    load_pieces,
    piece,
    read_row,
    tile_bytes,
)
from torch_attn.kernels.explicit.wgmma import product_layout
from torch_attn.kernels.explicit.wgmma_scores import exponents, visible_scores
from torch_attn.kernels.library.sequences import count_sequence_tiles, first_tile, rows_of_sequence
from torch_attn.kernels.library.tiles import ROW_PADDING, visible_tiles
from torch_attn.kernels.tile_lists import listed_argument
from torch_attn.launch import KernelCall, Prepared
from twin_attention.contract.spec import AttentionSpec, Window
from twin_attention.targets.kernels import FlashConfig
from twin_attention.targets.steps import steps_of_keys


class QueryRows(NamedTuple):
    """The queries that an item may visit; first_row: of lse2, delta and the sums."""

    first: Any
    size: Any
    first_row: Any


class Keys(NamedTuple):
    """A consumer's 64 rows of an item, which are keys.

    Attributes:
        visits: begin, before, full and after of the tile's tiles of queries.
        position: of the rows, in query coordinates; with intervals the first query that sees each
            key, and `left`, how many follow it.
        end: the first position without a key.
        marks, pairs: `Marks` in query coordinates; `Pairs` of the first head.
    """

    batch: Any
    head: Any
    rows: Any
    queries: Any
    visits: Any
    first: Any
    position: Any
    end: Any
    left: Any
    marks: Any
    pairs: Any


class Kernel(NamedTuple):
    """Hold what a consumer needs, constants last; fused: dq is added as well."""

    tiles: Any
    barriers: Any
    shared: Any
    results: Any
    problem: Any
    rule: Any
    terms: Any
    left: Any
    right: Any
    q_ranges: Any
    group_size: Any
    members: Any
    fused: Any
    head_dim: Any
    head_dim_v: Any
    edges: Any


class SharedTiles(NamedTuple):
    """Tiles in shared memory, and rows; () for those that are not loaded."""

    k: Any
    v: Any
    q: Any
    dout: Any
    lse2: Any
    delta: Any
    bias: Any
    rest2: Any


class Barriers(NamedTuple):
    k_full: Any
    v_full: Any
    kv_read: Any
    q_full: Any
    do_full: Any


@gluon.jit
def locate_keys(
    item, place, problem, window_left, window_right, FUSED: gl.constexpr, MEMBERS: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr = 128,
):  # fmt: skip
    """Return batch, first query head, keys, queries and tiles of queries of an item.

    Query rows that pad the last tile count as existing: their p is 0 without a mask. In packed
    sequences they belong to another sequence, and do not.
    """
    seq_kv, seq_q, diagonal = problem.size, problem.size_other, problem.diagonal
    num_tiles = gl.cdiv(seq_kv, BLOCK_KV)
    first_q, first_row = 0, 0
    if problem.intervals is not None:
        index, _tile, start_kv, begin, before, full, after = place
    elif problem.num_sequences is None and problem.tiles is not None:
        index, tile, start_kv = place.head, place.tile, place.start
    elif problem.num_sequences is None:
        index, tile = head_and_tile(item, problem.num_items, problem.together, num_tiles)
        start_kv = tile * BLOCK_KV
        rows_q = gl.cdiv(seq_q, BLOCK_Q) * BLOCK_Q
    else:
        index, tile, start_kv, seq_kv = place.head, place.tile, place.start, place.end
        first_q, seq_q, sequence = place.first_other, place.size_other, place.sequence
        diagonal = seq_kv - seq_q
        first_row = first_tile(first_q, sequence, ROW_PADDING) * ROW_PADDING
        rows_q = seq_q
    batch, head = head_of_item(index, problem, num_tiles, MEMBERS)
    if problem.tiles is not None:
        begin, before, full, after = tiles_of_list(problem, place, batch, BLOCK_KV, BLOCK_Q)
    else:
        if problem.intervals is None:
            begin, before, full, after = visible_tiles(
                start_kv, seq_kv, rows_q, -diagonal, window_right, window_left, BLOCK_KV, BLOCK_Q
            )
        total = before + full + after
        # Where nothing is visible, visit one masked tile, so that each consumer has one.
        begin = gl.where(total == 0, 0, begin)
        before = gl.where(total == 0, 1, before)
        if FUSED:
            # Hide missing keys in every tile: dq multiplies their ds by 0, so it must be finite.
            ragged = start_kv + BLOCK_KV > seq_kv
            before = gl.where(ragged, gl.maximum(total, 1), before)
            full = gl.where(ragged, 0, full)
            after = gl.where(ragged, 0, after)
    keys, queries = Own(start_kv, seq_kv, diagonal), QueryRows(first_q, seq_q, first_row)
    return batch, head, keys, queries, (begin, before, full, after)


@gluon.jit
def head_index(item, place, problem):
    index = place.head
    if problem.intervals is None and not are_counted(problem.num_sequences, problem.tiles):
        num_tiles = gl.cdiv(problem.size, 128)
        index, _tile = head_and_tile(item, problem.num_items, problem.together, num_tiles)
    return index


@gluon.jit
def head_of_item(index, problem, num_tiles, MEMBERS: gl.constexpr):
    heads = problem.heads_q // MEMBERS
    is_counted: gl.constexpr = are_counted(problem.num_sequences, problem.tiles)
    if problem.elements_adjoin and not is_counted and problem.intervals is None:
        elements = problem.num_items // num_tiles // heads
        index = index % elements * heads + index // elements
    return index // heads, index % heads * MEMBERS


@gluon.jit
def own_keys(kernel, item, place, CONSUMER: gl.constexpr):
    problem = kernel.problem
    BLOCK_Q: gl.constexpr = kernel.tiles.q[0].shape[3]
    batch, head, rows, queries, visits = locate_keys(
        item, place, problem, kernel.left, kernel.right, kernel.fused, kernel.members, BLOCK_Q,
        _keys_of_item(kernel.tiles.k, kernel.barriers.k_full),
    )  # fmt: skip
    start, end, diagonal = rows
    first = start + CONSUMER * 64
    position = first + gl.arange(0, 64, gl.SliceLayout(1, product_layout(BLOCK_Q))) - diagonal
    end_of_keys, left = end - diagonal, 0
    if problem.num_sequences is not None:
        # If the sequence has no query, the rows visited may be padding with a sink. They see no
        # key: q and dout count as 0, but a table's gradient is a sum of ds itself.
        end_of_keys = gl.where(queries.size > 0, end_of_keys, -(2**30))
    if problem.intervals is not None:
        position, left = load_windows(problem.intervals, position + diagonal, end)
    marks = _mark_rows(problem, kernel.q_ranges, place, batch, rows, position)
    pairs = locate_pairs(problem, place, batch, head, first, first - diagonal)
    return Keys(
        batch, head, rows, queries, visits, first, position, end_of_keys, left, marks, pairs
    )


@gluon.jit
def _mark_rows(problem, q_ranges, place, batch, rows, position):
    first = 0
    has_positions: gl.constexpr = problem.tree is not None or q_ranges is not None
    if problem.num_sequences is not None and has_positions:
        first, _size = rows_of_sequence(
            problem.offsets, place.sequence, problem.size, problem.num_sequences, problem.size
        )
    row_kv = batch.to(gl.int64) * problem.size
    row_q = batch.to(gl.int64) * problem.size_other
    if problem.num_sequences is not None:
        row_q += place.first_other
    return mark_keys(
        problem, q_ranges, row_q, row_kv, position + rows.diagonal, rows.end, rows.diagonal - first
    )


@triton.constexpr_function
def _keys_of_item(k_tile, k_full):
    return 64 * k_tile[0].shape[0] // k_full.shape[0]


@gluon.jit
def produce_queries(
    tiles, barriers, shared, counter_ptr, sections, loads, problem, window_left, window_right,
    FUSED: gl.constexpr, GROUP_SIZE: gl.constexpr, MEMBERS: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Load all that the consumers of dk and dv multiply, and the values of the queries' rows.

    Without a tile of v neither v nor delta is loaded. The single tile of a bias is loaded with
    dout, and read early in a step. sections: (), or the `Sections` whose rows must be begun.
    """
    k_tile, v_tile, q_tile, do_tile, lse2_row, delta_row, bias_tile, rest2_row = tiles
    k_full, v_full, kv_read, q_full, do_full = barriers
    ROWS: gl.constexpr = 1 if len(rest2_row) == 0 else 2
    WITH_V: gl.constexpr = len(v_tile) > 0
    DELTA_BYTES: gl.constexpr = 4 * q_tile[0].shape[3] if WITH_V else 0
    k, v, q, dout, lse2, delta, bias, rest2 = loads
    BIAS_BYTES: gl.constexpr = bias_box_bytes(bias.boxes, q_tile[0].shape[3], 128)
    KV_STAGES: gl.constexpr = k_full.shape[0]
    BLOCK_KV: gl.constexpr = _keys_of_item(k_tile, k_full)
    Q_STAGES: gl.constexpr = q_tile[0].shape[0]
    DO_STAGES: gl.constexpr = do_tile[0].shape[0]
    BLOCK_Q: gl.constexpr = q_tile[0].shape[3]
    rows_per_head = count_sequence_tiles(
        problem.size_other, problem.num_sequences, ROW_PADDING
    ) * (ROW_PADDING // BLOCK_Q)  # fmt: skip
    step = 0  # counted over all items
    turn = 0
    begun = -1  # the last section that was awaited
    heads = problem.heads_q // MEMBERS
    item, place = next_item(
        turn, problem, shared, counter_ptr, BLOCK_KV, False, (), sections, heads, BLOCK_Q
    )
    while item < problem.num_items:
        batch, first_head, keys, queries, visible = locate_keys(
            item, place, problem, window_left, window_right, FUSED, MEMBERS, BLOCK_Q, BLOCK_KV
        )
        start_kv = keys.start
        head_kv = first_head // GROUP_SIZE
        begin, before, full, after = visible
        for i in range((before + full + after) * MEMBERS):
            member, start = group_step(i, begin, before, full, after, BLOCK_Q, MEMBERS)
            head = first_head + member
            row = (batch * problem.heads_q + head) * rows_per_head
            row += (queries.first_row + start) // BLOCK_Q
            slot = step % Q_STAGES
            if step >= Q_STAGES:
                wait_for_all(Q_READ + slot, READERS)
            ready = q_full.index(slot)
            mbarrier.expect(ready, tile_bytes(BLOCK_Q, HEAD_DIM) + ROWS * 4 * BLOCK_Q)
            load_pieces(q, q_tile, slot, batch, head, queries.first + start, ready, HEAD_DIM)
            if len(sections) > 0:
                section = section_of(sections, item)
                if section != begun:
                    await_begun(sections, section, MEMBERS)
                begun = section
            load_box(lse2, [row, 0], ready, lse2_row.index(slot))
            if ROWS == 2:
                load_box(rest2, [row, 0], ready, rest2_row[0].index(slot))
            if i == 0:
                # After q, which does not wait for an earlier item's keys to be read.
                stage = turn % KV_STAGES
                for half in gl.static_range(2):
                    mbarrier.wait(kv_read.index(2 * stage + half), (turn // KV_STAGES & 1) ^ 1)
                ready = k_full.index(stage)
                mbarrier.expect(ready, tile_bytes(BLOCK_KV, HEAD_DIM))
                for half in gl.static_range(BLOCK_KV // 64):
                    tile, row_kv = 2 * stage + half, start_kv + 64 * half
                    load_pieces(k, k_tile, tile, batch, head_kv, row_kv, ready, HEAD_DIM)
                if WITH_V:
                    ready = v_full.index(stage)
                    mbarrier.expect(ready, tile_bytes(BLOCK_KV, HEAD_DIM_V))
                    for half in gl.static_range(BLOCK_KV // 64):
                        tile, row_kv = 2 * stage + half, start_kv + 64 * half
                        load_pieces(v, v_tile, tile, batch, head_kv, row_kv, ready, HEAD_DIM_V)
            slot = step % DO_STAGES
            if step >= DO_STAGES:
                wait_for_all(DO_READ + slot, READERS)
            ready = do_full.index(slot)
            mbarrier.expect(ready, tile_bytes(BLOCK_Q, HEAD_DIM_V) + DELTA_BYTES + BIAS_BYTES)
            load_pieces(dout, do_tile, slot, batch, head, queries.first + start, ready, HEAD_DIM_V)
            if WITH_V:
                load_box(delta, [row, 0], ready, delta_row.index(slot))
            if bias.boxes is not None:
                if step > 0:
                    wait_for_all(BIAS_READ, READERS)
                for half in gl.static_range(2):
                    load_bias_box(
                        bias, bias_tile, half, batch, head, start, start_kv + 64 * half, ready
                    )
            step += 1
        turn += 1
        item, place = next_item(
            turn, problem, shared, counter_ptr, BLOCK_KV, False, (), sections, heads, BLOCK_Q
        )


@gluon.jit
def clear_queries(kernel, keys, tile, full, first, index):
    """Clear rows of another sequence or of padding in a tile of queries or dout.

    No product is in flight here; otherwise the compiler would wait for each. index: one past the
    last means the last.
    """
    STAGES: gl.constexpr = tile[0].shape[0]
    BLOCK_Q: gl.constexpr = tile[0].shape[3]
    begin, before, full_tiles, after = keys.visits
    index = gl.minimum(index, (before + full_tiles + after) * kernel.members - 1)
    _member, start = group_step(index, *keys.visits, BLOCK_Q, kernel.members)
    slot, phase = (first + index) % STAGES, (first + index) // STAGES & 1
    if kernel.problem.segments is not None:
        padded = group_step_has_padding(index, begin, before, full_tiles, kernel.members)
        clear_padding(
            tile, slot, keys.marks.other_ids, start, keys.queries.size, padded, full.index(slot),
            phase,
        )  # fmt: skip
    elif kernel.problem.num_sequences is not None:
        clear_rows(tile, slot, keys.queries.size - start, full.index(slot), phase)


@gluon.jit
def clear_keys(kernel, keys, tile, slot, full, phase):
    """Clear rows of others, of padding or of unseen keys, which may be NaN, in 64 rows."""
    start = keys.rows.start + slot % 2 * 64
    if kernel.problem.segments is not None:
        padded = rows_have_padding(keys.visits[0])
        clear_padding(tile, slot, keys.marks.own_ids, start, keys.rows.end, padded, full, phase)
    elif kernel.problem.num_sequences is not None:
        count = gl.where(keys.queries.size > 0, keys.rows.end - start, 0)
        clear_rows(tile, slot, count, full, phase)


@gluon.jit
def with_bias(of_tile, terms, tiles, CONSUMER: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the `TileTerms`, with the bias if TMA loaded one; keys are rows.

    `hand_back_bias` may hand back the tile once a product has p, which needs all of it.
    """
    if terms.bias.boxes is not None:
        bias = piece(tiles.bias, CONSUMER).permute((1, 0)).load(LAYOUT)
        of_tile = TileTerms(of_tile.offset, bias, of_tile.kept)
    return of_tile


@gluon.jit
def hand_back_bias(terms):
    """Report that the tile of a bias is read, after a use of the loads: see `read_bias_box`."""
    if terms.bias.boxes is not None:
        arrive(BIAS_READ, READERS)


@gluon.jit
def read_lse(tiles, slot, LAYOUT: gl.constexpr):
    rest2 = 0
    if len(tiles.rest2) > 0:
        rest2 = read_row(tiles.rest2[0], slot, LAYOUT)[None, :]
    return read_row(tiles.lse2, slot, LAYOUT)[None, :], rest2


@gluon.jit
def terms_of_tile(kernel, keys, own, start):
    BLOCK_Q: gl.constexpr = kernel.tiles.q[0].shape[3]
    return prepare_tile(
        kernel.terms, own, start, keys.pairs.first, keys.pairs.position - start,
        keys.queries.size, kernel.problem.size, BLOCK_Q, 64, product_layout(BLOCK_Q), True,
    )  # fmt: skip


@gluon.jit
def exponents_of_keys(
    kernel, keys, s, lse, start, of_queries, own, of_tile, MASKED: gl.constexpr,
    FAR: gl.constexpr = False,
):  # fmt: skip
    """Return the exponents of pᵀ, and the derivative of the cap; lse: of `read_lse`."""
    # dq needs finite ds of keys that do not exist; otherwise nothing reads it.
    end, left, right = None, kernel.left, kernel.right
    if kernel.problem.intervals is not None:
        left, right = keys.left[:, None], 0
    elif kernel.q_ranges is not None:
        left, right = None, None
    elif kernel.fused:
        end = keys.end
    rows = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    s, scale, dcap = visible_scores(
        s, rows[None, :], keys.position[:, None], end, kernel.rule, left, right, MASKED,
        kernel.terms, own, of_tile, True, FAR,
    )  # fmt: skip
    if MASKED:
        limits = Limits(start, keys.queries.size, keys.end, kernel.left, kernel.right)
        s = hide_queries(
            s, kernel.problem, kernel.q_ranges, keys.marks, keys.position, of_queries, limits
        )
    lse2, rest2 = lse
    return exponents(s, scale, lse2, rest2, kernel.terms.rest2 is not None), dcap


@gluon.jit
def exponents_of_step(kernel, keys, s, step, index, MASKED: gl.constexpr):
    """Return `exponents_of_keys` and `TileTerms`; without values, report the queries as read."""
    BLOCK_Q: gl.constexpr = kernel.tiles.q[0].shape[3]
    layout: gl.constexpr = product_layout(BLOCK_Q)
    slot = step % kernel.tiles.q[0].shape[0]
    member, start = group_step(index, *keys.visits, BLOCK_Q, kernel.members)
    lse = read_lse(kernel.tiles, slot, layout)
    if len(kernel.tiles.v) == 0:
        arrive(Q_READ + slot, READERS)
    of_queries = load_queries(kernel.problem, keys.marks, start, keys.queries.size, BLOCK_Q, layout)
    own = head_terms(kernel.terms, keys.pairs.element, keys.pairs.head + member)
    of_tile = terms_of_tile(kernel, keys, own, start)
    power, dcap = exponents_of_keys(kernel, keys, s, lse, start, of_queries, own, of_tile, MASKED)
    return power, dcap, of_tile


def persistent_keys(
    call: KernelCall,
    members: int,
    arguments: dict[str, Any],
    ragged: bool = False,
    is_counted: bool = False,
    has_sections: bool = False,
) -> Prepared:
    """Return `persistent` for tiles of keys; members: query heads that an item visits."""
    spec = call.spec
    steps, heads = items_of_keys(spec, call.config, members)
    edges = has_unknown_lengths(spec) or spec.window != Window() or ragged
    arguments = arguments | listed_argument(call, of_keys=False) | {"EDGES": edges}
    return persistent(call, steps, heads, arguments, is_counted, has_sections)


def items_of_keys(
    spec: AttentionSpec, config: FlashConfig, members: int
) -> tuple[tuple[int, ...], int]:
    """Return how many steps each tile of keys takes, and how many heads have tiles of keys."""
    steps = steps_of_keys(spec, config.block_q, config.block_kv)
    return tuple(members * each for each in steps), spec.heads_q // members * spec.batch
