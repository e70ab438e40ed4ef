"""Pages: which keys a program of a decode reads, and where in the pool they are."""

import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from pallas_attn.integers import quotient, remainder
from pallas_attn.kernels.library.tiles import Visible, arange, cdiv


def keys_of_sequence(len_ref, capacity, tokens, window_left):
    end = jnp.minimum(jnp.maximum(len_ref[...], 0), capacity)
    begin = 0
    if window_left is not None:
        begin = jnp.maximum(end - tokens - window_left, 0)
    return begin, end


def keys_of_tokens(length, tokens, first, last, window_left):
    diagonal = length - tokens
    end = jnp.where(first < tokens, jnp.maximum(diagonal + last + 1, 0), 0)
    begin = 0
    if window_left is not None:
        begin = jnp.minimum(jnp.maximum(diagonal + first - window_left, 0), end)
    return begin, end


def tiles_at_edges(position, last_position, first, count, window_left, block):
    before = 0
    if window_left is not None:
        begin = cdiv(jnp.maximum(last_position - window_left, 0), block)
        before = jnp.minimum(jnp.maximum(begin - first, 0), count)
    end = quotient(jnp.maximum(position + 1, 0), block)
    full = jnp.minimum(jnp.maximum(end - first - before, 0), count - before)
    return Visible(0, before, full, count - before - full)


def share_of_tiles(begin, end, split, num_splits, block):
    first = quotient(begin, block)
    total = cdiv(end, block) - first
    share = cdiv(total, num_splits)
    count = jnp.minimum(jnp.maximum(total - split * share, 0), share)
    return first + split * share, count, total


def splits_with_keys(begin, end, num_splits, block):
    _, share, total = share_of_tiles(begin, end, 0, num_splits, block)
    return cdiv(total, jnp.maximum(share, 1))


def locate_keys(table_ref, start, length, num_pages, page_size, block_kv, sequence=None):
    """Return the page and slot of keys from `start` on; `sequence` picks one of all tables."""
    row = () if sequence is None else (sequence,)
    offset = arange(block_kv)
    if page_size % block_kv == 0:
        page = plt.load(table_ref.at[*row, quotient(start, page_size)])
        slot = remainder(start, page_size) + offset
    else:
        key = start + offset
        page = plt.load(table_ref.at[*row, quotient(key, page_size)], mask=key < length, other=0)
        slot = remainder(key, page_size)
    page = jnp.broadcast_to(jnp.minimum(jnp.maximum(page, 0), num_pages - 1), (block_kv,))
    return page, slot


def load_rows_at(ref, index, is_row, size, block_size, first=0, step=1):
    tile, mask = rows_at(ref, index, is_row, size, block_size, first, step)
    return plt.load(tile, mask=mask, other=0)


def store_rows_at(ref, x, index, is_row, size, block_size, first=0, step=1):
    tile, mask = rows_at(ref, index, is_row, size, block_size, first, step)
    plt.store(tile, x.astype(ref.dtype), mask=mask)


def rows_at(ref, index, is_row, size, block_size, first, step):
    shape = (*is_row.shape, block_size)
    cols = jnp.broadcast_to(arange(block_size)[None, :], shape)
    index = (jnp.broadcast_to(x, is_row.shape) for x in index)
    index = (jnp.broadcast_to(x[:, None], shape) for x in index)
    return ref.at[(*index, first + step * cols)], is_row[:, None] & (cols < size)
