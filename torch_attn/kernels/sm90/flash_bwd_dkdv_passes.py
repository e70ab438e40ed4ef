"""The warp that clears dq's sums, prepares rows, and converts sums to dq, beside products.

Passes before and after a backward would be bound by memory. This warp does them by sections, beside
the products of others: only the first and the last section wait for memory.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from torch_attn.kernels.explicit.barriers import allocate_barriers, meet_in_warp
from torch_attn.kernels.explicit.reports import await_reports, report, report_read
from torch_attn.kernels.explicit.sections import PIECE, await_place, heads_of_section, place_of_head
from torch_attn.kernels.explicit.tma import allocate_tile, load_box, map_of, reinterpret, store_box
from torch_attn.kernels.sm90.flash_bwd_dkdv_rows import locate_piece, prepare_rows
from torch_attn.kernels.sm90.queries import head_of_item
from torch_attn.kernels.sm90.sums import BOX, box_of_sums_layout, sum_columns
from torch_attn.layouts import Layout
from torch_attn.tensor_maps import TensorMap

# Rows and columns of dq in a box of sums, and their order in it.
ROWS = gl.constexpr(64)
COLUMNS = gl.constexpr(16)
LINES, LINE = map(gl.constexpr, BOX.value)
# In shared memory: one is converted while the others are loaded.
STAGES = gl.constexpr(3)


class Staging(NamedTuple):
    """Shared memory: stages of boxes of sums, two boxes of dq, and a piece's delta."""

    sums: Any
    full: Any
    dq: Any
    delta: Any


@gluon.jit
def allocate_staging(DTYPE: gl.constexpr):
    sums = gl.allocate_shared_memory(gl.float32, [STAGES, LINES, LINE], box_of_sums_layout())
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    delta = gl.allocate_shared_memory(gl.float32, [PIECE], flat)
    dq = allocate_tile(DTYPE, 2, ROWS, COLUMNS)[0]
    return Staging(sums, allocate_barriers(STAGES), dq, delta)


@gluon.jit
def run_passes(
    staging, dq_sum, passes, sections, problem, scale, MEMBERS: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Begin pieces of rows and of dq's sums, and convert others to dq, one after the other.

    To begin a piece is to clear its sums, and to prepare its rows if `passes` has them. Programs
    take pieces from a counter: of the first sections to begin, then of the next section, then of
    the first section to be converted, once it is added, and so on. A piece waits only for work that
    was taken before it, so any number of programs will do.

    `passes` includes dq's pointer if sequences are packed: the last rows of one share a box with
    the next one's.
    """
    step = 0  # counted over all boxes that are staged
    pieces = sections.size * sections.pieces * MEMBERS
    total = (sections.ahead + 2 * sections.count) * pieces
    taken = gl.atomic_add(sections.taken_ptr, 1, sem="relaxed")
    while taken < total:
        following = gl.atomic_add(sections.taken_ptr, 1, sem="relaxed")
        turn, part = taken // pieces - sections.ahead, taken % pieces
        converts = (turn >= 0) & (turn % 2 != 0)
        section = gl.where(converts, turn // 2, turn // 2 + sections.ahead)
        section = gl.where(turn < 0, turn + sections.ahead, section)
        index = section * sections.size + part // (sections.pieces * MEMBERS)
        if index < sections.heads:
            batch, head = head_of_item(index, problem, sections.items, MEMBERS)
            member, part = part // sections.pieces % MEMBERS, part % sections.pieces
            piece = locate_piece(batch, head + member, part, sections.pieces, problem)
            place = place_of_head(sections, index) * MEMBERS + member
            box = (place * sections.pieces + part) * _boxes_of_piece(HEAD_DIM)
            if converts:
                items = heads_of_section(sections, section) * sections.items
                await_reports(sections.added_ptr + section, items)
                step += _convert(
                    staging, dq_sum, box, passes, piece, step, problem, scale, HEAD_DIM
                )
                if sections.places < sections.count:
                    report_read(sections.converted_ptr + section)
            else:
                await_place(sections, section, MEMBERS)
                _clear(staging, dq_sum, box, HEAD_DIM)
                if passes.out is not None:
                    step += prepare_rows(staging, passes, piece, step, problem, HEAD_DIM_V)
                report(sections.begun_ptr + section)
        taken = following
    tma.store_wait(0)


@triton.constexpr_function
def _boxes_of_piece(head_dim):
    return PIECE.value // ROWS.value * (sum_columns(head_dim) // COLUMNS.value)


@gluon.jit
def _clear(staging, dq_sum, first, HEAD_DIM: gl.constexpr):
    """Start to set sums to 0 from dq's shared memory; `first`: the piece's first box."""
    BOXES: gl.constexpr = _boxes_of_piece(HEAD_DIM)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
    zeros = reinterpret(staging.dq, gl.float32, [LINES, LINE], box_of_sums_layout())
    tma.store_wait(0)
    zeros.store(gl.zeros([LINES, LINE], gl.float32, layout))
    fence_async_shared()
    meet_in_warp()
    for i in range(BOXES):
        store_box(dq_sum, [(first + i) * LINES, 0], zeros)


@gluon.jit
def _convert(staging, dq_sum, first, passes, piece, step, problem, scale, HEAD_DIM: gl.constexpr):
    """Convert a piece's sums to dq; return how many boxes these are."""
    BOXES: gl.constexpr = _boxes_of_piece(HEAD_DIM)
    ACROSS: gl.constexpr = sum_columns(HEAD_DIM) // COLUMNS
    AHEAD: gl.constexpr = STAGES - 1
    for i in gl.static_range(AHEAD):
        _load(staging, dq_sum, first + i, step + i)
    for i in range(BOXES):
        if i + AHEAD < BOXES:
            _load(staging, dq_sum, first + i + AHEAD, step + i + AHEAD)
        row, column = piece.first + i // ACROSS * ROWS, i % ACROSS * COLUMNS
        _convert_box(staging, passes, piece, row, column, step + i, problem, scale, HEAD_DIM)
    return BOXES


@gluon.jit
def _convert_box(staging, passes, piece, row, column, step, problem, scale, HEAD_DIM: gl.constexpr):
    IS_PACKED: gl.constexpr = passes.dq_rows is not None
    slot = step % STAGES
    box, rounded = staging.sums.index(slot), staging.dq.index(step & 1)
    mbarrier.wait(staging.full.index(slot), step // STAGES & 1)
    # Wait until the box before the previous one is stored. Packed: some are not stored by TMA.
    tma.store_wait(0 if IS_PACKED else 1)
    is_whole = True
    if IS_PACKED:
        is_whole = piece.end - row >= ROWS
    for j in gl.static_range(ROWS // 16):
        x = (_sixteen_rows(box, j) * scale).to(staging.dq.dtype)
        rounded.reshape([ROWS, COLUMNS]).slice(16 * j, 16, dim=0).store(x)
        if IS_PACKED:
            first = row + 16 * j
            _store_rows(x, passes.dq_rows, piece, first, column, is_whole, problem, HEAD_DIM)
    fence_async_shared()
    meet_in_warp()
    if is_whole:
        store_box(passes.dq, [piece.batch, piece.head, row, column], rounded)


@gluon.jit
def _load(staging, dq_sum, box, step):
    slot = step % STAGES
    full = staging.full.index(slot)
    mbarrier.expect(full, 4 * LINES * LINE)
    load_box(dq_sum, [box * LINES, 0], full, staging.sums.index(slot))


@gluon.jit
def _sixteen_rows(box, INDEX: gl.constexpr):
    """Read 16 rows of a box, in the order of `sums.write_dq`."""
    lines = reinterpret(box, gl.float32, [2, 512], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    layout: gl.constexpr = gl.BlockedLayout([2, 4], [1, 32], [1, 1], [1, 0])
    x = gl.reshape(lines.slice(128 * INDEX, 128, dim=1).load(layout), [2, 8, 4, 2, 2])
    return gl.reshape(gl.permute(x, [3, 1, 0, 2, 4]), [16, COLUMNS])


@gluon.jit
def _store_rows(x, dq_ptr, piece, first, first_column, is_whole, problem, HEAD_DIM: gl.constexpr):
    """Store those of 16 rows of packed sequences that exist, unless TMA stores the whole box."""
    if not is_whole:
        row = first + gl.arange(0, 16, gl.SliceLayout(1, x.type.layout))
        column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, x.type.layout))
        offset = (row.to(gl.int64) * problem.heads_q + piece.head) * HEAD_DIM
        exists = (row < piece.end)[:, None] & (column < HEAD_DIM)[None, :]
        gl.store(dq_ptr + offset[:, None] + column[None, :], x, exists)


def map_converted(layout: Layout) -> TensorMap:
    return map_of(layout, ROWS.value, COLUMNS.value)
