"""Pairs of query and key in the kernels of mma.sync: the verbs of `library.pairs`, with scalars."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.explicit.cp_async import fetch_tile
from torch_attn.kernels.explicit.hidden import (
    hide_keys,
    hide_queries,
    load_keys,
    load_queries,
    mark_keys,
    mark_queries,
)
from torch_attn.kernels.explicit.mma import store_rows
from torch_attn.kernels.explicit.mma_scores import visible_scores
from torch_attn.kernels.explicit.query_ranges import Limits
from torch_attn.kernels.explicit.sequences import locate_tile
from torch_attn.kernels.explicit.steps import is_list, listed_tiles
from torch_attn.kernels.library.schedule import longest_first
from torch_attn.kernels.library.sequences import count_sequence_tiles, first_tile
from torch_attn.kernels.library.tiles import ROW_PADDING, head_base, visible_tiles


class Rows(NamedTuple):
    """A program's tile of one axis; it visits tiles of the other axis.

    Own rows are counted from the first row of all sequences, rows of the other axis from the
    sequence's first.

    Attributes:
        batch, head: the batch element, and the head.
        tile: which tile of the batch element it is.
        start, end: the tile's first row, and the end of the sequence's rows.
        first: the sequence's first row.
        first_other, size_other: its first row on the other axis, and how many it has there.
        diagonal: position on the other axis of row 0.
        padded: what is added to a query's row to find it in lse2 and delta.
        rows, positions: the rows, [BLOCK], and their positions on the other axis.
        row, row_other: index in a mask's operands of row 0, and of the first visited row.
        ids, ids_other: pointers to the segments of the rows and of the visited rows, from row 0 on;
            0 without segments.
    """

    batch: Any
    head: Any
    tile: Any
    start: Any
    end: Any
    first: Any
    first_other: Any
    size_other: Any
    diagonal: Any
    padded: Any
    rows: Any
    positions: Any
    row: Any
    row_other: Any
    ids: Any
    ids_other: Any


@gluon.jit
def own_queries(
    mask, seq_q, seq_kv, diagonal, num_sequences, heads_q, together, BLOCK_Q: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the queries of a program, in the order of `longest_first`; LAYOUT: of the scores."""
    index, tile = longest_first(count_sequence_tiles(seq_q, num_sequences, BLOCK_Q), together)
    head, batch = index % heads_q, (index // heads_q).to(gl.int64)
    first, start, end, first_kv, size_kv, padded = 0, tile * BLOCK_Q, seq_q, 0, seq_kv, 0
    row_kv = batch * seq_kv
    if num_sequences is not None:
        sequence, first, start, end, first_kv, size_kv = locate_tile(
            mask.offsets.q, mask.offsets.kv, tile, seq_q, seq_kv, num_sequences, BLOCK_Q
        )
        diagonal, row_kv = size_kv - end, first_kv
        padded = first_tile(first, sequence, ROW_PADDING).to(gl.int64) * ROW_PADDING - first
    rows = start + gl.arange(0, BLOCK_Q, gl.SliceLayout(1, LAYOUT))
    ids, ids_kv = 0, 0
    if mask.segments is not None:
        ids, ids_kv = mask.segments.q + batch * seq_q, mask.segments.kv + row_kv
    return Rows(
        batch, head, tile, start, end, first, first_kv, size_kv, diagonal, padded, rows,
        rows + diagonal, batch * seq_q, row_kv, ids, ids_kv,
    )  # fmt: skip


@gluon.jit
def own_keys(
    mask, seq_q, seq_kv, diagonal, num_sequences, heads_kv, together, BLOCK_KV: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the keys of a program; the first keys, which most queries see, come first."""
    num_tiles = count_sequence_tiles(seq_kv, num_sequences, BLOCK_KV)
    index, tile = longest_first(num_tiles, together)
    tile = num_tiles - 1 - tile
    head, batch = index % heads_kv, (index // heads_kv).to(gl.int64)
    first, start, end, first_q, size_q, padded = 0, tile * BLOCK_KV, seq_kv, 0, seq_q, 0
    row_q = batch * seq_q
    if num_sequences is not None:
        sequence, first, start, end, first_q, size_q = locate_tile(
            mask.offsets.kv, mask.offsets.q, tile, seq_kv, seq_q, num_sequences, BLOCK_KV
        )
        diagonal, row_q = end - size_q, first_q
        padded = first_tile(first_q, sequence, ROW_PADDING) * ROW_PADDING
    positions = start + gl.arange(0, BLOCK_KV, gl.SliceLayout(1, LAYOUT)) - diagonal
    ids, ids_q = 0, 0
    if mask.segments is not None:
        ids, ids_q = mask.segments.kv + batch * seq_kv, mask.segments.q + row_q
    return Rows(
        batch, head, tile, start, end, first, first_q, size_q, -diagonal, padded,
        positions + diagonal, positions, batch * seq_kv, row_q, ids, ids_q,
    )  # fmt: skip


class Tiles(NamedTuple):
    begin: Any
    before: Any
    full: Any
    after: Any


@gluon.jit
def tiles_of_keys(
    mask, queries, seq_q, seq_kv, num_sequences, left, right, BLOCK_KV: gl.constexpr
):  # fmt: skip
    return Tiles(*_seen_tiles(mask, queries, seq_q, seq_kv, num_sequences, left, right, BLOCK_KV))


@gluon.jit
def tiles_of_queries(
    mask, keys, seq_q, seq_kv, num_sequences, left, right, BLOCK_Q: gl.constexpr
):  # fmt: skip
    """Return the `Tiles` of queries that see a program's keys.

    If not all keys of the program's tile exist, every tile is masked: dq multiplies ds of missing
    keys by 0, so that it must be finite.
    """
    begin, before, full, after = _seen_tiles(
        mask, keys, seq_kv, seq_q, num_sequences, right, left, BLOCK_Q
    )
    if not is_list(begin):  # noqa: SIM102 (Triton evaluates both sides of an "and")
        if keys.start + keys.rows.shape[0] > keys.end:
            before, full, after = before + full + after, 0, 0
    return Tiles(begin, before, full, after)


@gluon.jit
def _seen_tiles(
    mask, rows, size, size_other, num_sequences, left, right, OTHER: gl.constexpr
):  # fmt: skip
    """Return the tiles that the mask shows; size, size_other: rows of both axes."""
    BLOCK: gl.constexpr = rows.rows.shape[0]
    if mask.tiles is not None:
        begin, before, full, after = listed_tiles(
            mask.tiles, rows.batch, rows.tile, size, size_other, num_sequences, BLOCK, OTHER
        )
    else:
        begin, before, full, after = visible_tiles(
            rows.start, rows.end, rows.size_other, rows.diagonal, left, right, BLOCK, OTHER
        )
    return begin, before, full, after


@gluon.jit
def fetch_own(tile, pointer, strides, mask, rows, SIZE: gl.constexpr, ASYNC: gl.constexpr):
    ids = None
    if mask.segments is not None:
        ids = rows.ids
    base = head_base(pointer, strides, rows.batch, rows.head)
    fetch_tile(tile, 0, base, rows.start, rows.end, strides.row, SIZE, True, ASYNC, ids)


@gluon.jit
def fetch_visited(
    tile, slot, base, STRIDE: gl.constexpr, mask, rows, start, SIZE: gl.constexpr,
    MASKED: gl.constexpr, ASYNC: gl.constexpr,
):  # fmt: skip
    ids = None
    if mask.segments is not None:
        ids = rows.ids_other
    fetch_tile(tile, slot, base, start, rows.size_other, STRIDE, SIZE, MASKED, ASYNC, ids)


@gluon.jit
def marks_of(mask, rows, OF_KEYS: gl.constexpr = False):
    if OF_KEYS:
        diagonal = -rows.diagonal - rows.first
        marks = mark_keys(
            mask, mask.q_ranges, rows.row_other, rows.row, rows.rows, rows.end, diagonal
        )
    else:
        marks = mark_queries(
            mask, mask.q_ranges, rows.row, rows.row_other, rows.rows, rows.end, rows.size_other
        )
    return marks


@gluon.jit
def pair_scores(
    s, mask, rows, marks, start, rule, left, right, MASKED: gl.constexpr,
    OF_KEYS: gl.constexpr = False,
):  # fmt: skip
    """Turn the products q·k of a tile into the input of the softmax.

    Args:
        s: the products; the own rows are rows.
        mask, rows, marks: `Mask`, `Rows`, and `marks_of` them.
        start: the first visited row.
        rule: `twin_attention.contract.spec.ScoreRule`.
        left, right: keys seen on each side of a position; None is unlimited.
        MASKED: the tile has hidden keys.
        OF_KEYS: the rows are keys.

    Returns:
        (s, dcap): the scores, and the derivative of the cap, or 1.
    """
    OTHER: gl.constexpr = s.shape[1]
    LAYOUT: gl.constexpr = s.type.layout
    others = start + gl.arange(0, OTHER, gl.SliceLayout(0, LAYOUT))
    own, other, size = rows.positions[:, None], others[None, :], rows.size_other
    end = size
    if OF_KEYS:
        end = rows.end + rows.diagonal
    limits = Limits(start, size, end, left, right)
    if mask.q_ranges is not None:
        end, left, right = None, None, None
    if OF_KEYS:
        s, dcap = visible_scores(s, other, own, end, rule, left, right, MASKED)
        if MASKED:
            of_queries = load_queries(mask, marks, start, size, OTHER, LAYOUT)
            s = hide_queries(s, mask, mask.q_ranges, marks, rows.positions, of_queries, limits)
    else:
        s, dcap = visible_scores(s, own, other, end, rule, left, right, MASKED)
        if MASKED:
            of_keys = load_keys(mask, marks, start, size, OTHER, LAYOUT)
            s = hide_keys(s, mask, mask.q_ranges, marks, rows.positions, of_keys, limits)
    return s, dcap


@gluon.jit
def store_own(pointer, x, rows, heads, SIZE: gl.constexpr):
    stride = heads * SIZE
    base = pointer + rows.batch * rows.end * stride + rows.head * SIZE
    store_rows(base, x, rows.start, rows.end, stride, SIZE)
