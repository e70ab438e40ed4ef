"""Tiles of q, k, v and dout in shared memory, as the kernels of the backward multiply them."""

import math

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.tma import (
    BLOCK,
    Tiles,
    is_whole,
    padded_columns,
    piece_widths,
    tile_views,
    value_views,
)
from pallas_attn.kernels.library.sequences import num_sequences_of


def make_tiles(spec, ds_is_shared, values=None, **counts):
    """Return the types of tiles of q, k, v and dout, and how many pieces each has.

    Args:
        ds_is_shared: ds is in shared memory, and multiplies pieces of q and of k of its width.
        values: names of the tiles that p or ds in registers multiplies. Tiles of 64 rows and two
            blocks of columns are `value_block_views`: the assembler would serialize two products.
        **counts: (tiles, rows) of each.
    """
    tiles, pieces = {}, {}
    for name, shape in counts.items():
        is_scores = name in ("q_tiles", "k_tiles")
        size = spec.head_dim if is_scores else spec.head_dim_v
        is_packed = num_sequences_of(spec) is not None  # sequences' tiles begin at any row
        whole = not is_packed and is_whole(size, spec.seq_q, spec.seq_kv)
        widths = piece_widths(size, whole)
        if not whole:
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
    """Return what `make_tiles` does, with rows padded with zeros to blocks of 64 columns."""
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
    """Return `value_views` of tiles of 64 rows, and the views that `values_and_factors` needs."""
    assert rows == BLOCK
    (block,) = tile_views(dtype, (count, size // BLOCK, rows), BLOCK, False)[1]
    return *value_views(dtype, count, rows, size), (block,)


def values_and_factors(views) -> tuple[Tiles, Tiles]:
    """Return tiles as the operand of ds or p, and as that of the scores: pieces of 64 columns."""
    copied, multiplied, *blocks = views
    tiles = Tiles(copied, multiplied)
    if not blocks:
        return tiles, tiles
    ((block,),) = blocks
    return tiles, Tiles((), tuple(block.at[:, i] for i in range(block.shape[1])))


def value_columns(size):
    """Return the padded columns of a row: 128 above 96, as products of pieces are serialized."""
    return padded_columns(size) if size <= 96 else -(-size // BLOCK) * BLOCK


def ds_width(head_dim):
    """Return the columns of a block of ds; wgmma needs both operands in the same swizzle."""
    return math.gcd(value_columns(head_dim), BLOCK)
