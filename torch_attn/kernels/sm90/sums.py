"""Float32 sums of gradients: their order in memory, what adds to them, and what reads them.

One consumer computes a block of dq's columns.
"""

import math

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from torch_attn.kernels.explicit.reduction import add_box
from torch_attn.kernels.explicit.registers import copy_layout
from torch_attn.kernels.explicit.sequences import locate_tile
from torch_attn.kernels.explicit.tma import (
    box_layout,
    column_pieces,
    piece,
    piece_start,
    reinterpret,
)
from torch_attn.kernels.explicit.wgmma import product_layout
from torch_attn.kernels.library.sequences import count_sequence_tiles
from torch_attn.kernels.library.tiles import ROW_PADDING
from torch_attn.layouts import Layout
from torch_attn.tensor_maps import TensorMap

# A box of sums, as one TMA instruction adds it, is 64 rows of 16 columns.
BOX = gl.constexpr((4, 256))


@triton.constexpr_function
def dq_blocks(size):
    blocks, first = [], 0
    for width in column_pieces(size):
        for start in range(first, first + width, 64):
            blocks.append((start, min(width, 64)))
        first += width
    return tuple(blocks)


@triton.constexpr_function
def consumer_blocks(size, consumer):
    every = tuple(range(len(dq_blocks(size))))
    return every[:1] if consumer == 0 else every[1:]


@triton.constexpr_function
def block_piece(size, index):
    start, first = dq_blocks(size)[index][0], 0
    for i, width in enumerate(column_pieces(size)):
        if start < first + width:
            return i
        first += width
    return None


@triton.constexpr_function
def block_start(size, index):
    return dq_blocks(size)[index][0]


@triton.constexpr_function
def block_offset(size, index):
    """Return the first column of a block in its piece."""
    return dq_blocks(size)[index][0] - piece_start(size, block_piece(size, index))


@triton.constexpr_function
def block_width(size, index):
    return dq_blocks(size)[index][1]


@triton.constexpr_function
def _nth(values, index):
    return values[index]


@gluon.jit
def allocate_ds(DTYPE: gl.constexpr, BLOCK_Q: gl.constexpr, STORED: gl.constexpr):
    """Allocate ds of two tiles of queries, by halves of keys; STORED: queries down, as boxes."""
    if STORED:
        ds_buffer = gl.allocate_shared_memory(DTYPE, [4, 1, 1, BLOCK_Q, 64], box_layout(64))
    else:
        ds_buffer = gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_Q], box_layout(64, rank=2))
    return ds_buffer


@gluon.jit
def tile_of_ds(ds_buffer, step, half):
    tile = ds_buffer.index(step % 2 * 2 + half)
    if len(ds_buffer.shape) == 5:
        tile = tile.reshape([ds_buffer.shape[3], ds_buffer.shape[4]]).permute((1, 0))
    return tile


@gluon.jit
def start_dq(ds_buffer, step, k_tile, first, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Start this consumer's part of ds·k, two products a block, for two tiles of k."""
    BLOCKS: gl.constexpr = consumer_blocks(HEAD_DIM, CONSUMER)
    dq = ()
    for i in gl.static_range(len(BLOCKS)):
        dq = dq + (_start_block(ds_buffer, step, k_tile, first, _nth(BLOCKS, i), HEAD_DIM),)
    return dq


@gluon.jit
def _start_block(ds_buffer, step, k_tile, first, BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr):
    WIDTH: gl.constexpr = block_width(HEAD_DIM, BLOCK)
    dq = gl.zeros([64, WIDTH], gl.float32, product_layout(WIDTH))
    for half in gl.static_range(2):
        left = tile_of_ds(ds_buffer, step, half).permute((1, 0))
        right = piece(k_tile[block_piece(HEAD_DIM, BLOCK)], first + half)
        if right.shape[1] != WIDTH:
            right = right.slice(block_offset(HEAD_DIM, BLOCK), WIDTH, 1)
        dq = warpgroup_mma(left, right, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def allocate_dq(CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Allocate this consumer's part of a tile's dq, as boxes of each block."""
    BLOCKS: gl.constexpr = consumer_blocks(HEAD_DIM, CONSUMER)
    tiles = ()
    for i in gl.static_range(len(BLOCKS)):
        tiles = tiles + (_allocate_boxes(block_width(HEAD_DIM, _nth(BLOCKS, i)) // 16),)
    return tiles


@gluon.jit
def _allocate_boxes(COUNT: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, [COUNT, BOX[0], BOX[1]], box_of_sums_layout())


@triton.constexpr_function
def box_of_sums_layout():
    return gl.NVMMASharedLayout(0, 32, 2)


@gluon.jit
def write_dq(dq_tiles, dq):
    """Write this consumer's part of a tile's dq to shared memory, in the order of the sums.

    64 rows are consecutive, block by block, each as registers hold it: four values of a thread,
    then the threads.
    """
    flat_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    for i in gl.static_range(len(dq)):
        flat = _order_as_registers(dq[i])
        reinterpret(dq_tiles[i], gl.float32, [flat.shape[0]], flat_layout).store(flat)


@gluon.jit
def add_dq(dq_sum, dq_tiles, tile, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Start to add a consumer's part to the sums of a tile of 64 rows, counted over all heads."""
    BLOCKS: gl.constexpr = consumer_blocks(HEAD_DIM, CONSUMER)
    first = tile * (64 * sum_columns(HEAD_DIM) // BOX[1])
    for i in gl.static_range(len(BLOCKS)):
        boxes_before = block_start(HEAD_DIM, _nth(BLOCKS, i)) // 16
        _add_boxes(dq_sum, dq_tiles[i], first + boxes_before * BOX[0])


@gluon.jit
def _add_boxes(dq_sum, boxes, first):
    COUNT: gl.constexpr = boxes.shape[0]
    for i in gl.static_range(COUNT):
        add_box(dq_sum, [first + i * BOX[0], 0], boxes.index(i))


def map_sums(layout: Layout) -> TensorMap:
    """Return the descriptor of float32 sums as rows of boxes, in memory order."""
    columns = BOX.value[1]
    fields = {
        "shape": [math.prod(layout.shape) // columns, columns],
        "strides": [columns, 1],
        "block_shape": list(BOX.value),
        "layout": box_of_sums_layout(),
    }
    return TensorMap(layout.operand, fields)


@gluon.jit
def add_rows(sum_ptr, x, row, SIZE: gl.constexpr):
    """Add 64 rows, from `row` on, to float32 sums in the order of `write_dq`."""
    base = sum_ptr + row * sum_columns(SIZE)
    for i in gl.static_range(len(x)):
        flat = _order_as_registers(x[i])
        place = base + 64 * piece_start(SIZE, i)
        gl.atomic_add(place + gl.arange(0, flat.shape[0], flat.type.layout), flat, sem="relaxed")


@triton.constexpr_function
def sum_columns(size):
    return sum(column_pieces(size))


@gluon.jit
def _order_as_registers(x):
    """Flatten 64 rows of a product: column blocks, threads, then a thread's values."""
    parts = gl.reshape(x, [4, 2, 8, x.shape[1] // 8, 4, 2])
    return gl.reshape(gl.permute(parts, [3, 0, 2, 4, 1, 5]), [64 * x.shape[1]])


@gluon.jit(do_not_specialize=["seq_q", "num_sequences"])
def flash_bwd_postprocess_kernel(
    dq_sum_ptr, dq_ptr, cu_seqlens_q_ptr, seq_q, num_sequences, heads_q, scale,
    HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Scale and store 64 rows of a gradient of one head from the sums of `add_dq` or `add_rows`.

    dq [B, Sq, Hq, D] contiguous; for dk and dv the problem has the keys' rows and heads. Grid:
    (query tiles, heads, batch) in one axis; for packed sequences, tiles of the sums, where each
    sequence begins a tile of ROW_PADDING rows.
    """
    gl.static_assert(BLOCK_Q == 64)
    num_tiles = gl.cdiv(seq_q, 64)
    if num_sequences is not None:
        num_tiles = count_sequence_tiles(seq_q, num_sequences, ROW_PADDING) * (ROW_PADDING // 64)
    start_q = gl.program_id(0) % num_tiles * 64
    head = gl.program_id(0) // num_tiles % heads_q
    batch = (gl.program_id(0) // num_tiles // heads_q).to(gl.int64)
    padded_rows = count_sequence_tiles(seq_q, num_sequences, ROW_PADDING) * ROW_PADDING
    row = (batch * heads_q + head) * padded_rows + start_q
    if num_sequences is not None:
        _sequence, _first, first_q, seq_q, _first_other, _size_other = locate_tile(
            cu_seqlens_q_ptr, cu_seqlens_q_ptr, start_q // ROW_PADDING, seq_q, seq_q,
            num_sequences, ROW_PADDING,
        )  # fmt: skip
        start_q = first_q + start_q % ROW_PADDING
    base = dq_sum_ptr + row * sum_columns(HEAD_DIM)
    dq_row = heads_q * HEAD_DIM
    dq_base = dq_ptr + batch * seq_q * dq_row + head * HEAD_DIM
    for i in gl.static_range(len(dq_blocks(HEAD_DIM))):
        _store_block(base, dq_base, start_q, seq_q, dq_row, scale, i, HEAD_DIM)


@gluon.jit
def _store_block(
    base, dq_base, start, num_rows, stride, scale, BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr
):
    FIRST: gl.constexpr = block_start(HEAD_DIM, BLOCK)
    WIDTH: gl.constexpr = block_width(HEAD_DIM, BLOCK)
    layout: gl.constexpr = copy_layout(WIDTH, gl.num_warps())
    x = _load_block(base + 64 * FIRST, WIDTH) * scale
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    columns = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    pointers = dq_base + (start + rows).to(gl.int64) * stride + columns
    x = gl.convert_layout(x.to(dq_base.dtype.element_ty), layout)
    gl.store(pointers, x, (rows < num_rows - start) & (columns < HEAD_DIM))


@gluon.jit
def _load_block(base, WIDTH: gl.constexpr):
    like = _order_as_registers(gl.zeros([64, WIDTH], gl.float32, product_layout(WIDTH)))
    flat = gl.load(base + gl.arange(0, 64 * WIDTH, like.type.layout))
    parts = gl.permute(gl.reshape(flat, [WIDTH // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    return gl.reshape(parts, [64, WIDTH])
