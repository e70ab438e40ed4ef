"""Products of wgmma, whose operands are tiles of `tma` or registers.

Accumulators are tuples of column pieces. Products are only started. A wait leaves PENDING later
ones running; it returns the accumulator, and operands that were read from registers until then.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from torch_attn.kernels.explicit.tma import num_pieces, piece, piece_start, piece_width
from twin_attention.targets import ptx

# PTX by how many numbers of a piece a thread has; the vote, for a thread's two rows.
_RESCALE = gl.constexpr({n: ptx.rescale(n) for n in (8, 16, 32, 64, 128)})
_RESCALE_CONSTRAINTS = gl.constexpr({n: ptx.rescale_constraints(n) for n in (8, 16, 32, 64, 128)})
_ANY_OF_WARP = gl.constexpr(ptx.any_of_warp(2))
_ANY_OF_WARP_CONSTRAINTS = gl.constexpr(ptx.any_of_warp_constraints(2))


@triton.constexpr_function
def product_layout(width):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.jit
def product_scores(a, a_slot, b, b_slot, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    ROWS: gl.constexpr = a[0].shape[3]
    COLUMNS: gl.constexpr = b[0].shape[3]
    s = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    return add_scores(s, a, a_slot, b, b_slot, SIZE, False)


@gluon.jit
def add_scores(s, a, a_slot, b, b_slot, SIZE: gl.constexpr, ADDS: gl.constexpr = True):
    """Start s + a · bᵀ; without ADDS, a · bᵀ."""
    for i in gl.static_range(num_pieces(SIZE)):
        right = piece(b[i], b_slot).permute((1, 0))
        s = warpgroup_mma(piece(a[i], a_slot), right, s, use_acc=ADDS or i > 0, is_async=True)
    return s


@gluon.jit
def load_left(tile, slot, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    left = ()
    for i in gl.static_range(num_pieces(SIZE)):
        left = left + (piece(tile[i], slot).load(gl.DotOperandLayout(0, LAYOUT, 2)),)
    return left


@gluon.jit
def left_scores(a, b, b_slot, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    COLUMNS: gl.constexpr = b[0].shape[3]
    s = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
    for i in gl.static_range(num_pieces(SIZE)):
        right = piece(b[i], b_slot).permute((1, 0))
        s = warpgroup_mma(a[i], right, s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def zeros(ROWS: gl.constexpr, SIZE: gl.constexpr):
    acc = ()
    for i in gl.static_range(num_pieces(SIZE)):
        acc = acc + (_zeros_piece(ROWS, piece_width(SIZE, i)),)
    return acc


@gluon.jit
def _zeros_piece(ROWS: gl.constexpr, WIDTH: gl.constexpr):
    return gl.zeros([ROWS, WIDTH], gl.float32, product_layout(WIDTH))


@gluon.jit
def add_product(acc, a, b, slot):
    """Start acc + a · b; a is in registers."""
    result = ()
    for i in gl.static_range(len(acc)):
        result = result + (_add_piece(acc[i], a, b[i], slot),)
    return result


@gluon.jit
def _add_piece(acc, a, b, slot):
    layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(b.shape[4]), 2)
    left = gl.convert_layout(a, layout, assert_trivial=True)
    return warpgroup_mma(left, piece(b, slot), acc, is_async=True)


@gluon.jit
def wait_product(acc, a, PENDING: gl.constexpr = 0):
    done = warpgroup_mma_wait(PENDING, deps=acc + (a,))
    sums = ()
    for i in gl.static_range(len(acc)):
        sums = sums + (done[i],)
    return sums, done[len(acc)]


@gluon.jit
def wait_sums(acc, PENDING: gl.constexpr):
    sums = ()
    if len(acc) == 1:
        sums = (warpgroup_mma_wait(PENDING, deps=acc),)
    elif len(acc) > 1:
        sums = warpgroup_mma_wait(PENDING, deps=acc)
    return sums


@gluon.jit
def wait_products(acc, a, b, PENDING: gl.constexpr):
    done = warpgroup_mma_wait(PENDING, deps=acc + (a, b))
    sums = ()
    for i in gl.static_range(len(acc)):
        sums = sums + (done[i],)
    return sums, done[len(acc)], done[len(acc) + 1]


@gluon.jit
def add_shared(acc, a, b, slot):
    """Start acc + a · b; a is in shared memory."""
    result = ()
    for i in gl.static_range(len(acc)):
        result = result + (warpgroup_mma(a, piece(b[i], slot), acc[i], is_async=True),)
    return result


@gluon.jit
def scale_rows(acc, factor):
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (_scale_piece(acc[i], factor),)
    return scaled


@gluon.jit
def _scale_piece(x, factor):
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.convert_layout(factor, layout, assert_trivial=True)[:, None]


@gluon.jit
def rescale(acc, alpha, ON_DEMAND: gl.constexpr):
    """Multiply an accumulator; ON_DEMAND: a warp skips this if alpha is 1 in all of its rows."""
    scaled = ()
    if ON_DEMAND:
        changes = gl.inline_asm_elementwise(
            _ANY_OF_WARP, _ANY_OF_WARP_CONSTRAINTS, [alpha], dtype=gl.int32, is_pure=True, pack=2
        )
        for i in gl.static_range(len(acc)):
            scaled = scaled + (_rescale_piece(acc[i], alpha, changes),)
    else:
        scaled = scale_rows(acc, alpha)
    return scaled


@gluon.jit
def _rescale_piece(x, alpha, changes):
    COUNT: gl.constexpr = x.shape[0] * x.shape[1] // 128
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    alpha = gl.convert_layout(alpha, layout, assert_trivial=True)[:, None]
    changes = gl.convert_layout(changes, layout, assert_trivial=True)[:, None]
    return gl.inline_asm_elementwise(
        _RESCALE[COUNT], _RESCALE_CONSTRAINTS[COUNT], [x, alpha, changes], dtype=gl.float32,
        is_pure=True, pack=COUNT,
    )  # fmt: skip


@gluon.jit
def store_rows(out_ptr, x, row, is_row, SIZE: gl.constexpr, FIRST: gl.constexpr = 0):
    """Store column pieces, from the FIRST one on, of contiguous rows of SIZE columns."""
    for i in gl.static_range(len(x)):
        _store_piece(out_ptr, x[i], row, is_row, piece_start(SIZE, FIRST + i), SIZE)


@gluon.jit
def _store_piece(out_ptr, x, row, is_row, FIRST: gl.constexpr, SIZE: gl.constexpr):
    of_row: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    row = gl.convert_layout(row, of_row, assert_trivial=True)
    is_row = gl.convert_layout(is_row, of_row, assert_trivial=True)
    column = FIRST + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    pointers = out_ptr + row[:, None] * SIZE + column[None, :]
    gl.store(
        pointers, x.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (column < SIZE)[None, :]
    )
