"""Tiles in shared memory that TMA loads, wgmma multiplies, and TMA stores.

A tile holds rows of one head in pieces of 64, 32 or 16 columns, the last padded with zeros. A row
of a piece is as long as its swizzle, which permutes 16-byte units by the row's number, so that
wgmma reads eight rows without a bank conflict.
"""

import math
from typing import NamedTuple

import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import synchronize
from pallas_attn.kernels.explicit.wgmma import columns_of
from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils

BLOCK = 64  # columns with the longest swizzle


class Tiles(NamedTuple):
    """Tiles of one operand in shared memory, each in pieces of columns.

    copied: the pieces as TMA sees them, [count, rows, columns of the piece] each; or one of
        `value_views`, in blocks.
    multiplied: the same memory as wgmma sees it, in blocks of `block_rows` rows.
    """

    copied: tuple
    multiplied: tuple

    @property
    def columns(self) -> tuple[slice, ...]:
        widths = [piece.shape[-1] for piece in self.multiplied]
        return tuple(slice(sum(widths[:i]), sum(widths[: i + 1])) for i in range(len(widths)))

    @property
    def block_rows(self) -> int:
        return 8 if len(self.copied[0].shape) == 2 else BLOCK

    def boxes(self):
        """Yield each box that TMA copies of a tile, its first row in the tile and its columns."""
        if self.block_rows == 8:
            yield from zip(self.copied, (0,) * len(self.copied), self.columns, strict=True)
            return
        (blocks,) = self.copied
        for i, j in np.ndindex(blocks.shape[:2]):
            yield blocks.at[i, j], i * BLOCK, slice(j * BLOCK, (j + 1) * BLOCK)

    def tile(self, index) -> "Tiles":
        return Tiles(*(tuple(piece.at[index] for piece in pieces) for pieces in self))

    def rows(self, start: int, count: int) -> "Tiles":
        """Return rows start .. start + count of a tile, multiples of 8."""
        return self.tile(pl.ds(start, count))

    def cut(self, columns: tuple[slice, ...]) -> "Tiles":
        """Return a tile cut into pieces of these columns for wgmma, if it is whole."""
        if len(self.multiplied) == len(columns):
            return self
        (whole,) = self.multiplied
        return Tiles((), tuple(columns_of(whole, x.start, x.stop) for x in columns))


def piece_widths(size: int, is_whole: bool) -> tuple[int, ...]:
    """Return the columns of a row's pieces: as many of 64 as fit, then 32 and 16."""
    if is_whole:
        return (size,)
    rest = -(-(size % 64) // 16) * 16
    return (64,) * (size // 64) + tuple(width for width in (64, 32, 16) if rest & width)


def is_whole(size: int, *lengths: int) -> bool:
    """Return True if tiles need no pieces, as TMA can tile the matrix."""
    return size > 64 and size % 64 == 0 and all(length % 8 == 0 for length in lengths)


def padded_columns(size: int) -> int:
    return sum(piece_widths(size, False))


def tile_views(dtype, shape, size, is_whole, widths=None):
    """Return the types of tiles, (rows,) or (count, rows): as TMA and as wgmma see them."""
    copied, multiplied = [], []
    for width in widths or piece_widths(size, is_whole):
        block = min(width, 64)
        tiling, swizzle = plgpu.TilingTransform((8, block)), plgpu.SwizzleTransform(2 * block)
        multiplied.append(plgpu.SMEM((*shape, width), dtype, transforms=(tiling, swizzle)))
        flat = plgpu.SMEM((*shape, width), dtype, transforms=(swizzle,))
        copied.append(multiplied[-1] if is_whole else flat)
    return tuple(copied), tuple(multiplied)


def value_views(dtype, count, rows, size):
    """Return `tile_views` in blocks of 64 by 64: the assembler would serialize pieces' products."""
    if size % BLOCK or size == BLOCK:
        return tile_views(dtype, (count, rows), size, False)
    tiling, swizzle = plgpu.TilingTransform((BLOCK, BLOCK)), plgpu.SwizzleTransform(2 * BLOCK)
    shape = count, rows // BLOCK, size // BLOCK, BLOCK, BLOCK
    copied = plgpu.SMEM(shape, dtype, transforms=(swizzle,))
    multiplied = plgpu.SMEM((count, rows, size), dtype, transforms=(tiling, swizzle))
    return (copied,), (multiplied,)


def count_boxes(views) -> int:
    copied, _ = views
    return sum(math.prod(x.shape[1:-2]) for x in copied)


def load_tile(matrix, tile, batch, head, start, barrier):
    """Start to load rows of one head of [B, S, H, D] by TMA; missing rows and columns are 0."""
    for box, row, columns in tile.boxes():
        first = start + row if row else start
        plgpu.copy_gmem_to_smem(_rows_of(matrix, box, columns, batch, head, first), box, barrier)


def store_tile(x, tile, matrix, batch, head, start):
    for piece, columns in zip(tile.multiplied, tile.columns, strict=True):
        piece[...] = x[:, columns].astype(piece.dtype)
    plgpu.commit_smem()
    for box, row, columns in tile.boxes():
        first = start + row if row else start
        plgpu.copy_smem_to_gmem(
            box, _rows_of(matrix, box, columns, batch, head, first), commit_group=False
        )
    plgpu.commit_smem_to_gmem_group()


def _rows_of(matrix, piece, columns, batch, head, start):
    rows, width = piece.shape
    first = columns.start + 0 * start  # traced: JAX refuses a static slice past the end
    return matrix.at[batch, pl.ds(start, rows), head, pl.ds(first, width)]


@plgpu.inline_mgpu()
def await_copies(_):
    """Wait until this thread's copies from shared memory have completed."""
    synchronize("cp.async.bulk.wait_group 0;")


@plgpu.inline_mgpu()
def await_reads(_):
    """Wait until this thread's copies from shared memory have read their source."""
    synchronize("cp.async.bulk.wait_group.read 0;")


def clear_values(tile, count, before=False):
    """Set the rows from `count` on of a tile, or those before it, to 0: they may be NaN.

    Each consumer clears them for itself: what another one reads meanwhile is 0 or does not change.
    """

    @pl.when(count > 0 if before else count < tile.multiplied[0].shape[0])
    def _():
        for piece in tile.multiplied:
            clear_rows(piece, count, tile.block_rows, before)
        plgpu.commit_smem()


# Can go when stores take a mask.
def clear_rows(piece, count, block_rows, before=False):
    """Clear rows of a piece that wgmma sees, in blocks of block_rows, one row a thread."""
    rows, width = piece.shape
    block = min(width, 64)
    transforms = plgpu.TilingTransform((block_rows, block)), plgpu.SwizzleTransform(2 * block)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.Layout.WG_SPLAT))
    def clear(_, piece, count):
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu.c(128, i32))
        less, at_least = arith.CmpIPredicate.slt, arith.CmpIPredicate.sge
        side = less if before else at_least
        is_cleared = arith.andi(
            arith.cmpi(less, thread, mgpu.c(rows, i32)),
            arith.cmpi(side, thread, count.registers.item()),
        )
        strides, _ = ir.MemRefType(piece.type).get_strides_and_offset()
        row_block, row = (f(thread, mgpu.c(block_rows, i32)) for f in (arith.divui, arith.remui))
        offset = arith.addi(
            arith.muli(row_block, mgpu.c(2 * strides[0], i32)),
            arith.muli(row, mgpu.c(2 * strides[2], i32)),
        )
        pointer = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(piece), [offset], i8)
        unit = ir.VectorType.get((4,), i32)
        zeros = mgpu_utils.bitcast(mgpu.c(0, ir.IntegerType.get_signless(128)), unit)
        with mgpu.when(is_cleared):
            for column_block in range(width // block):
                for byte in range(0, 2 * block, 16):
                    place = column_block * 2 * strides[1] + byte
                    llvm.store(zeros, mgpu_utils.getelementptr(pointer, [place], i8))

    clear(piece, count)
