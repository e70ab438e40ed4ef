"""Block masks: as `pallas_attn.kernels.library.block_mask`, with scalars and a binary search."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.kernels.library.tiles import Visible, cdiv


class List(NamedTuple):
    """A list of tiles of `rows` rows, which begins at `place` of the array."""

    tiles_ref: Any
    place: tuple
    count: Any
    rows: int

    def tile(self, index):
        return self.tiles_ref[(*self.place, jnp.minimum(index, self.tiles_ref.shape[3] - 1))]


def find_list(lists, batch, head, tile, rows):
    batches, heads, _, width = lists.tiles.shape
    place = batch if batches > 1 else 0, head if heads > 1 else 0, tile
    return List(lists.tiles, place, jnp.clip(lists.counts[place], 0, width), rows)


def kept_tiles(kept, visible, window, block):
    begin, before, full, after = visible
    tile, count, width = kept.rows, kept.count, kept.tiles_ref.shape[3]

    def count_before(bound):

        def halve(_, range_):
            first, last = range_
            middle = (first + last) // 2
            is_before = kept.tile(middle) < bound
            is_open = first < last
            first = jnp.where(is_open & is_before, middle + 1, first)
            return first, jnp.where(is_open & ~is_before, middle, last)

        steps = np.int32(width.bit_length())
        return lax.fori_loop(np.int32(0), steps, halve, (jnp.int32(0), count))[0]

    whole_tile = cdiv(begin + before * block, tile)
    first, whole, end = 0, 0, count
    if window.left is not None:
        first, whole = count_before(begin // tile), count_before(whole_tile)
    whole_end = jnp.maximum((begin + (before + full) * block) // tile, whole_tile)
    whole_end = count_before(whole_end)
    if window.right is not None:
        end = count_before(cdiv(begin + (before + full + after) * block, tile))
    per_tile = tile // block
    return Visible(
        first * tile,
        (whole - first) * per_tile,
        (whole_end - whole) * per_tile,
        (end - whole_end) * per_tile,
    )


def kept_row(kept, row, size_other):
    """Return the row of the listed tiles on the other axis, and its end: 0 for an empty list."""
    tile, index = kept.rows, row // kept.rows
    start = jnp.clip(kept.tile(index), 0, cdiv(size_other, tile) - 1) * tile
    return start + row % tile, jnp.where(index < kept.count, size_other, 0)
