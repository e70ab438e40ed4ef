"""Tiles in shared memory: how they are laid out, loaded by TMA, multiplied by wgmma and stored.

A tile holds rows of one head in pieces of 64, 32 or 16 columns, the last padded with zeros. A row
of a piece is as long as its swizzle, which permutes 16-byte units with the row's number, so that
wgmma reads eight rows without a bank conflict.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.wgmma import columns_of
from pallas_attn.kernels.library.sequences import num_sequences_of
from pallas_attn.kernels.sm90.workarounds import clear_rows

BLOCK = 64  # columns with the longest swizzle


class Tiles(NamedTuple):
    """Tiles of one operand in shared memory, each in pieces of columns.

    Attributes:
        copied: the pieces as TMA sees them, [count, rows, columns of the piece] each; or one of
            `value_views`, in blocks.
        multiplied: the same memory as wgmma sees it, in blocks of `block_rows` rows.
    """

    copied: tuple
    multiplied: tuple

    @property
    def columns(self) -> tuple[slice, ...]:
        """The columns that each piece holds that wgmma sees."""
        widths = [piece.shape[-1] for piece in self.multiplied]
        return tuple(slice(sum(widths[:i]), sum(widths[: i + 1])) for i in range(len(widths)))

    @property
    def block_rows(self) -> int:
        """The rows of a block: 8, or those of `value_views`."""
        return 8 if len(self.copied[0].shape) == 2 else BLOCK

    def boxes(self):
        """Yield what TMA copies of a tile at a time, its first row in the tile and its columns."""
        if self.block_rows == 8:
            yield from zip(self.copied, (0,) * len(self.copied), self.columns, strict=True)
            return
        (blocks,) = self.copied
        for i, j in np.ndindex(blocks.shape[:2]):
            yield blocks.at[i, j], i * BLOCK, slice(j * BLOCK, (j + 1) * BLOCK)

    def tile(self, index) -> "Tiles":
        """Return one of the tiles."""
        return Tiles(*(tuple(piece.at[index] for piece in pieces) for pieces in self))

    def rows(self, start: int, count: int) -> "Tiles":
        """Return rows start .. start + count of a tile, multiples of 8."""
        return self.tile(pl.ds(start, count))

    def cut(self, columns: tuple[slice, ...]) -> "Tiles":
        """Return a tile as wgmma sees it in pieces of these columns, where it is whole."""
        if len(self.multiplied) == len(columns):
            return self
        (whole,) = self.multiplied
        return Tiles((), tuple(columns_of(whole, x.start, x.stop) for x in columns))


def piece_widths(size: int, is_whole: bool) -> tuple[int, ...]:
    """Return the columns of the pieces of a tile that holds rows of `size` elements.

    As many of 64 as fit, then 32 and 16: (64, 32) for 96, (64, 16) for 72 and 80.
    """
    if is_whole:
        return (size,)
    rest = -(-(size % 64) // 16) * 16
    return (64,) * (size // 64) + tuple(width for width in (64, 32, 16) if rest & width)


def is_whole(size: int, *lengths: int) -> bool:
    """Return True if tiles of rows of `size` elements need no pieces: TMA can tile the matrix.

    lengths: of the sequences that are read or written.
    """
    return size > 64 and size % 64 == 0 and all(length % 8 == 0 for length in lengths)


def padded_columns(size: int) -> int:
    """Return the columns of a tile that holds rows of `size` elements."""
    return sum(piece_widths(size, False))


def tile_views(dtype, shape, size, is_whole, widths=None):
    """Return the types of tiles in shared memory: as TMA sees their pieces, and as wgmma does.

    Args:
        dtype: of 16 bits.
        shape: (rows,) or (count, rows).
        size: elements of a row.
        is_whole: see `is_whole`.
        widths: columns of the pieces; `piece_widths` if None.
    """
    copied, multiplied = [], []
    for width in widths or piece_widths(size, is_whole):
        block = min(width, 64)
        tiling, swizzle = plgpu.TilingTransform((8, block)), plgpu.SwizzleTransform(2 * block)
        multiplied.append(plgpu.SMEM((*shape, width), dtype, transforms=(tiling, swizzle)))
        flat = plgpu.SMEM((*shape, width), dtype, transforms=(swizzle,))
        copied.append(multiplied[-1] if is_whole else flat)
    return tuple(copied), tuple(multiplied)


def value_views(dtype, count, rows, size):
    """Return what `tile_views` does for values that begin at any row, in blocks of 64 by 64.

    TMA copies a block at a time, and one product takes all columns. In pieces they are products of
    64 columns each, which the assembler runs one after the other with a head size of 256.
    """
    if size % BLOCK or size == BLOCK:
        return tile_views(dtype, (count, rows), size, False)
    tiling, swizzle = plgpu.TilingTransform((BLOCK, BLOCK)), plgpu.SwizzleTransform(2 * BLOCK)
    shape = count, rows // BLOCK, size // BLOCK, BLOCK, BLOCK
    copied = plgpu.SMEM(shape, dtype, transforms=(swizzle,))
    multiplied = plgpu.SMEM((count, rows, size), dtype, transforms=(tiling, swizzle))
    return (copied,), (multiplied,)


def count_boxes(views) -> int:
    """Return how many copies fill a tile, of types of tiles."""
    copied, _ = views
    return sum(math.prod(x.shape[1:-2]) for x in copied)


def load_tile(matrix, tile, batch, head, start, barrier):
    """Start to load rows start .. of one head by TMA; rows and columns that do not exist become 0.

    Args:
        matrix: [B, S, H, D] in global memory.
        tile: `Tiles` of one tile.
        batch, head, start: int32 scalars.
        barrier: completes when all pieces arrived.
    """
    for box, row, columns in tile.boxes():
        first = start + row if row else start
        plgpu.copy_gmem_to_smem(_rows_of(matrix, box, columns, batch, head, first), box, barrier)


def store_tile(x, tile, matrix, batch, head, start):
    """Start to store x to rows start .. of one head by TMA, those that exist, through `tile`."""
    for piece, columns in zip(tile.multiplied, tile.columns, strict=True):
        piece[...] = x[:, columns].astype(piece.dtype)
    plgpu.commit_smem()
    for box, row, columns in tile.boxes():
        first = start + row if row else start
        plgpu.copy_smem_to_gmem(
            box, _rows_of(matrix, box, columns, batch, head, first), commit_group=False
        )
    plgpu.commit_smem_to_gmem_group()


def clear_values(tile, count):
    """Set what follows the first `count` values of a tile to 0.

    It may be NaN, which a product with 0 keeps. Each consumer does so for itself: what another one
    reads meanwhile changes to 0, or not at all.
    """

    @pl.when(count < tile.multiplied[0].shape[0])
    def _():
        for piece in tile.multiplied:
            clear_rows(piece, count, tile.block_rows)
        plgpu.commit_smem()


def _rows_of(matrix, piece, columns, batch, head, start):
    """Return where a piece lies in global memory; what passes the matrix's end does not exist."""
    rows, width = piece.shape
    first = columns.start + 0 * start  # traced: JAX refuses a static slice past the end
    return matrix.at[batch, pl.ds(start, rows), head, pl.ds(first, width)]


def tile_start(step, begin, before, full, after, block, last_start):
    """Return the first row of the tile of a step: masked ones, before and after, then full ones.

    A program that sees nothing visits one tile all the same, which exists.
    """
    masked = before + after
    tile = jnp.where(step < before, step, jnp.where(step < masked, step + full, step - after))
    start = begin + lax.convert_element_type(tile, jnp.int32) * block
    return jnp.clip(start, 0, last_start)


def make_tiles(spec, ds_is_shared, values=None, **counts):
    """Return the types of tiles of q, k, v and dout in shared memory, and each one's pieces.

    Args:
        spec: the problem.
        ds_is_shared: ds is in shared memory, and multiplies pieces of q and of k of its width.
        values: the tiles that p or ds in registers multiplies. With these all rows are padded to
            `value_columns`, and these tiles, of 64 rows and two blocks of columns, are
            `value_block_views`: the assembler would run one product of two after the other.
        **counts: (tiles, rows) of each.
    """
    tiles, pieces = {}, {}
    for name, shape in counts.items():
        is_scores = name in ("q_tiles", "k_tiles")
        size = spec.head_dim if is_scores else spec.head_dim_v
        is_packed = num_sequences_of(spec) is not None  # their tiles begin anywhere
        whole = not is_packed and is_whole(size, spec.seq_q, spec.seq_kv)
        widths = piece_widths(size, whole)
        if values is not None and not whole:
            columns = value_columns(size)
            width = ds_width(size)
            if columns > 96 or (ds_is_shared and is_scores):
                widths = (width,) * (columns // width)
        dtype = jnp.dtype(spec.dtype)
        views = tile_views(dtype, shape, size, whole, widths)
        if name in (values or ()) and widths == (BLOCK, BLOCK) and shape[1] == BLOCK:
            views = value_block_views(dtype, *shape, 2 * BLOCK)
        tiles[name] = plgpu.RefUnion(*views)
        pieces[name] = len(widths)
    return tiles, pieces


def block_tiles(spec, values=None, **counts):
    """Return what `make_tiles` does, of rows that are padded to blocks of 64 columns with zeros.

    values: the tiles of 64 rows that ds or p multiplies, all columns in one product: these are
        `value_block_views`.
    """
    tiles, pieces = {}, {}
    for name, (count, rows) in counts.items():
        size = spec.head_dim if name in ("q_tiles", "k_tiles") else spec.head_dim_v
        blocks = -(-size // BLOCK)
        dtype = jnp.dtype(spec.dtype)
        widths = (BLOCK,) * blocks
        views = tile_views(dtype, (count, rows), size, False, widths)
        if name == values:
            views = value_block_views(dtype, count, rows, blocks * BLOCK)
        tiles[name], pieces[name] = plgpu.RefUnion(*views), blocks
    return tiles, pieces


def value_block_views(dtype, count, rows, size):
    """Return `value_views` of tiles of 64 rows, and what `values_and_factors` makes tiles of."""
    assert rows == BLOCK
    (block,) = tile_views(dtype, (count, size // BLOCK, rows), BLOCK, False)[1]
    return *value_views(dtype, count, rows, size), (block,)


def values_and_factors(views) -> tuple[Tiles, Tiles]:
    """Return tiles as ds or p multiplies them, and as scores do: in pieces of 64 columns.

    Both are the same where there are no `value_block_views`.
    """
    copied, multiplied, *blocks = views
    tiles = Tiles(copied, multiplied)
    if not blocks:
        return tiles, tiles
    ((block,),) = blocks
    return tiles, Tiles((), tuple(block.at[:, i] for i in range(block.shape[1])))


def value_columns(size):
    """Return the columns of rows of `size` elements in the kernel of dk and dv: up to 96 or 128."""
    return padded_columns(size) if size <= 96 else -(-size // BLOCK) * BLOCK


def ds_width(head_dim):
    """Return the columns of a block of ds: wgmma wants both operands swizzled alike."""
    return math.gcd(value_columns(head_dim), BLOCK)
