"""Tiles in shared memory: how they are laid out, fetched and multiplied.

A tile holds rows of one head. Its columns are cut into pieces (`column_pieces`), and each piece is
a buffer of its own, `COUNT` tiles deep. The 16-byte units of a row are permuted with the row's
number, so that cp.async writes and ldmatrix reads eight rows without a bank conflict.
"""

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from torch_attn.kernels.explicit.registers import copy_layout
from torch_attn.launch import Layout, stride_arguments
from twin_attention.targets import sm80

# Triton 3.9 has other names than 3.6, and keeps the old name of the copy only to raise.
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
commit = async_copy.commit_group
wait = async_copy.wait_group

# Columns of an operand that a thread holds at a time: more of them take registers from the sums.
CHUNK = gl.constexpr(16)


column_pieces = triton.constexpr_function(sm80.column_pieces)


@triton.constexpr_function
def num_pieces(size):
    """Return the number of pieces that `size` columns are cut into."""
    return len(column_pieces(size))


@triton.constexpr_function
def piece_width(size, index):
    """Return the columns of a piece."""
    return column_pieces(size)[index]


@triton.constexpr_function
def piece_start(size, index):
    """Return the first column of a piece: all before the last, which is the second at most."""
    return column_pieces(size)[0] * index


@triton.constexpr_function
def chunk(width):
    """Return how many columns of a piece are multiplied at a time."""
    return min(width, CHUNK.value)


@triton.constexpr_function
def padded_size(size):
    """Return the columns of all pieces together."""
    total = 0
    for width in column_pieces(size):
        total += width
    return total


@triton.constexpr_function
def product_layout(num_warps, across=1):
    """Return the layout of a sum of mma.sync products: `across` warps along columns."""
    return gl.NVMMADistributedLayout([2, 0], [num_warps // across, across], [16, 8])


@triton.constexpr_function
def copied_rows(rows, width, num_warps):
    """Return how many rows `copy_layout` has before it repeats."""
    return min(rows, num_warps * (256 // width))


@triton.constexpr_function
def parts_layout(width, num_warps):
    """Return `copy_layout` with its repetitions as another axis."""
    return gl.BlockedLayout([1, 1, 8], [1, 256 // width, width // 8], [1, num_warps, 1], [2, 1, 0])


@triton.constexpr_function
def shared_layout(width):
    """Return the layout of a piece of 16-bit elements in shared memory."""
    phases = min(8, width // 8)
    return gl.SwizzledSharedLayout(8, 8 // phases, phases, [1, 0])


@gluon.jit
def allocate_tile(DTYPE: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, SIZE: gl.constexpr):
    """Allocate COUNT tiles of ROWS rows of SIZE columns; returns the buffers of the pieces."""
    tile = ()
    for i in gl.static_range(num_pieces(SIZE)):
        tile = tile + (
            gl.allocate_shared_memory(
                DTYPE, [COUNT, ROWS, piece_width(SIZE, i)], shared_layout(piece_width(SIZE, i))
            ),
        )
    return tile


@gluon.jit
def fetch_tile(
    tile,
    slot,
    base,
    start,
    num_rows,
    STRIDE: gl.constexpr,
    SIZE: gl.constexpr,
    MASK_ROWS: gl.constexpr,
    ASYNC: gl.constexpr,
):
    """Copy rows of a [num_rows, SIZE] matrix, from `start` on, to a tile; the caller commits.

    Columns past SIZE become 0. MASK_ROWS: rows past `num_rows` become 0; otherwise all rows exist.
    ASYNC: rows are aligned to 16 bytes. Others pass through registers.
    """
    base += start.to(gl.int64) * STRIDE
    for i in gl.static_range(num_pieces(SIZE)):
        _fetch_piece(
            tile[i].index(slot), base, start, num_rows, STRIDE, piece_start(SIZE, i), SIZE,
            MASK_ROWS, ASYNC,
        )  # fmt: skip


@gluon.jit
def _fetch_piece(
    buffer,
    base,
    start,
    num_rows,
    STRIDE: gl.constexpr,
    FIRST: gl.constexpr,
    SIZE: gl.constexpr,
    MASK_ROWS: gl.constexpr,
    ASYNC: gl.constexpr,
):
    """Copy the columns from FIRST on that a buffer has room for."""
    ROWS: gl.constexpr = buffer.shape[0]
    WIDTH: gl.constexpr = buffer.shape[1]
    layout: gl.constexpr = copy_layout(WIDTH, gl.num_warps())
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    cols = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    exists = None
    if MASK_ROWS:
        exists = rows < num_rows - start
    if FIRST + WIDTH > SIZE:
        if exists is None:
            exists = cols < SIZE
        else:
            exists = exists & (cols < SIZE)
    pointers = _row_pointers(base + FIRST, STRIDE, ROWS, WIDTH, layout, ASYNC)
    if ASYNC:
        copy_async(buffer, pointers, exists)
    elif exists is None:
        buffer.store(gl.load(pointers))
    else:
        buffer.store(gl.load(pointers, exists, 0.0))


@gluon.jit
def _row_pointers(
    base,
    STRIDE: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr,
    ALIGNED: gl.constexpr,
):
    """Return the addresses of rows of WIDTH columns.

    A thread's rows are at constant distances, which the compiler sees if they are added last: its
    addresses are one register and constants, where it would compute each of them in each step.
    """
    PART: gl.constexpr = copied_rows(ROWS, WIDTH, gl.num_warps())
    layout: gl.constexpr = parts_layout(WIDTH, gl.num_warps())
    of_part: gl.constexpr = gl.SliceLayout(0, layout)
    rows = gl.arange(0, PART, gl.SliceLayout(1, of_part))[:, None]
    cols = gl.arange(0, WIDTH, gl.SliceLayout(0, of_part))[None, :]
    parts = gl.arange(0, ROWS // PART, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    distance = gl.expand_dims(gl.expand_dims(parts.to(gl.int64) * (PART * STRIDE), 1), 2)
    if STRIDE * PART >= 2**31:
        rows = rows.to(gl.int64)
    pointers = base + (gl.expand_dims((rows * STRIDE + cols).to(gl.int64), 0) + distance)
    pointers = gl.convert_layout(gl.reshape(pointers, [ROWS, WIDTH]), LAYOUT, assert_trivial=True)
    if ALIGNED:
        pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, 16]), [1, 8])
    return pointers


@gluon.jit
def load_left(tile, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the first tile of a buffer as left operands, chunk by chunk."""
    chunks = ()
    for i in gl.static_range(num_pieces(SIZE)):
        for j in gl.static_range(piece_width(SIZE, i) // chunk(piece_width(SIZE, i))):
            chunks = chunks + (_load_chunk(tile[i].index(0), j, 0, LAYOUT),)
    return chunks


@gluon.jit
def _load_chunk(buffer, INDEX: gl.constexpr, OPERAND: gl.constexpr, LAYOUT: gl.constexpr):
    """Load some columns of a buffer as left operand 0, or transposed as right operand 1."""
    STEP: gl.constexpr = chunk(buffer.shape[1])
    part = buffer.slice(INDEX * STEP, STEP, 1)
    if OPERAND == 1:
        part = part.permute((1, 0))
    return part.load(gl.DotOperandLayout(OPERAND, LAYOUT, 2))


@gluon.jit
def product_scores(a, b, slot, acc, SIZE: gl.constexpr):
    """Compute acc + a · bᵀ over SIZE columns, a chunk of them at a time.

    a is what `load_left` returns, or a buffer with one tile; b is a buffer of tiles.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    for i in gl.static_range(num_pieces(SIZE)):
        for j in gl.static_range(piece_width(SIZE, i) // chunk(piece_width(SIZE, i))):
            left = _left_chunk(a, i, j, SIZE, LAYOUT)
            acc = mma_v2(left, _load_chunk(b[i].index(slot), j, 1, LAYOUT), acc)
    return acc


@gluon.jit
def _left_chunk(
    a, PIECE: gl.constexpr, INDEX: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return a left operand from registers or shared memory."""
    if isinstance(a[0], gl.tensor):
        left = a[piece_start(SIZE, PIECE) // chunk(piece_width(SIZE, 0)) + INDEX]
    else:
        left = _load_chunk(a[PIECE].index(0), INDEX, 0, LAYOUT)
    return left


@gluon.jit
def zeros(ROWS: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a sum of products, ROWS by SIZE, piece by piece."""
    acc = ()
    for i in gl.static_range(num_pieces(SIZE)):
        acc = acc + (gl.zeros([ROWS, piece_width(SIZE, i)], gl.float32, LAYOUT),)
    return acc


@gluon.jit
def scale_rows(acc, factor):
    """Multiply the rows of a sum of products."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (acc[i] * factor[:, None],)
    return scaled


@gluon.jit
def add_product(acc, a, b, slot):
    """Compute acc + a · b. a has the layout of a sum of products, b is a buffer of tiles."""
    result = ()
    for i in gl.static_range(len(acc)):
        result = result + (_multiply_piece(acc[i], a, b[i].index(slot)),)
    return result


@gluon.jit
def _multiply_piece(acc, a, buffer):
    LAYOUT: gl.constexpr = acc.type.layout
    left = gl.convert_layout(a, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)
    return mma_v2(left, buffer.load(gl.DotOperandLayout(1, LAYOUT, 2)), acc)


@gluon.jit
def add_product_shared(acc, a, b, slot):
    """Compute acc + a · b, a chunk of rows of b at a time. a is a buffer, b a buffer of tiles."""
    for j in gl.static_range(a.shape[1] // chunk(a.shape[1])):
        acc = _multiply_chunk(acc, a, b, slot, j)
    return acc


@gluon.jit
def _multiply_chunk(acc, a, b, slot, INDEX: gl.constexpr):
    STEP: gl.constexpr = chunk(a.shape[1])
    LAYOUT: gl.constexpr = acc[0].type.layout
    left = a.slice(INDEX * STEP, STEP, 1).load(gl.DotOperandLayout(0, LAYOUT, 2))
    result = ()
    for i in gl.static_range(len(acc)):
        right = b[i].index(slot).slice(INDEX * STEP, STEP, 0)
        right = right.load(gl.DotOperandLayout(1, LAYOUT, 2))
        result = result + (mma_v2(left, right, acc[i]),)
    return result


@gluon.jit
def store_rows(base, x, start, num_rows, stride, SIZE: gl.constexpr):
    """Store a sum of products as rows, none past `num_rows`, and no column past SIZE."""
    for i in gl.static_range(len(x)):
        _store_piece(base, x[i], start, num_rows, stride, piece_start(SIZE, i), SIZE)


@gluon.jit
def _store_piece(base, x, start, num_rows, stride, FIRST: gl.constexpr, SIZE: gl.constexpr):
    layout: gl.constexpr = copy_layout(x.shape[1], gl.num_warps())
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))[:, None]
    cols = FIRST + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
    pointers = base + (start + rows).to(gl.int64) * stride + cols
    x = gl.convert_layout(x.to(base.dtype.element_ty), layout)
    gl.store(pointers, x, (rows < num_rows - start) & (cols < SIZE))


def copy_arguments(**layouts: Layout) -> dict[str, Any]:
    """Return the arguments that describe the operands which `fetch_tile` copies."""
    arguments = stride_arguments(**layouts)
    aligned = all(layout.is_aligned for layout in layouts.values())
    return arguments | {"ASYNC": aligned and arguments["ALIGN"] % 8 == 0}
