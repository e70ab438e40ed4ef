"""Tiles: which tiles a row sees, and how rows and columns of a head are read and written.

Without packed sequences, shapes are static in JAX, so loops over zero tiles are not traced.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_attn.integers import quotient, remainder
from twin_attention.targets.config import padded_head_dim

# Row vectors that the backward's kernels share are padded to a multiple of this many rows.
ROW_PADDING = 128


class Visible(NamedTuple):
    """The tiles of the other axis that some rows see.

    Attributes:
        begin: the first row of the first tile.
        before, full, after: how many tiles need a mask, then need none, then need one again.
    """

    begin: Any
    before: Any
    full: Any
    after: Any

    def mask_all(self, condition):
        begin, before, full, after = self
        before = jnp.where(condition, before + full + after, before)
        return Visible(begin, before, *(jnp.where(condition, 0, x) for x in (full, after)))


def visible_tiles(start, size, size_other, diagonal, left, right, block, block_other):
    first = start + diagonal
    last = minimum(start + block, size) - 1 + diagonal
    begin = 0
    full_begin = 0
    end = size_other
    full_end = size_other
    if left is not None:
        begin = quotient(maximum(first - left, 0), block_other) * block_other
        full_begin = maximum(last - left, 0)
    if right is not None:
        end = minimum(maximum(last + right + 1, 0), size_other)
        full_end = minimum(maximum(first + right + 1, 0), size_other)
    return tiles_between(begin, full_begin, full_end, end, block_other)


def tiles_between(begin, full_begin, full_end, end, block):
    visible = cdiv(maximum(end - begin, 0), block)
    before = minimum(cdiv(maximum(full_begin - begin, 0), block), visible)
    full = quotient(maximum(full_end - begin, 0), block) - before
    full = minimum(maximum(full, 0), visible - before)
    return Visible(begin, before, full, visible - before - full)


def count_tiles(visible, masked):
    return visible.before + visible.after if masked else visible.full


def tile_start(index, visible, block, masked):
    if masked:
        tile = jnp.where(index < visible.before, index, index + visible.full)
    else:
        tile = index + visible.before
    return visible.begin + lax.convert_element_type(tile, jnp.int32) * block


def cdiv(a, b):
    """Return a / b rounded up, a >= 0; unlike `pl.cdiv` it takes a traced int32 in 64-bit mode."""
    return quotient(a + (b - 1), b)


def minimum(a, b):
    """Return `jnp.minimum`, static where both sides are."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def maximum(a, b):
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def split_step(step, count, group_size):
    if group_size == 1:
        return np.int32(0), step
    step = lax.convert_element_type(step, jnp.int32)
    count = maximum(count, 1)
    return quotient(step, count), remainder(step, count)


class Rows(NamedTuple):
    """A reference's rows from `first` on; the functions below take it like a reference."""

    ref: Any
    first: Any


def rows_from(ref, first):
    """Return a reference's rows from `first` on: the reference itself if `first` is always 0."""
    return ref if isinstance(first, int) and first == 0 else Rows(ref, first)


def locate_rows(ref, start):
    """Return the reference that holds row `start`, and the row's index in it."""
    if not isinstance(ref, Rows):
        return ref, start
    # The mask clears no bit. It tells the compiler that the sum does not overflow, so that a tile's
    # rows share an address: at head size 64 four programs then fit an SM90 (Triton 3.6).
    bits = max(ref.ref.shape).bit_length()
    return ref.ref, ref.first + (start & (2**bits - 1))


def load_tile(ref, start, num_rows, block_rows, size, mask_rows, exists=None, head=None):
    """Load rows of ``ref`` or ``ref[:, head, :]``; with mask_rows missing rows are 0."""
    block_size = padded_head_dim(size)
    rows = arange(block_rows)[:, None]
    cols = arange(block_size)[None, :]
    tile = tile_of(ref, start, block_rows, block_size, head)
    if mask_rows:
        kept = rows < num_rows - start if exists is None else exists[:, None]
        return plt.load(tile, mask=kept & (cols < size), other=0.0)
    if block_size != size:
        shape = (block_rows, block_size)
        return plt.load(tile, mask=jnp.broadcast_to(cols < size, shape), other=0.0)
    return plt.load(tile)


def store_tile(ref, x, start, num_rows, block_rows, size):
    block_size = padded_head_dim(size)
    rows = arange(block_rows)[:, None]
    cols = arange(block_size)[None, :]
    tile = tile_of(ref, start, block_rows, block_size)
    plt.store(tile, x.astype(tile.dtype), mask=(rows < num_rows - start) & (cols < size))


def tile_of(ref, start, block_rows, block_size, head=None):
    """Return a view of rows start .. start + block_rows, in int32 even under jax_enable_x64."""
    ref, start = locate_rows(ref, start)
    rows, cols = pl.ds(start, block_rows), pl.ds(np.int32(0), block_size)
    return ref.at[rows, cols] if head is None else ref.at[rows, head, cols]


def load_rows(ref, start, num_rows, block_rows, other):
    exists = start + arange(block_rows) < num_rows
    ref, start = locate_rows(ref, start)
    return plt.load(ref.at[pl.ds(start, block_rows)], mask=exists, other=other)


def load_padded_rows(ref, start, block_rows, head=None):
    ref, start = locate_rows(ref, start)
    rows = pl.ds(start, block_rows)
    return ref[rows] if head is None else ref[head, rows]


def store_rows(ref, x, start, num_rows, block_rows):
    exists = start + arange(block_rows) < num_rows
    ref, start = locate_rows(ref, start)
    plt.store(ref.at[pl.ds(start, block_rows)], x, mask=exists)


def arange(size):
    """Return 0 .. size - 1 as int32, even under jax_enable_x64."""
    return jnp.arange(size, dtype=jnp.int32)
