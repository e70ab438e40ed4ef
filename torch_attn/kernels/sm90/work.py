"""Tiles of queries as work items, and the keys that each visits, in the kernels of out and dq."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.explicit.block_mask import kept_tiles
from torch_attn.kernels.explicit.hidden import hide_keys, mark_queries
from torch_attn.kernels.explicit.intervals import load_windows
from torch_attn.kernels.explicit.items import (
    Others,
    Own,
    has_unknown_lengths,
    head_and_tile,
    locate_pairs,
    persistent,
    tiles_of_list,
)
from torch_attn.kernels.explicit.query_ranges import Limits
from torch_attn.kernels.explicit.steps import step_has_padding
from torch_attn.kernels.explicit.terms import adds_terms, head_terms, prepare_tile
from torch_attn.kernels.explicit.tma import clear_padding, clear_rows, store_result
from torch_attn.kernels.explicit.wgmma import product_layout
from torch_attn.kernels.explicit.wgmma_scores import exponents, visible_scores
from torch_attn.kernels.library.tiles import visible_tiles
from torch_attn.kernels.tile_lists import listed_argument
from torch_attn.launch import KernelCall, Prepared
from twin_attention.contract.spec import BlockSparseSpec, Window
from twin_attention.targets.steps import steps_of_queries


class Work(NamedTuple):
    """A head's tile of queries; visits: begin, before, full and after, one masked tile if none."""

    batch: Any
    head: Any
    rows: Any
    keys: Any
    visits: Any


class Queries(NamedTuple):
    """A consumer's 64 rows: position, right; with intervals, first keys and how many follow."""

    work: Any
    first: Any
    rows: Any
    position: Any
    right: Any
    marks: Any
    pairs: Any
    terms: Any


class RowStatistics(NamedTuple):
    """Hold statistics of a consumer's rows; delta is None for tangents, rest2 0 without terms."""

    lse2: Any
    delta: Any
    rest2: Any


@gluon.jit
def locate_queries(
    item, place, problem, window_left, window_right, lists, BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr,
):  # fmt: skip
    seq_q, seq_kv, diagonal = problem.size, problem.size_other, problem.diagonal
    first_kv = 0
    if problem.intervals is not None:
        index, _tile, start_q, begin, before, full, after = place
    elif problem.num_sequences is None and problem.tiles is not None:
        index, tile, start_q = place.head, place.tile, place.start
    elif problem.num_sequences is None:
        num_tiles = gl.cdiv(seq_q, BLOCK_Q)
        index, tile = head_and_tile(item, problem.num_items, problem.together, num_tiles)
        start_q = (num_tiles - 1 - tile) * BLOCK_Q
    else:
        index, tile, start_q, seq_q = place.head, place.tile, place.start, place.end
        first_kv, seq_kv = place.first_other, place.size_other
        diagonal = seq_kv - seq_q
    batch, head = index // problem.heads_q, index % problem.heads_q
    if problem.tiles is not None:
        begin, before, full, after = tiles_of_list(problem, place, batch, BLOCK_Q, BLOCK_KV)
    elif problem.intervals is None:
        begin, before, full, after = visible_tiles(
            start_q, seq_q, seq_kv, diagonal, window_left, window_right, BLOCK_Q, BLOCK_KV
        )
    if lists is not None:
        begin, before, full, after = kept_tiles(
            lists, batch, head, start_q, (begin, before, full, after), window_left, window_right,
            BLOCK_KV,
        )  # fmt: skip
    before = gl.maximum(before, 1 - full - after)
    rows, keys = Own(start_q, seq_q, diagonal), Others(first_kv, seq_kv)
    return Work(batch, head, rows, keys, (begin, before, full, after))


@gluon.jit
def own_queries(kernel, item, place, CONSUMER: gl.constexpr, BLOCK_KV: gl.constexpr):
    work = locate_queries(
        item, place, kernel.problem, kernel.left, kernel.right, kernel.lists, kernel.block_q,
        BLOCK_KV,
    )  # fmt: skip
    start, end, diagonal = work.rows
    first = start + CONSUMER * 64
    rows = first + gl.arange(0, 64, gl.SliceLayout(1, product_layout(BLOCK_KV)))
    position, right = rows + diagonal, 0
    if kernel.problem.intervals is not None:
        position, right = load_windows(kernel.problem.intervals, rows, end)
    row_q = work.batch.to(gl.int64) * kernel.problem.size
    row_kv = work.batch.to(gl.int64) * kernel.problem.size_other + work.keys.first
    marks = mark_queries(kernel.problem, kernel.q_ranges, row_q, row_kv, rows, end, work.keys.size)
    pairs = locate_pairs(kernel.problem, place, work.batch, work.head, first, first + diagonal)
    terms = head_terms(kernel.terms, pairs.element, work.head)
    return Queries(work, first, rows, position, right, marks, pairs, terms)


@gluon.jit
def clear_visited(tiles, full, step, problem, queries, index, start):
    """Clear rows of other sequences and of padding in visited tiles; start: the first key."""
    has_padding = False
    if problem.segments is not None:
        begin, before, _full, _after = queries.work.visits
        has_padding = step_has_padding(index, begin, before)
    for i in gl.static_range(len(tiles)):
        _clear_tile(tiles[i], full[i], step, problem, queries, start, has_padding)


@gluon.jit
def _clear_tile(tile, full, step, problem, queries, start, has_padding):
    STAGES: gl.constexpr = tile[0].shape[0]
    slot, phase = step % STAGES, step // STAGES & 1
    size = queries.work.keys.size
    if problem.segments is not None:
        clear_padding(
            tile, slot, queries.marks.other_ids, start, size, has_padding, full.index(slot), phase
        )
    elif problem.num_sequences is not None:
        clear_rows(tile, slot, size - start, full.index(slot), phase)


@gluon.jit
def first_of_head(kernel, queries):
    work = queries.work
    return (work.batch * kernel.problem.heads_q + work.head).to(gl.int64) * kernel.problem.size


@gluon.jit
def terms_of_tile(kernel, queries, start, BLOCK_KV: gl.constexpr):
    work, pairs = queries.work, queries.pairs
    return prepare_tile(
        kernel.terms, queries.terms, pairs.first, start, start - pairs.position, work.rows.end,
        work.keys.size, 64, BLOCK_KV, product_layout(BLOCK_KV),
    )  # fmt: skip


@gluon.jit
def store_rows(kernel, queries, maps, tile, slot, x, SIZE: gl.constexpr, FIRST: gl.constexpr = 0):
    """Store a consumer's rows of a result; x: column pieces, from the FIRST one on."""
    work = queries.work
    store_result(
        maps, tile, slot, x, work.batch, work.head, queries.first, work.rows.end,
        kernel.problem.heads_q, kernel.problem.num_sequences is not None, SIZE, FIRST,
    )  # fmt: skip


@gluon.jit
def probabilities(kernel, queries, statistics, s, start, of_keys, of_tile, MASKED: gl.constexpr):
    """Return p of products q·k, and dcap."""
    ADDS: gl.constexpr = adds_terms(
        kernel.terms.bias.entries, kernel.terms.relative, kernel.terms.slopes
    )
    end, left, right = queries.work.keys.size, kernel.left, kernel.right
    if kernel.problem.intervals is not None:
        left, right = 0, queries.right[:, None]
    if kernel.q_ranges is not None:
        end, left, right = None, None, None
    key = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    s, scale, dcap = visible_scores(
        s, queries.position[:, None], key[None, :], end, kernel.rule, left, right, MASKED,
        kernel.terms, queries.terms, of_tile,
    )  # fmt: skip
    if MASKED:
        limits = Limits(start, queries.work.keys.size, None, kernel.left, kernel.right)
        s = hide_keys(
            s, kernel.problem, kernel.q_ranges, queries.marks, queries.position, of_keys, limits
        )
    rest2 = statistics.rest2
    if ADDS:
        rest2 = rest2[:, None]
    return gl.exp2(exponents(s, scale, statistics.lse2[:, None], rest2, ADDS)), dcap


def persistent_queries(
    call: KernelCall, arguments: dict[str, Any], is_counted: bool = False
) -> Prepared:
    """Return `persistent` for tiles of queries; EDGES: some tile of keys needs a mask."""
    spec, config = call.spec, call.config
    # A list may be empty; then one tile is visited, and hides all.
    hides = isinstance(spec, BlockSparseSpec) or has_unknown_lengths(spec)
    edges = hides or spec.window != Window() or spec.seq_kv % config.block_kv != 0
    steps = steps_of_queries(spec, config.block_q, config.block_kv)
    arguments = arguments | listed_argument(call, of_keys=True) | {"EDGES": edges}
    return persistent(call, steps, spec.heads_q * spec.batch, arguments, is_counted)
