"""In-kernel building blocks, named as in the Pallas twin.

Scores live in the exponent's base-2 domain: ``exp(x) = exp2(x * log2(e))``, so that one hardware
instruction gives p. `exp2_scale` takes a score there; it is ``scale * log2(e)`` when the scale is
positive and no softcap stands between (the product folds into the exponent's subtraction), else
``log2(e)`` after the score was scaled by itself.
"""

import triton
import triton.language as tl

# Row vectors that the backward's kernels share are padded to a multiple of this many rows, so that
# a tile of them is loaded without a mask. block_q of the backward divides it.
ROW_PADDING = tl.constexpr(128)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def visible_tiles(
    start,
    size,
    size_other,
    left,
    right,
    BLOCK: tl.constexpr,
    BLOCK_OTHER: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Which tiles of the other axis the rows start .. start + BLOCK see.

    Row i stands at position ``p = i + size_other - size`` and sees ``p - left .. p + right``.
    Queries see keys with the window's (left, right), keys see queries with (right, left).

    Returns (begin, before, full, after): the first tile that has something to see starts at
    `begin`; from there `before` tiles need a mask, then `full` tiles need none, then `after`
    tiles need one. Every other tile is skipped.
    """
    first = start + size_other - size
    last = tl.minimum(start + BLOCK, size) - 1 + size_other - size
    begin = 0
    full_begin = 0
    end = size_other
    full_end = size_other
    if HAS_LEFT:
        begin = tl.maximum(first - left, 0) // BLOCK_OTHER * BLOCK_OTHER
        full_begin = tl.maximum(last - left, 0)
    if HAS_RIGHT:
        end = tl.minimum(tl.maximum(last + right + 1, 0), size_other)
        full_end = tl.minimum(tl.maximum(first + right + 1, 0), size_other)
    visible = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_OTHER)
    before = tl.minimum(tl.cdiv(full_begin - begin, BLOCK_OTHER), visible)
    full = tl.maximum(full_end - begin, 0) // BLOCK_OTHER - before
    full = tl.minimum(tl.maximum(full, 0), visible - before)
    return begin, before, full, visible - before - full


@triton.jit
def count_tiles(before, full, after, MASKED: tl.constexpr):
    """How many tiles there are of one kind: those at the edges, or the full ones between."""
    count = full
    if MASKED:
        count = before + after
    return count


@triton.jit
def tile_start(index, begin, before, full, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """First row of tile `index` of one kind."""
    if MASKED:
        tile = tl.where(index < before, index, index + full)
    else:
        tile = index + before
    return begin + tile * BLOCK


@triton.jit
def split_step(step, count, GROUP_SIZE: tl.constexpr):
    """Head of the group and index of the tile, at one step of a walk over `count` tiles a head.

    A compiler may compute this ahead of a loop that then makes no step, so `count` may be 0 here.
    """
    if GROUP_SIZE == 1:
        member, index = 0, step
    else:
        count = tl.maximum(count, 1)
        member, index = step // count, step % count
    return member, index


@triton.jit
def head_base(pointer, batch, head, batch_stride, head_stride, ALIGN: tl.constexpr):
    """Where one head of a [B, S, H, D] tensor begins; ALIGN divides both strides."""
    offset = batch * batch_stride + head.to(tl.int64) * head_stride
    return pointer + tl.multiple_of(offset, ALIGN)


@triton.jit
def load_tile(
    base,
    start,
    num_rows,
    STRIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASK_ROWS: tl.constexpr,
):
    """Rows start .. start + BLOCK_ROWS of a [num_rows, SIZE] matrix.

    Columns are padded with zeros to BLOCK_SIZE. STRIDE is the distance of rows in elements.
    MASK_ROWS: rows past `num_rows` give 0.
    """
    rows = tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    if STRIDE * BLOCK_ROWS >= 2**31:
        rows = rows.to(tl.int64)
    pointers = base + tl.cast(start, tl.int64) * STRIDE + rows * STRIDE + cols
    if MASK_ROWS:
        x = tl.load(pointers, mask=(rows < num_rows - start) & (cols < SIZE), other=0.0)
    elif BLOCK_SIZE != SIZE:
        x = tl.load(pointers, mask=cols < SIZE, other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def store_tile(
    base,
    x,
    start,
    num_rows,
    stride,
    BLOCK_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The inverse of `load_tile`; rows past `num_rows` and columns past SIZE are not written."""
    rows = tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    pointers = base + (start + rows).to(tl.int64) * stride + cols
    tl.store(pointers, x.to(base.dtype.element_ty), mask=(rows < num_rows - start) & (cols < SIZE))


@triton.jit
def attention_scores(
    a, b, scale, softcap, SCALE_FIRST: tl.constexpr, HAS_SOFTCAP: tl.constexpr, more=None
):
    """a · bᵀ in float32, scaled where the exponent cannot do it (SCALE_FIRST), then capped.

    `more` is added to the product: that of further columns.
    """
    s = tl.dot(a, tl.trans(b), more, input_precision="ieee")
    if SCALE_FIRST:
        s = s * scale
    if HAS_SOFTCAP:
        s = softcap * tanh(s / softcap)
    return s


@triton.jit
def softcap_derivative(s, softcap):
    """d capped / d score, from the capped score: ``1 - tanh²``."""
    t = s / softcap
    return 1.0 - t * t


@triton.jit
def tanh(x):
    """Hyperbolic tangent to a few float32 ulps; by series near 0, where ``1 - exp`` cancels."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    ratio = (1.0 - e) / (1.0 + e)
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 - x2 * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.15, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def attention_mask(
    s,
    position,
    key,
    end,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Scores of keys that a query at `position` does not see become -inf.

    So do those of keys from `end` on, which do not exist (None: all do, or their rows are not
    stored). Positions and keys may be counted from any one origin.
    """
    if end is not None:
        s = tl.where(key < end, s, float("-inf"))
    if HAS_LEFT:
        s = tl.where(key >= position - window_left, s, float("-inf"))
    if HAS_RIGHT:
        s = tl.where(key <= position + window_right, s, float("-inf"))
    return s


@triton.jit
def online_softmax_update(s, m_i, l_i, exp2_scale):
    """One step of the running softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1).

    Invariant: m_i is the row maximum so far (base 2), l_i the sum of ``exp2(s * exp2_scale - m_i)``
    and the caller's acc the product of that with v. A row without a key so far keeps m_i = -inf and
    l_i = 0. Returns p of this tile, what rescales acc to the new maximum, and the new m_i and l_i.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1) * exp2_scale)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * exp2_scale - m_safe[:, None])
    alpha = tl.exp2(m_i - m_safe)
    l_i = l_i * alpha + tl.sum(p, 1)
    return p, alpha, m_new, l_i


@triton.jit
def keys_of_sequence(lens_ptr, batch, capacity, tokens, window_left, HAS_LEFT: tl.constexpr):
    """The keys begin .. end that the new tokens of a sequence see; end is its length."""
    end = tl.minimum(tl.maximum(tl.load(lens_ptr + batch), 0), capacity)
    begin = 0
    if HAS_LEFT:
        begin = tl.maximum(end - tokens - window_left, 0)
    return begin, end


@triton.jit
def share_of_tiles(begin, end, split, num_splits, BLOCK: tl.constexpr):
    """The tiles of keys begin .. end that are one split's.

    Splits get equal shares, the last ones less or none. Returns (first, count, tiles): the split's
    first tile, how many it has, and how many there are in all.
    """
    first = begin // BLOCK
    tiles = tl.cdiv(end, BLOCK) - first
    share = tl.cdiv(tiles, num_splits)
    count = tl.minimum(tl.maximum(tiles - split * share, 0), share)
    return first + split * share, count, tiles


@triton.jit
def locate_keys(
    table_ptr, start, length, num_pages, PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr
):
    """Page and slot of keys start .. start + BLOCK_KV of a sequence.

    Table entries past the sequence's last page are not read. A page id out of range, which is
    the caller's mistake, becomes one within the pool.
    """
    offset = tl.arange(0, BLOCK_KV)
    if PAGE_SIZE % BLOCK_KV == 0:
        page = tl.load(table_ptr + start // PAGE_SIZE)
        slot = start % PAGE_SIZE + offset
    else:
        key = start + offset
        page = tl.load(table_ptr + key // PAGE_SIZE, mask=key < length, other=0)
        slot = key % PAGE_SIZE
    return tl.minimum(tl.maximum(page, 0), num_pages - 1), slot


@triton.jit
def load_columns(
    rows,
    is_row,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Columns FIRST, FIRST + STEP, ... of the rows at the pointers `rows`, SIZE of them.

    Padded with zeros to BLOCK_SIZE; a row that is none gives 0.
    """
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    pointers = rows[:, None] + FIRST + STEP * cols
    return tl.load(pointers, mask=is_row[:, None] & (cols < SIZE), other=0.0)


@triton.jit
def store_columns(
    rows,
    x,
    is_row,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The inverse of `load_columns`."""
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    pointers = rows[:, None] + FIRST + STEP * cols
    mask = is_row[:, None] & (cols < SIZE)
    tl.store(pointers, x.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def load_keys(
    base,
    page,
    slot,
    exists,
    page_stride,
    SLOT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAST_2G: tl.constexpr,
):
    """Rows of one head at the given pages and slots, padded with zeros to BLOCK_SIZE columns.

    SLOT is the distance of slots in elements. A row that does not exist is 0, whatever its slot
    holds. PAST_2G: an offset may take more than 31 bits.
    """
    if PAST_2G:
        page, slot = page.to(tl.int64), slot.to(tl.int64)
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    pointers = base + (page * page_stride + slot * SLOT)[:, None] + cols
    return tl.load(pointers, mask=exists[:, None] & (cols < SIZE), other=0)


@triton.jit
def add_sink(sink, m_i, l_i):
    """Count one more logit, without a value, into a running softmax (Xiao et al. 2023).

    Returns what rescales acc to the new maximum, and the new m_i and l_i.
    """
    sink = sink * LOG2E
    m_new = tl.maximum(m_i, sink)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m_i - m_safe)
    l_i = l_i * alpha + tl.exp2(sink - m_safe)
    return alpha, m_new, l_i
