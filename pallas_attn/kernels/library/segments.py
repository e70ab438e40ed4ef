"""Segment ids: which tiles may hold keys of a query's segment, and which tokens belong to it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plt

from pallas_attn.integers import quotient
from pallas_attn.kernels.library.ranges import BLOCK_TOKENS, LARGEST, SCAN_WIDTH, in_blocks, scan
from pallas_attn.kernels.library.tiles import Visible, cdiv, load_rows, minimum

# Ids of padding among the resident tokens and among the visited tokens: they never match.
STAYS, VISITED = -2, -1


class Segments(NamedTuple):
    """Segment ids of a batch element, [Sq] and [Skv] int32, and ranges [3, blocks]; or None."""

    q_ids: Any = None
    kv_ids: Any = None
    ranges: Any = None


def load_segments(ids_ref, start, num_rows, block, padding):
    if ids_ref is None:
        return None, None
    ids = load_rows(ids_ref, start, num_rows, block, padding)
    ids = jnp.where(ids < 0, padding, ids)
    return ids, ids >= 0


def meeting_tiles(ids, ranges_ref, size_other, visible, block):
    begin, before, full, after = visible
    least = jnp.min(jnp.where(ids < 0, LARGEST, ids))
    greatest = jnp.max(ids)
    num_blocks = cdiv(size_other, BLOCK_TOKENS)
    end = minimum(cdiv(begin + (before + full + after) * block, BLOCK_TOKENS), num_blocks)

    # Find the first and the last block that may hold tokens of these segments.
    def find(i, carry):
        first, stop = carry
        low = plt.load(ranges_ref.at[0, i], mask=i < end, other=LARGEST)
        high = plt.load(ranges_ref.at[1, i], mask=i < end, other=VISITED)
        meets = (low <= greatest) & (high >= least)
        first = jnp.minimum(first, jnp.where(meets, i, num_blocks))
        return first, jnp.maximum(stop, jnp.where(meets, i + 1, 0))

    first = jnp.full((SCAN_WIDTH,), num_blocks, jnp.int32)
    stop = jnp.zeros((SCAN_WIDTH,), jnp.int32)
    first, stop = scan(quotient(begin, BLOCK_TOKENS), end, find, (first, stop))
    begin = jnp.maximum(begin, quotient(jnp.min(first) * BLOCK_TOKENS, block) * block)
    end = jnp.max(stop)
    count = cdiv(jnp.maximum(end * BLOCK_TOKENS - begin, 0), block)

    # Find the first block from there on that has padding.
    def find_padding(i, padded):
        any_id = plt.load(ranges_ref.at[2, i], mask=i < end, other=0)
        return jnp.minimum(padded, jnp.where(any_id < 0, i, end))

    padded = jnp.full((SCAN_WIDTH,), 0, jnp.int32) + end
    padded = scan(quotient(begin, BLOCK_TOKENS), end, find_padding, padded)
    full = quotient(jnp.maximum(jnp.min(padded) * BLOCK_TOKENS - begin, 0), block)
    return Visible(begin, 0, full, count - full)


def segment_ranges(ids: Array | None) -> Array | None:
    if ids is None:
        return None
    ids = in_blocks(ids, VISITED)
    least = jnp.where(ids < 0, LARGEST, ids).min(2)
    return jnp.stack((least, ids.max(2), ids.min(2)), 1)
