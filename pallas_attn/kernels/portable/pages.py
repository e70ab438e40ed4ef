"""Pages: which keys a program of a decode reads, and where in the pool they are."""

import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from pallas_attn.kernels.portable.tiles import arange, cdiv


def keys_of_sequence(len_ref, capacity, tokens, window_left):
    """The keys begin .. end that the new tokens of a sequence see; end is its length."""
    end = jnp.minimum(jnp.maximum(len_ref[...], 0), capacity)
    if window_left is None:
        return 0, end
    return jnp.maximum(end - tokens - window_left, 0), end


def share_of_tiles(begin, end, split, num_splits, block):
    """The tiles of keys begin .. end that are one split's.

    Splits get equal shares, the last ones less or none. Returns (first, count, tiles): the split's
    first tile, how many it has, and how many there are in all.
    """
    first = begin // block
    tiles = cdiv(end, block) - first
    share = cdiv(tiles, num_splits)
    count = jnp.minimum(jnp.maximum(tiles - split * share, 0), share)
    return first + split * share, count, tiles


def locate_keys(table_ref, start, length, num_pages, page_size, block_kv):
    """Page and slot of keys start .. start + block_kv of a sequence.

    Table entries past the sequence's last page are not read. A page id out of range, which is
    the caller's mistake, becomes one within the pool.
    """
    offset = arange(block_kv)
    if page_size % block_kv == 0:
        page = plt.load(table_ref.at[start // page_size])
        slot = start % page_size + offset
    else:
        key = start + offset
        page = plt.load(table_ref.at[key // page_size], mask=key < length, other=0)
        slot = key % page_size
    page = jnp.broadcast_to(jnp.minimum(jnp.maximum(page, 0), num_pages - 1), (block_kv,))
    return page, slot


def load_rows_at(ref, index, is_row, size, block_size, first=0, step=1):
    """Rows ``ref[*index]`` of a reference; a row that is none gives 0.

    `size` columns, `first`, ``first + step``, ..., padded with zeros to block_size.
    """
    tile, mask = rows_at(ref, index, is_row, size, block_size, first, step)
    return plt.load(tile, mask=mask, other=0)


def store_rows_at(ref, x, index, is_row, size, block_size, first=0, step=1):
    """The inverse of `load_rows_at`; a row that is none is not written."""
    tile, mask = rows_at(ref, index, is_row, size, block_size, first, step)
    plt.store(tile, x.astype(ref.dtype), mask=mask)


def rows_at(ref, index, is_row, size, block_size, first, step):
    """A view of rows ``ref[*index]``, one vector of indices a dimension, and which elements are."""
    shape = (*is_row.shape, block_size)
    cols = jnp.broadcast_to(arange(block_size)[None, :], shape)
    index = (jnp.broadcast_to(x, is_row.shape) for x in index)
    index = (jnp.broadcast_to(x[:, None], shape) for x in index)
    return ref.at[(*index, first + step * cols)], is_row[:, None] & (cols < size)
