"""Results over some of the keys, float32, as accumulators.

`pointer` is the first of 64 rows in [S, heads, SIZE]; `exists` [64] says which there are.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.explicit.tma import num_pieces, piece_start, piece_width
from torch_attn.kernels.explicit.wgmma import product_layout


@gluon.jit
def load_carry(pointer, exists, heads, SIZE: gl.constexpr):
    acc = ()
    for i in gl.static_range(num_pieces(SIZE)):
        acc = acc + (_load_piece(pointer, exists, heads, i, SIZE),)
    return acc


@gluon.jit
def keep_rows(acc, kept):
    result = ()
    for i in gl.static_range(len(acc)):
        result = result + (_keep_piece(acc[i], kept),)
    return result


@gluon.jit
def _keep_piece(x, kept):
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return gl.where(gl.convert_layout(kept, layout, assert_trivial=True)[:, None], x, 0.0)


@gluon.jit
def prefetch_carry(pointer, count, heads, ROWS: gl.constexpr, SIZE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = gl.minimum(gl.arange(0, ROWS, layout), count - 1)
    gl.inline_asm_elementwise(
        _prefetch_instruction(4 * SIZE), "=r,l", [pointer + row * (heads * SIZE)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.constexpr_function
def _prefetch_instruction(num_bytes):
    return f"cp.async.bulk.prefetch.L2.global [$1], {num_bytes}; mov.u32 $0, 0;"


@gluon.jit
def store_carry(pointer, acc, exists, heads, SIZE: gl.constexpr):
    for i in gl.static_range(num_pieces(SIZE)):
        pointers, mask = _place(pointer, exists, heads, i, SIZE)
        gl.store(pointers, acc[i], mask=mask)


@gluon.jit
def add_carry(pointer, acc, exists, heads, SIZE: gl.constexpr):
    for i in gl.static_range(num_pieces(SIZE)):
        pointers, mask = _place(pointer, exists, heads, i, SIZE)
        gl.store(pointers, gl.load(pointers, mask=mask, other=0.0) + acc[i], mask=mask)


@gluon.jit
def head_rows(pointer, batch, num_rows, start, head, heads, SIZE: gl.constexpr):
    row = batch.to(gl.int64) * num_rows + start
    return pointer + (row * heads + head) * SIZE


@gluon.jit
def _load_piece(pointer, exists, heads, INDEX: gl.constexpr, SIZE: gl.constexpr):
    pointers, mask = _place(pointer, exists, heads, INDEX, SIZE)
    return gl.load(pointers, mask=mask, other=0.0)


@gluon.jit
def _place(pointer, exists, heads, INDEX: gl.constexpr, SIZE: gl.constexpr):
    WIDTH: gl.constexpr = piece_width(SIZE, INDEX)
    layout: gl.constexpr = product_layout(WIDTH)
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    row = gl.arange(0, 64, of_row) * (heads * SIZE)
    column = piece_start(SIZE, INDEX) + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    exists = gl.convert_layout(exists, of_row, assert_trivial=True)
    return (pointer + row[:, None] + column[None, :], exists[:, None] & (column < SIZE)[None, :])
