"""Tiles: which tiles a row sees, and how a head's rows and columns are read and written.

A view may span 2^31 elements or more. Indices of rows, heads, pages and parts have 32 bits, and
kernels widen them before they multiply them by a stride. Rows within a tile keep 32 bits unless it
spans 2^31 elements (`load_tile`), and so do pages and slots of a pool whose heads span less.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_attn.layouts import Layout
from twin_attention.targets import config

# The backward's row vectors are padded to a multiple of this, so that their tiles are loaded
# without a mask. Its block_q divides this.
ROW_PADDING = tl.constexpr(128)


padded_head_dim = triton.constexpr_function(config.padded_head_dim)


class Strides(NamedTuple):
    """Strides in elements of a [B, S, H, D] tensor with a contiguous last dimension.

    `row` is a compile-time constant. `align` divides all operands' strides: how wide a load may be.
    """

    batch: Any
    row: Any
    head: Any
    align: Any


class FlashStrides(NamedTuple):
    """The `Strides` of a kernel's operands, or None.

    `last` stays None because of Triton 3.6, see `torch_attn.kernels.library.mask.Mask`.
    """

    q: Strides | None = None
    k: Strides | None = None
    v: Strides | None = None
    dout: Strides | None = None
    out: Strides | None = None
    dq: Strides | None = None
    dk: Strides | None = None
    dv: Strides | None = None
    last: None = None


@triton.jit
def visible_tiles(
    start, size, size_other, diagonal, left, right, BLOCK: tl.constexpr, BLOCK_OTHER: tl.constexpr
):
    """Return which tiles of the other axis the rows start .. start + BLOCK see.

    Row i stands at position ``p = i + diagonal`` of the other axis and sees ``p - left ..
    p + right`` (None is unlimited). Queries see keys with the window's (left, right) and
    ``diagonal = seq_kv - seq_q``, keys see queries with (right, left) and its negative.

    Return (begin, before, full, after): the first visible tile starts at `begin`; from there
    `before` tiles need a mask, then `full` tiles need none, then `after` tiles need one.
    """
    first = start + diagonal
    last = tl.minimum(start + BLOCK, size) - 1 + diagonal
    begin = 0
    full_begin = 0
    end = size_other
    full_end = size_other
    if left is not None:
        begin = tl.maximum(first - left, 0) // BLOCK_OTHER * BLOCK_OTHER
        full_begin = tl.maximum(last - left, 0)
    if right is not None:
        end = tl.minimum(tl.maximum(last + right + 1, 0), size_other)
        full_end = tl.minimum(tl.maximum(first + right + 1, 0), size_other)
    return tiles_between(begin, full_begin, full_end, end, BLOCK_OTHER)


@triton.jit
def tiles_between(begin, full_begin, full_end, end, BLOCK: tl.constexpr):
    """Return `visible_tiles` from bounds: some row sees begin .. end, all see the full ones."""
    visible = tl.cdiv(tl.maximum(end - begin, 0), BLOCK)
    before = tl.minimum(tl.cdiv(full_begin - begin, BLOCK), visible)
    full = tl.maximum(full_end - begin, 0) // BLOCK - before
    full = tl.minimum(tl.maximum(full, 0), visible - before)
    return begin, before, full, visible - before - full


@triton.jit
def count_tiles(before, full, after, MASKED: tl.constexpr):
    """Return the number of tiles at the edges, or of full ones."""
    count = full
    if MASKED:
        count = before + after
    return count


@triton.jit
def tile_start(index, begin, before, full, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        tile = tl.where(index < before, index, index + full)
    else:
        tile = index + before
    return begin + tile * BLOCK


@triton.jit
def split_step(step, count, GROUP_SIZE: tl.constexpr):
    """Return a step's head and tile; `count` may be 0 where a compiler hoists this."""
    if GROUP_SIZE == 1:
        member, index = 0, step
    else:
        count = tl.maximum(count, 1)
        member, index = step // count, step % count
    return member, index


@triton.jit
def head_base(pointer, strides, batch, head, first=None):
    """Return where a head begins, or its row `first`."""
    offset = tl.cast(batch, tl.int64) * strides.batch + head.to(tl.int64) * strides.head
    # Before the row is added: where that is 0, the compiler drops the sum, and what it knows of it.
    offset = tl.multiple_of(offset, strides.align)
    if first is not None:
        offset += tl.cast(first, tl.int64) * strides.row
    return pointer + offset


@triton.jit
def load_tile(
    base,
    start,
    num_rows,
    STRIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    exists=None,
):
    """Load rows of a [num_rows, SIZE] matrix, padded; MASK_ROWS: missing rows give 0."""
    BLOCK_SIZE: tl.constexpr = padded_head_dim(SIZE)
    rows = tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    if STRIDE * BLOCK_ROWS >= 2**31:
        rows = rows.to(tl.int64)
    pointers = base + tl.cast(start, tl.int64) * STRIDE + rows * STRIDE + cols
    if MASK_ROWS:
        kept = rows < num_rows - start if exists is None else exists[:, None]
        x = tl.load(pointers, mask=kept & (cols < SIZE), other=0.0)
    elif BLOCK_SIZE != SIZE:
        x = tl.load(pointers, mask=cols < SIZE, other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def store_tile(base, x, start, num_rows, stride, BLOCK_ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Store a tile's rows and columns that exist."""
    rows = tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, padded_head_dim(SIZE))[None, :]
    pointers = base + (start + rows).to(tl.int64) * stride + cols
    tl.store(pointers, x.to(base.dtype.element_ty), mask=(rows < num_rows - start) & (cols < SIZE))


@triton.jit
def load_stored(
    base, start, num_rows, stride, BLOCK_ROWS: tl.constexpr, SIZE: tl.constexpr, exists=None
):
    """Load what `store_tile` stored; 0 where `exists` [BLOCK_ROWS] is False."""
    rows = tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, padded_head_dim(SIZE))[None, :]
    pointers = base + (start + rows).to(tl.int64) * stride + cols
    kept = (rows < num_rows - start) & (cols < SIZE)
    if exists is not None:
        kept = kept & exists[:, None]
    return tl.load(pointers, mask=kept, other=0.0)


def strides_of(**layouts: Layout) -> FlashStrides:
    """Return the `FlashStrides` of tensors by name.

    A constant row stride makes a tile's addresses one register and constant offsets.
    """
    every = (stride for layout in layouts.values() for stride in layout.strides[:-1])
    align = tl.constexpr(math.gcd(16, *every))
    strides = {}
    for name, layout in layouts.items():
        *batch, row, head, _ = layout.strides
        strides[name] = Strides(batch[0] if batch else 0, tl.constexpr(row), head, align)
    return FlashStrides(**strides)
