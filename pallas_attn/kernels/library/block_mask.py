"""Block masks: the tiles that a list keeps, out of those visible to some rows."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import triton as plt

from pallas_attn.integers import quotient, remainder
from pallas_attn.kernels.library.tiles import Visible, arange, cdiv
from twin_attention.contract.operands import AttentionOperands, BlockSparseOperands
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec

# Tiles of a list that one step of the search reads.
LIST_SCAN_WIDTH = 256
# A tile after all others.
NO_TILE = 2**31 - 1


class Lists(NamedTuple):
    """Lists of all tiles: counts [..., tiles] and tiles [..., tiles, width], int32, or None."""

    counts: Any = None
    tiles: Any = None


class List(NamedTuple):
    """Tiles of `rows` rows, ``tiles_ref[head, :count]``, at most as many as a list is wide."""

    tiles_ref: Any
    head: Any
    tile: Any
    count: Any
    rows: int


def find_list(lists, head, tile, rows):
    count = jnp.minimum(lists.counts[head, tile], lists.tiles.shape[2])
    return List(lists.tiles, head, tile, count, rows)


def kept_tiles(tiles, visible, block):
    begin, before, full, after = visible
    tile, count = tiles.rows, tiles.count
    # Find the visible tiles of the mask; from `whole` to `whole_end` they are visible in full.
    first = quotient(begin, tile)
    whole = cdiv(begin + before * block, tile)
    whole_end = jnp.maximum(quotient(begin + (before + full) * block, tile), whole)
    end = cdiv(begin + (before + full + after) * block, tile)

    # Count the listed tiles before each bound.
    def scan(step, carry):
        n_first, n_whole, n_whole_end, n_end = carry
        i = lax.convert_element_type(step, jnp.int32) * LIST_SCAN_WIDTH + arange(LIST_SCAN_WIDTH)
        listed = plt.load(
            tiles.tiles_ref.at[tiles.head, tiles.tile, i], mask=i < count, other=NO_TILE
        )
        n_first = n_first + (listed < first).astype(jnp.int32)
        n_whole = n_whole + (listed < whole).astype(jnp.int32)
        n_whole_end = n_whole_end + (listed < whole_end).astype(jnp.int32)
        n_end = n_end + (listed < end).astype(jnp.int32)
        return n_first, n_whole, n_whole_end, n_end

    zeros = (jnp.zeros((LIST_SCAN_WIDTH,), jnp.int32),) * 4
    steps = cdiv(jnp.maximum(count, 0), LIST_SCAN_WIDTH)
    counts = lax.fori_loop(np.int32(0), steps, scan, zeros)
    first, whole, whole_end, end = (jnp.sum(x, dtype=jnp.int32) for x in counts)
    per_tile = tile // block
    return Visible(
        first * tile,
        (whole - first) * per_tile,
        (whole_end - whole) * per_tile,
        (end - whole_end) * per_tile,
    )


def kept_row(tiles, row, size_other, masked):
    tile = tiles.rows
    num_tiles = cdiv(size_other, tile) if masked else quotient(size_other, tile)
    listed = tiles.tiles_ref[tiles.head, tiles.tile, quotient(row, tile)]
    return jnp.minimum(jnp.maximum(listed, 0), num_tiles - 1) * tile + remainder(row, tile)


def lists_of_keys(operands: AttentionOperands[Array]) -> Lists:
    if not isinstance(operands, BlockSparseOperands):
        return Lists()
    return Lists(operands.kv_counts, operands.kv_tiles)


def lists_of_queries(operands: AttentionOperands[Array]) -> Lists:
    if not isinstance(operands, BlockSparseOperands):
        return Lists()
    return Lists(operands.q_counts, operands.q_tiles)


def list_arguments(spec: AttentionSpec) -> dict[str, Any]:
    if not isinstance(spec, BlockSparseSpec):
        return dict.fromkeys(("tile_q", "tile_kv"))
    return {"tile_q": spec.tile_q, "tile_kv": spec.tile_kv}


def num_lists_of_group(spec: AttentionSpec) -> int:
    has_own = isinstance(spec, BlockSparseSpec) and spec.mask_heads > 1
    return spec.group_size if has_own else 1
