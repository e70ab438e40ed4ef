"""In-kernel building blocks, named as in the Triton twin.

Scores live in the exponent's base-2 domain: ``exp(x) = exp2(x * log2(e))``, so that one hardware
instruction gives p. `exp2_scale` takes a score there; it is ``scale * log2(e)`` when the scale is
positive and no softcap stands between (the product folds into the exponent's subtraction), else
``log2(e)`` after the score was scaled by itself.

Shapes are static in JAX, so what the twin takes as a compile-time flag is here an argument that
may be None, and loops over no tile at all are not traced.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

# Row vectors that the backward's kernels share are padded to a multiple of this many rows, so that
# a tile of them is loaded without a mask. block_q of the backward divides it.
ROW_PADDING = 128
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def visible_tiles(start, size, size_other, left, right, block, block_other):
    """Which tiles of the other axis the rows start .. start + block see.

    Row i stands at position ``p = i + size_other - size`` and sees ``p - left .. p + right`` (None
    is unlimited). Queries see keys with the window's (left, right), keys see queries with
    (right, left).

    Returns (begin, before, full, after): the first tile that has something to see starts at
    `begin`; from there `before` tiles need a mask, then `full` tiles need none, then `after`
    tiles need one. Every other tile is skipped.
    """
    first = start + size_other - size
    last = jnp.minimum(start + block, size) - 1 + size_other - size
    begin = 0
    full_begin = 0
    end = size_other
    full_end = size_other
    if left is not None:
        begin = jnp.maximum(first - left, 0) // block_other * block_other
        full_begin = jnp.maximum(last - left, 0)
    if right is not None:
        end = minimum(jnp.maximum(last + right + 1, 0), size_other)
        full_end = minimum(jnp.maximum(first + right + 1, 0), size_other)
    visible = cdiv(maximum(end - begin, 0), block_other)
    before = minimum(cdiv(full_begin - begin, block_other), visible)
    full = maximum(full_end - begin, 0) // block_other - before
    full = minimum(maximum(full, 0), visible - before)
    return begin, before, full, visible - before - full


def count_tiles(before, full, after, masked):
    """How many tiles there are of one kind: those at the edges, or the full ones between."""
    return before + after if masked else full


def tile_start(index, begin, before, full, block, masked):
    """First row of tile `index` of one kind."""
    if masked:
        tile = jnp.where(index < before, index, index + full)
    else:
        tile = index + before
    return begin + lax.convert_element_type(tile, jnp.int32) * block


def cdiv(a, b):
    """a / b rounded up, for a >= 0; unlike `pl.cdiv` it takes a traced int32 in 64-bit mode."""
    return (a + (b - 1)) // b


def minimum(a, b):
    """Like `jnp.minimum`, but static where both sides are."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def maximum(a, b):
    """Like `jnp.maximum`, but static where both sides are."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def split_step(step, count, group_size):
    """Head of the group and index of the tile, at one step of a walk over `count` tiles a head.

    A compiler may compute this ahead of a loop that then makes no step, so `count` may be 0 here.
    """
    if group_size == 1:
        return np.int32(0), step
    step = lax.convert_element_type(step, jnp.int32)
    count = maximum(count, 1)
    return step // count, step % count


def load_tile(ref, start, num_rows, block_rows, size, block_size, mask_rows, head=None):
    """Rows start .. start + block_rows of a [num_rows, size] matrix.

    Columns are padded with zeros to block_size. mask_rows: rows past `num_rows` give 0. head: the
    matrix is ``ref[:, head, :]``.
    """
    rows = arange(block_rows)[:, None]
    cols = arange(block_size)[None, :]
    tile = tile_of(ref, start, block_rows, block_size, head)
    if mask_rows:
        return plt.load(tile, mask=(rows < num_rows - start) & (cols < size), other=0.0)
    if block_size != size:
        shape = (block_rows, block_size)
        return plt.load(tile, mask=jnp.broadcast_to(cols < size, shape), other=0.0)
    return plt.load(tile)


def store_tile(ref, x, start, num_rows, block_rows, size, block_size):
    """The inverse of `load_tile`; rows past `num_rows` and columns past `size` are not written."""
    rows = arange(block_rows)[:, None]
    cols = arange(block_size)[None, :]
    tile = tile_of(ref, start, block_rows, block_size)
    plt.store(tile, x.astype(ref.dtype), mask=(rows < num_rows - start) & (cols < size))


def tile_of(ref, start, block_rows, block_size, head=None):
    """A view of rows start .. start + block_rows; int32 indices, whatever jax_enable_x64 says."""
    rows, cols = pl.ds(start, block_rows), pl.ds(np.int32(0), block_size)
    return ref.at[rows, cols] if head is None else ref.at[rows, head, cols]


def load_rows(ref, start, num_rows, block_rows, other):
    """Elements start .. start + block_rows of a vector of `num_rows`; `other` past its end."""
    rows = start + arange(block_rows)
    return plt.load(ref.at[pl.ds(start, block_rows)], mask=rows < num_rows, other=other)


def store_rows(ref, x, start, num_rows, block_rows):
    """The inverse of `load_rows`."""
    rows = start + arange(block_rows)
    plt.store(ref.at[pl.ds(start, block_rows)], x, mask=rows < num_rows)


def attention_scores(a, b, scale, softcap, scale_first, more=None):
    """a · bᵀ in float32, scaled where the exponent cannot do it (scale_first), then capped.

    `more` is added to the product: that of further columns.
    """
    s = dot(a, b.T)
    if more is not None:
        s = more + s
    if scale_first:
        s = s * scale
    if softcap is not None:
        s = softcap * tanh(s / softcap)
    return s


def softcap_derivative(s, softcap):
    """d capped / d score, from the capped score: ``1 - tanh²``."""
    t = s / softcap
    return 1.0 - t * t


def tanh(x):
    """Hyperbolic tangent to a few float32 ulps; by series near 0, where ``1 - exp`` cancels."""
    e = jnp.exp2(jnp.abs(x) * (-2.0 * LOG2E))
    ratio = (1.0 - e) / (1.0 + e)
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 - x2 * (17.0 / 315.0))))
    return jnp.where(jnp.abs(x) < 0.15, series, jnp.where(x < 0, -ratio, ratio))


def attention_mask(s, position, key, end, window_left, window_right):
    """Scores of keys that a query at `position` does not see become -inf.

    So do those of keys from `end` on, which do not exist (None: all do, or their rows are not
    stored). Positions and keys may be counted from any one origin.
    """
    if end is not None:
        s = jnp.where(key < end, s, float("-inf"))
    if window_left is not None:
        s = jnp.where(key >= position - window_left, s, float("-inf"))
    if window_right is not None:
        s = jnp.where(key <= position + window_right, s, float("-inf"))
    return s


def online_softmax_update(s, m_i, l_i, exp2_scale):
    """One step of the running softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1).

    Invariant: m_i is the row maximum so far (base 2), l_i the sum of ``exp2(s * exp2_scale - m_i)``
    and the caller's acc the product of that with v. A row without a key so far keeps m_i = -inf and
    l_i = 0. Returns p of this tile, what rescales acc to the new maximum, and the new m_i and l_i.
    """
    m_new = jnp.maximum(m_i, jnp.max(s, 1) * exp2_scale)
    m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new)
    p = jnp.exp2(s * exp2_scale - m_safe[:, None])
    alpha = jnp.exp2(m_i - m_safe)
    l_i = l_i * alpha + jnp.sum(p, 1)
    return p, alpha, m_new, l_i


def dot(a, b):
    """a · b accumulated in float32; float32 operands multiply in IEEE precision."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def arange(size):
    """0 .. size - 1 as int32, whatever jax_enable_x64 says."""
    return jnp.arange(size, dtype=jnp.int32)


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


def add_sink(sink, m_i, l_i):
    """Count one more logit, without a value, into a running softmax (Xiao et al. 2023).

    Returns what rescales acc to the new maximum, and the new m_i and l_i.
    """
    sink = sink * LOG2E
    m_new = jnp.maximum(m_i, sink)
    m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new)
    alpha = jnp.exp2(m_i - m_safe)
    l_i = l_i * alpha + jnp.exp2(sink - m_safe)
    return alpha, m_new, l_i
