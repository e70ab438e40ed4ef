"""The rows' statistics of `kernels.preprocess`, prepared by one warp beside products.

TMA loads a piece of rows at a time to shared memory.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_attn.kernels.explicit.barriers import meet_in_warp
from torch_attn.kernels.explicit.sections import PIECE
from torch_attn.kernels.explicit.sequences import locate_tile
from torch_attn.kernels.explicit.tma import box_layout, load_box, map_of, reinterpret
from torch_attn.kernels.library.softmax import LOG2E
from torch_attn.kernels.library.tiles import ROW_PADDING, padded_head_dim
from torch_attn.layouts import Layout
from torch_attn.tensor_maps import TensorMap

# The most elements in a box of out or dout.
BOX_SIZE = gl.constexpr(1024)


class Piece(NamedTuple):
    """The rows of a piece, over all heads; end_of_queries: without packed sequences' padding."""

    batch: Any
    head: Any
    index: Any
    first: Any
    end: Any
    end_of_queries: Any


@triton.constexpr_function
def _box_columns(size):
    return min(64, padded_head_dim(size))


@triton.constexpr_function
def _box_rows(width):
    return min(32, BOX_SIZE.value // width)


@triton.constexpr_function
def _boxes(width):
    return 2 * BOX_SIZE.value // (_box_rows(width) * width)


@triton.constexpr_function
def _box_layout(height):
    return gl.BlockedLayout([1, 8], [height, 32 // height], [1, 1], [1, 0])


@triton.constexpr_function
def _swizzled_layout(width):
    """Return a variant of `box_layout` whose columns can be sliced."""
    return gl.SwizzledSharedLayout(8, 64 // width, width // 8, [1, 0])


@gluon.jit
def locate_piece(batch, head, index, pieces, problem):
    gl.static_assert(PIECE == ROW_PADDING)
    first, end, end_of_queries = index * PIECE, problem.size_other, problem.size_other
    if problem.num_sequences is not None:
        # With the queries as the other axis as well, the sequence of padding is empty.
        _sequence, _first, first, end, first_other, size_other = locate_tile(
            problem.offsets_other, problem.offsets_other, index, problem.size_other,
            problem.size_other, problem.num_sequences, PIECE,
        )  # fmt: skip
        end_of_queries = first_other + size_other
    index += (batch * problem.heads_q + head) * pieces
    return Piece(batch, head, index, first, end, end_of_queries)


@gluon.jit
def prepare_rows(staging, passes, piece, step, problem, SIZE: gl.constexpr):
    """Store lse2 and delta of a piece; return how many boxes of out and dout it loads."""
    WIDTH: gl.constexpr = _box_columns(SIZE)
    HEIGHT: gl.constexpr = _box_rows(WIDTH)
    ACROSS: gl.constexpr = padded_head_dim(SIZE) // WIDTH  # boxes, which are loaded ahead
    AHEAD: gl.constexpr = (staging.sums.shape[0] - 1) // ACROSS
    PARTS: gl.constexpr = PIECE // HEIGHT
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    parts = reinterpret(staging.delta, gl.float32, [PARTS, HEIGHT], flat)
    for i in range(PARTS + AHEAD):
        if i == AHEAD:
            _store_lse2(passes.statistics, piece, problem)
        delta = gl.zeros([HEIGHT], gl.float32, gl.SliceLayout(1, _box_layout(HEIGHT)))
        for j in gl.static_range(ACROSS):
            if i < PARTS:
                row = piece.first + i * HEIGHT
                _load_rows(staging, passes, piece, row, j * WIDTH, step + i * ACROSS + j, WIDTH)
            if i >= AHEAD:
                delta = _multiply_rows(staging, delta, step + (i - AHEAD) * ACROSS + j, WIDTH)
        if i >= AHEAD:
            parts.index(i - AHEAD).store(delta)
    _store_delta(staging, passes.statistics, piece, problem)
    return PARTS * ACROSS


@gluon.jit
def _load_rows(staging, passes, piece, row, column, step, WIDTH: gl.constexpr):
    slot = step % staging.sums.shape[0]
    full = staging.full.index(slot)
    mbarrier.expect(full, 2 * 2 * _box_rows(WIDTH) * WIDTH)
    shape: gl.constexpr = [_boxes(WIDTH), 1, 1, _box_rows(WIDTH), WIDTH]
    boxes = reinterpret(staging.sums.index(slot), staging.dq.dtype, shape, box_layout(WIDTH))
    load_box(passes.out, [piece.batch, piece.head, row, column], full, boxes.index(0))
    load_box(passes.dout, [piece.batch, piece.head, row, column], full, boxes.index(1))


@gluon.jit
def _multiply_rows(staging, delta, step, WIDTH: gl.constexpr):
    """Add the sums of ``dout ∘ out`` over the columns of a step's boxes."""
    STAGES: gl.constexpr = staging.sums.shape[0]
    HEIGHT: gl.constexpr = _box_rows(WIDTH)
    COLUMNS: gl.constexpr = 8 * (32 // HEIGHT)  # a thread has eight at a time
    slot = step % STAGES
    boxes = reinterpret(
        staging.sums.index(slot), staging.dq.dtype, [_boxes(WIDTH) * HEIGHT, WIDTH],
        _swizzled_layout(WIDTH),
    )  # fmt: skip
    mbarrier.wait(staging.full.index(slot), step // STAGES & 1)
    out, dout = boxes.slice(0, HEIGHT, 0), boxes.slice(HEIGHT, HEIGHT, 0)
    for i in gl.static_range(WIDTH // COLUMNS):
        x = out.slice(i * COLUMNS, COLUMNS, 1).load(_box_layout(HEIGHT)).to(gl.float32)
        y = dout.slice(i * COLUMNS, COLUMNS, 1).load(_box_layout(HEIGHT)).to(gl.float32)
        delta += gl.sum(x * y, 1)
    # TMA writes there next.
    meet_in_warp()
    return delta


@gluon.jit
def _store_lse2(statistics, piece, problem):
    rows, _exists, lse = _load_lse(statistics, piece, problem)
    lse2 = gl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    gl.store(statistics.lse2 + piece.index.to(gl.int64) * PIECE + rows, lse2)


@gluon.jit
def _store_delta(staging, statistics, piece, problem):
    """Store delta: 0 in missing rows; dout is 0 in padding, dlse in rows without a key."""
    rows = gl.arange(0, PIECE, _rows_layout())
    delta = staging.delta.load(_rows_layout())
    delta = gl.where(rows < piece.end_of_queries - piece.first, delta, 0.0)
    if statistics.dlse is not None:
        rows, exists, lse = _load_lse(statistics, piece, problem)
        first = _first_row(piece, problem)
        dlse = gl.load(statistics.dlse + first + rows, exists & (lse != float("-inf")), other=0.0)
        delta -= dlse
    gl.store(statistics.delta + piece.index.to(gl.int64) * PIECE + rows, delta)


@gluon.jit
def _load_lse(statistics, piece, problem):
    rows = gl.arange(0, PIECE, _rows_layout())
    exists = rows < piece.end - piece.first
    lse = gl.load(statistics.lse + _first_row(piece, problem) + rows, exists, other=float("inf"))
    return rows, exists, lse


@gluon.jit
def _first_row(piece, problem):
    head = (piece.batch * problem.heads_q + piece.head).to(gl.int64)
    return head * problem.size_other + piece.first


@triton.constexpr_function
def _rows_layout():
    return gl.BlockedLayout([PIECE.value // 32], [32], [1], [0])


def map_rows(layout: Layout) -> TensorMap:
    width = _box_columns(layout.shape[-1])
    return map_of(layout, _box_rows(width), width)
