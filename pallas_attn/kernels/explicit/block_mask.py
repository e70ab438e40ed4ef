"""Block masks: as `pallas_attn.kernels.library.block_mask`, of scalars.

The producer and the consumers walk the same list, each for itself. A binary search finds the tiles
that the window leaves: it takes no layout, and no warp waits for another.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.kernels.library.tiles import cdiv


def find_list(counts_ref, tiles_ref, batch, head, tile):
    """Return a tile's list, as a function of the index, and how many tiles it has."""
    batches, heads, _, width = tiles_ref.shape
    place = batch if batches > 1 else 0, head if heads > 1 else 0, tile

    def listed(index):
        return tiles_ref[(*place, jnp.minimum(index, width - 1))]

    return listed, jnp.clip(counts_ref[place], 0, width)


def kept_tiles(listed, count, width, visible, window_left, window_right, block, tile):
    """Narrow what `visible_tiles` returned to the tiles of a list: as the library's `kept_tiles`.

    Args:
        listed, count: as `find_list` returns them.
        width: the most tiles that a list has.
        visible: begin, before, full and after.
        window_left, window_right: None for no bound.
        block, tile: keys of a kernel's tile, and of a tile of the mask, a multiple.
    """
    begin, before, full, after = visible

    def count_before(bound):
        """Return how many tiles of the list are before `bound`."""

        def halve(_, range_):
            first, last = range_
            middle = (first + last) // 2
            is_before = listed(middle) < bound
            is_open = first < last
            first = jnp.where(is_open & is_before, middle + 1, first)
            return first, jnp.where(is_open & ~is_before, middle, last)

        steps = np.int32(width.bit_length())
        return lax.fori_loop(np.int32(0), steps, halve, (jnp.int32(0), count))[0]

    whole_tile = cdiv(begin + before * block, tile)
    first, whole, end = 0, 0, count
    if window_left is not None:
        first, whole = count_before(begin // tile), count_before(whole_tile)
    whole_end = jnp.maximum((begin + (before + full) * block) // tile, whole_tile)
    whole_end = count_before(whole_end)
    if window_right is not None:
        end = count_before(cdiv(begin + (before + full + after) * block, tile))
    per_tile = tile // block
    return (
        first * tile,
        (whole - first) * per_tile,
        (whole_end - whole) * per_tile,
        (end - whole_end) * per_tile,
    )


def kept_row(listed, count, row, size_other, tile):
    """Return the row of the other axis that is `row` of the listed tiles, and the axis' end.

    The row is within the axis. For the one step of an empty list the end is 0, which hides all.
    """
    index = row // tile
    start = jnp.clip(listed(index), 0, cdiv(size_other, tile) - 1) * tile
    return start + row % tile, jnp.where(index < count, size_other, 0)
