"""The warp that clears the sums of dq, and makes dq of them, while others multiply.

A backward that adds dq in memory would need a pass over all sums before it and one behind it, and
both are as long as memory takes for them. Here they are done by heads, section by section, beside
the products of other sections: nothing waits for memory but the first section and the last.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from torch_attn.kernels.explicit.barriers import allocate_barriers, meet_in_warp
from torch_attn.kernels.explicit.reports import await_reports, report
from torch_attn.kernels.explicit.sections import PIECE, heads_of_section
from torch_attn.kernels.explicit.sequences import locate_tile
from torch_attn.kernels.explicit.tma import (
    allocate_tile,
    load_box,
    map_of,
    reinterpret,
    store_box,
)
from torch_attn.kernels.library.tiles import ROW_PADDING
from torch_attn.kernels.sm90.queries import head_of_item
from torch_attn.kernels.sm90.sums import BOX, box_of_sums_layout, sum_columns
from torch_attn.layouts import Layout
from torch_attn.tensor_maps import TensorMap

# Rows and columns of dq in a box of sums, and how these lie in it.
ROWS = gl.constexpr(64)
COLUMNS = gl.constexpr(16)
LINES, LINE = map(gl.constexpr, BOX.value)
# Boxes of sums in shared memory: the one that is converted, and those that are loaded meanwhile.
STAGES = gl.constexpr(3)


class Staging(NamedTuple):
    """Hold the shared memory of the warp.

    Attributes:
        sums, full: boxes of sums, and barriers at which they arrive.
        dq: two boxes of dq.
    """

    sums: Any
    full: Any
    dq: Any


@gluon.jit
def allocate_staging(DTYPE: gl.constexpr):
    """Allocate the `Staging`."""
    sums = gl.allocate_shared_memory(gl.float32, [STAGES, LINES, LINE], box_of_sums_layout())
    return Staging(sums, allocate_barriers(STAGES), allocate_tile(DTYPE, 2, ROWS, COLUMNS)[0])


@gluon.jit
def convert_sums(
    staging, sums, sections, problem, scale, MEMBERS: gl.constexpr, HEAD_DIM: gl.constexpr
):
    """Clear pieces of the sums of dq, and make dq of others, one after the other.

    Programs take pieces from a counter: those of the first sections to be cleared, then of the next
    section, then of the first one to be converted, when all of it is added, and so on. A piece
    waits for work that was taken before it alone, so that programs may be as few as they like.

    sums: descriptors of the sums of dq and of dq, and dq's pointer if sequences are packed: the
        last rows of one share a box with the next one's.
    """
    BOXES: gl.constexpr = sum_columns(HEAD_DIM) // COLUMNS  # of a tile of rows
    step = 0  # over all boxes that are converted
    pieces = sections.size * sections.pieces * MEMBERS
    total = (sections.ahead + 2 * sections.count) * pieces
    taken = gl.atomic_add(sections.taken_ptr, 1, sem="relaxed")
    while taken < total:
        turn, part = taken // pieces - sections.ahead, taken % pieces
        converts = (turn >= 0) & (turn % 2 != 0)
        section = gl.where(converts, turn // 2, turn // 2 + sections.ahead)
        section = gl.where(turn < 0, turn + sections.ahead, section)
        index = section * sections.size + part // (sections.pieces * MEMBERS)
        if index < sections.heads:
            batch, head = head_of_item(index, problem, sections.items, MEMBERS)
            head += part // sections.pieces % MEMBERS
            tile = part % sections.pieces * (PIECE // ROWS)
            count = gl.minimum(PIECE // ROWS, sections.tiles - tile) * BOXES
            first = ((batch * problem.heads_q + head) * sections.tiles + tile) * BOXES
            if converts:
                items = heads_of_section(sections, section) * sections.items
                await_reports(sections.added_ptr + section, items)
                _convert_piece(
                    staging, sums, batch, head, tile, first, count, step, problem, scale, HEAD_DIM
                )
                step += count
            else:
                _clear(staging.sums.index(0), sums.dq, first, count)
                report(sections.cleared_ptr + section)
        taken = gl.atomic_add(sections.taken_ptr, 1, sem="relaxed")
    tma.store_wait(0)


@gluon.jit
def _clear(zeros, dq_sum, first, count):
    """Start to set boxes of sums to 0, from a place in shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
    zeros.store(gl.zeros([LINES, LINE], gl.float32, layout))
    fence_async_shared()
    meet_in_warp()
    for i in range(count):
        store_box(dq_sum, [(first + i) * LINES, 0], zeros)


@gluon.jit
def _convert_piece(
    staging, sums, batch, head, tile, first, count, step, problem, scale, HEAD_DIM: gl.constexpr
):
    """Make dq of a piece's boxes of sums.

    tile: the first of the head's tiles of rows.
    first, count: the boxes.
    """
    BOXES: gl.constexpr = sum_columns(HEAD_DIM) // COLUMNS
    for i in range(gl.minimum(count, STAGES - 1)):
        _load(staging, sums.dq, first + i, step + i)
    row, end = tile * ROWS, problem.size_other
    for i in range(count):
        if i + STAGES - 1 < count:
            _load(staging, sums.dq, first + i + STAGES - 1, step + i + STAGES - 1)
        if i % BOXES == 0:
            row, end = _rows_of_tile(tile + i // BOXES, problem)
        column = i % BOXES * COLUMNS
        _convert_box(
            staging, sums, batch, head, row, end, column, step + i, problem, scale, HEAD_DIM
        )


@gluon.jit
def _convert_box(
    staging, sums, batch, head, row, end, column, step, problem, scale, HEAD_DIM: gl.constexpr
):
    """Scale, round and store a box, whose first row and column are given.

    end: the first row behind the head's or sequence's.
    """
    IS_PACKED: gl.constexpr = sums.made_rows is not None
    slot = step % STAGES
    box, rounded = staging.sums.index(slot), staging.dq.index(step & 1)
    mbarrier.wait(staging.full.index(slot), step // STAGES & 1)
    # The box before the last one is stored. Of packed sequences not all are stored from there.
    tma.store_wait(0 if IS_PACKED else 1)
    is_whole = True
    if IS_PACKED:
        is_whole = end - row >= ROWS
    for j in gl.static_range(ROWS // 16):
        x = (_sixteen_rows(box, j) * scale).to(staging.dq.dtype)
        rounded.reshape([ROWS, COLUMNS]).slice(16 * j, 16, dim=0).store(x)
        if IS_PACKED:
            first = row + 16 * j
            _store_rows(x, sums.made_rows, first, end, head, column, is_whole, problem, HEAD_DIM)
    fence_async_shared()
    meet_in_warp()
    if is_whole:
        store_box(sums.made, [batch, head, row, column], rounded)


@gluon.jit
def _load(staging, dq_sum, box, step):
    """Start to load a box of sums."""
    slot = step % STAGES
    full = staging.full.index(slot)
    mbarrier.expect(full, 4 * LINES * LINE)
    load_box(dq_sum, [box * LINES, 0], full, staging.sums.index(slot))


@gluon.jit
def _rows_of_tile(tile, problem):
    """Return the first row of a tile, and the end of its head's or sequence's."""
    first, end = tile * ROWS, problem.size_other
    if problem.num_sequences is not None:
        _sequence, _first, start, end, _first_other, _size_other = locate_tile(
            problem.offsets_other, problem.offsets_other, first // ROW_PADDING, problem.size_other,
            problem.size_other, problem.num_sequences, ROW_PADDING,
        )  # fmt: skip
        first = start + first % ROW_PADDING
    return first, end


@gluon.jit
def _sixteen_rows(box, INDEX: gl.constexpr):
    """Read 16 rows of a box of sums, which lie there as `sums.write_dq` orders them."""
    lines = reinterpret(box, gl.float32, [2, 512], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    layout: gl.constexpr = gl.BlockedLayout([2, 4], [1, 32], [1, 1], [1, 0])
    x = gl.reshape(lines.slice(128 * INDEX, 128, dim=1).load(layout), [2, 8, 4, 2, 2])
    return gl.reshape(gl.permute(x, [3, 1, 0, 2, 4]), [16, COLUMNS])


@gluon.jit
def _store_rows(
    x, dq_ptr, first, end, head, first_column, is_whole, problem, HEAD_DIM: gl.constexpr
):
    """Store what exists of 16 rows of packed sequences, unless TMA stores the whole box."""
    if not is_whole:
        row = first + gl.arange(0, 16, gl.SliceLayout(1, x.type.layout))
        column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, x.type.layout))
        offset = (row.to(gl.int64) * problem.heads_q + head) * HEAD_DIM
        exists = (row < end)[:, None] & (column < HEAD_DIM)[None, :]
        gl.store(dq_ptr + offset[:, None] + column[None, :], x, exists)


def map_converted(layout: Layout) -> TensorMap:
    """Return the descriptor of dq."""
    return map_of(layout, ROWS.value, COLUMNS.value)
