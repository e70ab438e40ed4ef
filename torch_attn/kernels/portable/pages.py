"""Pages: which keys a program of a decode reads, and where in the pool they are."""

import triton
import triton.language as tl


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
