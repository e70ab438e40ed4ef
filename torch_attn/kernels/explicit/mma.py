"""Products of mma.sync, a chunk of columns at a time; accumulators are tuples of column pieces."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from torch_attn.kernels.explicit.cp_async import num_pieces, piece_start, piece_width
from torch_attn.kernels.explicit.registers import copy_layout

# Columns of an operand in registers: more would take the sums'.
CHUNK = gl.constexpr(16)


@triton.constexpr_function
def chunk(width):
    return min(width, CHUNK.value)


@triton.constexpr_function
def product_layout(num_warps, across=1):
    return gl.NVMMADistributedLayout([2, 0], [num_warps // across, across], [16, 8])


@gluon.jit
def load_left(tile, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    chunks = ()
    for i in gl.static_range(num_pieces(SIZE)):
        for j in gl.static_range(piece_width(SIZE, i) // chunk(piece_width(SIZE, i))):
            chunks = chunks + (_load_chunk(tile[i].index(0), j, 0, LAYOUT),)
    return chunks


@gluon.jit
def _load_chunk(buffer, INDEX: gl.constexpr, OPERAND: gl.constexpr, LAYOUT: gl.constexpr):
    """Load columns of a buffer as the left operand (0), or transposed as the right (1)."""
    STEP: gl.constexpr = chunk(buffer.shape[1])
    part = buffer.slice(INDEX * STEP, STEP, 1)
    if OPERAND == 1:
        part = part.permute((1, 0))
    return part.load(gl.DotOperandLayout(OPERAND, LAYOUT, 2))


@gluon.jit
def product_scores(a, b, slot, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a · bᵀ in chunks of columns; a: of `load_left`, or a buffer with one tile."""
    ROWS: gl.constexpr = a[0].shape[-2]
    COLUMNS: gl.constexpr = b[0].shape[1]
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    for i in gl.static_range(num_pieces(SIZE)):
        for j in gl.static_range(piece_width(SIZE, i) // chunk(piece_width(SIZE, i))):
            left = _left_chunk(a, i, j, SIZE, LAYOUT)
            acc = mma_v2(left, _load_chunk(b[i].index(slot), j, 1, LAYOUT), acc)
    return acc


@gluon.jit
def _left_chunk(
    a, PIECE: gl.constexpr, INDEX: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr
):
    if isinstance(a[0], gl.tensor):
        left = a[piece_start(SIZE, PIECE) // chunk(piece_width(SIZE, 0)) + INDEX]
    else:
        left = _load_chunk(a[PIECE].index(0), INDEX, 0, LAYOUT)
    return left


@gluon.jit
def zeros(ROWS: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    acc = ()
    for i in gl.static_range(num_pieces(SIZE)):
        acc = acc + (gl.zeros([ROWS, piece_width(SIZE, i)], gl.float32, LAYOUT),)
    return acc


@gluon.jit
def scale_rows(acc, factor):
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (acc[i] * factor[:, None],)
    return scaled


@gluon.jit
def add_product(acc, a, b, slot):
    """Return acc + a · b; a is in an accumulator's registers."""
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
    """Return acc + a · b; a is a buffer."""
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
