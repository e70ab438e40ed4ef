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
FLOAT8_MAX = 448.0  # the largest float8_e4m3fn
ROUND_TO_INTEGER = 12582912.0  # 1.5 * 2^23: adding it rounds away the fraction
ROUND_TO_INTEGER_BITS = 0x4B400000


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


def attention_scores(a, b, scale, softcap, scale_first):
    """a · bᵀ in float32, scaled where the exponent cannot do it (scale_first), then capped."""
    s = dot(a, b.T)
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


def online_softmax_update(s, m_i, l_i, acc, exp2_scale):
    """One step of the running softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1).

    Invariant: m_i is the row maximum so far (base 2), l_i the sum and acc the p·v product of
    ``exp2(s * exp2_scale - m_i)``. A row without a key so far keeps m_i = -inf and l_i = 0.
    Returns p of this tile and the three, rescaled to the new maximum (acc without this tile's p·v).
    """
    m_new = jnp.maximum(m_i, jnp.max(s, 1) * exp2_scale)
    m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new)
    p = jnp.exp2(s * exp2_scale - m_safe[:, None])
    alpha = jnp.exp2(m_i - m_safe)
    l_i = l_i * alpha + jnp.sum(p, 1)
    acc = acc * alpha[:, None]
    return p, m_new, l_i, acc


def dot(a, b):
    """a · b accumulated in float32; float32 operands multiply in IEEE precision."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def arange(size):
    """0 .. size - 1 as int32, whatever jax_enable_x64 says."""
    return jnp.arange(size, dtype=jnp.int32)


def share_of_tiles(begin, end, split, num_splits, block):
    """The tiles of keys begin .. end that are one split's: (the first, how many).

    Splits get equal shares, the last ones less or none.
    """
    first = begin // block
    tiles = cdiv(end, block) - first
    share = cdiv(tiles, num_splits)
    count = jnp.minimum(jnp.maximum(tiles - split * share, 0), share)
    return first + split * share, count


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


def load_rows_at(ref, index, is_row, size, block_size):
    """Rows ``ref[*index]`` of a reference, padded with zeros; a row that is none gives 0."""
    tile, mask = rows_at(ref, index, is_row, size, block_size)
    return plt.load(tile, mask=mask, other=zeros(mask, ref.dtype))


def zeros(mask, dtype):
    """The `other` of a masked load; the lowering has no constants in float8."""
    if dtype == jnp.float8_e4m3fn:
        return lax.bitcast_convert_type(jnp.where(mask, np.uint8(0), np.uint8(0)), dtype)
    return jnp.zeros((), dtype)


def store_rows_at(ref, x, index, is_row, size, block_size):
    """The inverse of `load_rows_at`; a row that is none is not written."""
    tile, mask = rows_at(ref, index, is_row, size, block_size)
    plt.store(tile, x.astype(ref.dtype), mask=mask)


def rows_at(ref, index, is_row, size, block_size):
    """A view of rows ``ref[*index]``, one vector of indices a dimension, and which elements are."""
    shape = (*is_row.shape, block_size)
    cols = jnp.broadcast_to(arange(block_size)[None, :], shape)
    index = (jnp.broadcast_to(x, is_row.shape) for x in index)
    index = (jnp.broadcast_to(x[:, None], shape) for x in index)
    return ref.at[(*index, cols)], is_row[:, None] & (cols < size)


def dequantize(x, dtype):
    """What a cache holds, in `dtype`, not yet times its scale.

    float8_e4m3fn, which SM80 does not have, is taken apart: the bits below its sign, moved to
    float16's, are the number times 2^-8.
    """
    if x.dtype == jnp.float8_e4m3fn:
        bits = lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.uint16)
        magnitude = bits & jnp.uint16(0x7F)
        bits = ((bits & jnp.uint16(0x80)) << jnp.uint16(8)) | (magnitude << jnp.uint16(7))
        y = lax.bitcast_convert_type(bits, jnp.float16) * jnp.float16(256)
        x = jnp.where(magnitude == 0x7F, jnp.float16(float("nan")), y)
    return x.astype(dtype)


def add_sink(sink, m_i, l_i, acc):
    """Count one more logit, without a value, into a running softmax (Xiao et al. 2023)."""
    sink = sink * LOG2E
    m_new = jnp.maximum(m_i, sink)
    m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new)
    alpha = jnp.exp2(m_i - m_safe)
    l_i = l_i * alpha + jnp.exp2(sink - m_safe)
    return m_new, l_i, acc * alpha[:, None]


def store_key(ref, x, index, writes, scale, size, block_size):
    """Store rows in a cache, quantised by `scale`, one number a row; None where it is not."""
    if scale is not None:
        x = quantize(x.astype(jnp.float32) / scale[:, None], ref.dtype)
    store_rows_at(ref, x, index, writes, size, block_size)


def round_to_integer(x):
    """float32 below 2^22 as int32, to nearest, ties to even.

    The sum's last bits are the integer. Subtracting the constant again would do, but XLA folds it.
    """
    bits = lax.bitcast_convert_type(x + ROUND_TO_INTEGER, jnp.int32)
    return bits - ROUND_TO_INTEGER_BITS


def quantize(x, dtype):
    """float32 as int8 or float8_e4m3fn; to nearest, ties to even."""
    if dtype == jnp.int8:
        x = jnp.minimum(jnp.maximum(x, -127.0), 127.0)
        return round_to_integer(x).astype(jnp.int8)
    sign = (x < 0).astype(jnp.int32) << 7
    magnitude = jnp.minimum(jnp.abs(x), FLOAT8_MAX)
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    # A normal number: round off 20 of 23 bits, then move the exponent's bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6, a multiple of 2^-9.
    tiny = round_to_integer(magnitude * 512.0)
    y = sign | jnp.where(magnitude < 0.015625, tiny, normal)
    return lax.bitcast_convert_type(jnp.where(x == x, y, 0x7F).astype(jnp.uint8), dtype)
