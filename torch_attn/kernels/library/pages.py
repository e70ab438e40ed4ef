"""Pages: which keys a decode's program reads, and where they are in the pool."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_attn.layouts import Layout


class StateStrides(NamedTuple):
    """Strides of outputs [N, B, S, H, Dv] or log-sum-exps [N, B, H, S]; `state` may be None."""

    state: Any
    batch: Any
    token: Any
    head: Any


class PoolStrides(NamedTuple):
    """Strides of a pool [P, page_size, Hkv, D] with a contiguous last dimension."""

    page: Any
    slot: Any
    head: Any


class Cache(NamedTuple):
    """A paged KV cache.

    Pools' strides and the page size are constants, for a short way to the first key. The page size
    is last because of Triton 3.6, see `torch_attn.kernels.library.mask.Mask`.

    Attributes:
        v: None if values are the first columns of k; v_scale then is k's.
        tables, lens: [B, max_pages] and [B], int32.
        k_scale, v_scale: [] or [Hkv], float32, or None; their strides are 0 if heads share one.
    """

    k: Any
    v: Any
    tables: Any
    lens: Any
    k_scale: Any
    v_scale: Any
    k_scale_stride: Any = None
    v_scale_stride: Any = None
    table_stride: Any = None
    k_strides: Any = None
    v_strides: Any = None
    page_size: Any = None


@triton.jit
def keys_of_sequence(lens_ptr, batch, capacity, tokens, window_left):
    """Return begin and end of the keys that new tokens see; end is the length."""
    end = tl.minimum(tl.maximum(tl.load(lens_ptr + batch), 0), capacity)
    begin = 0
    if window_left is not None:
        begin = tl.maximum(end - tokens - window_left, 0)
    return begin, end


@triton.jit
def keys_of_tokens(length, tokens, first, last, window_left):
    """Return begin and end of the keys that tokens first .. last see; none if past the tokens."""
    diagonal = length - tokens
    end = tl.where(first < tokens, tl.maximum(diagonal + last + 1, 0), 0)
    begin = 0
    if window_left is not None:
        begin = tl.minimum(tl.maximum(diagonal + first - window_left, 0), end)
    return begin, end


@triton.jit
def tiles_at_edges(position, last_position, first, count, window_left, BLOCK: tl.constexpr):
    """Divide tiles into (before, full, after), as `visible_tiles` does, for some positions."""
    before = 0
    if window_left is not None:
        begin = tl.cdiv(tl.maximum(last_position - window_left, 0), BLOCK)
        before = tl.minimum(tl.maximum(begin - first, 0), count)
    end = tl.maximum(position + 1, 0) // BLOCK
    full = tl.minimum(tl.maximum(end - first - before, 0), count - before)
    return before, full, count - before - full


@triton.jit
def share_of_tiles(begin, end, split, num_splits, BLOCK: tl.constexpr):
    """Return a split's equal share of tiles begin .. end: (first, count, total of all)."""
    first = begin // BLOCK
    total = tl.cdiv(end, BLOCK) - first
    share = tl.cdiv(total, num_splits)
    count = tl.minimum(tl.maximum(total - split * share, 0), share)
    return first + split * share, count, total


@triton.jit
def splits_with_keys(begin, end, num_splits, BLOCK: tl.constexpr):
    """Return how many splits have a tile of keys begin .. end."""
    _, share, total = share_of_tiles(begin, end, 0, num_splits, BLOCK)
    return tl.cdiv(total, tl.maximum(share, 1))


@triton.jit
def locate_keys(
    table_ptr,
    start,
    length,
    num_pages,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PAST_2G: tl.constexpr,
):
    """Return the clamped pages and slots of keys, 64-bit if PAST_2G."""
    offset = tl.arange(0, BLOCK_KV)
    if PAGE_SIZE % BLOCK_KV == 0:
        page = tl.load(table_ptr + start // PAGE_SIZE)
        slot = start % PAGE_SIZE + offset
    else:
        key = start + offset
        page = tl.load(table_ptr + key // PAGE_SIZE, mask=key < length, other=0)
        slot = key % PAGE_SIZE
    page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
    if PAST_2G:
        page, slot = page.to(tl.int64), slot.to(tl.int64)
    return page, slot


@triton.jit
def load_rows_at(
    base,
    index,
    strides,
    is_row,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr = 0,
    STEP: tl.constexpr = 1,
):
    """Load columns FIRST, FIRST + STEP, ... of rows ``[*index]``; other rows give 0."""
    pointers, mask = rows_at(base, index, strides, is_row, SIZE, BLOCK_SIZE, FIRST, STEP)
    return tl.load(pointers, mask=mask, other=0)


@triton.jit
def store_rows_at(
    base, x, index, strides, is_row, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr = 0, STEP: tl.constexpr = 1,
):  # fmt: skip
    """Store what `load_rows_at` loads, where `is_row`."""
    pointers, mask = rows_at(base, index, strides, is_row, SIZE, BLOCK_SIZE, FIRST, STEP)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def rows_at(
    base,
    index,
    strides,
    is_row,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return pointers to rows ``[*index]``, scalars or vectors, and which elements exist."""
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    offset = index[0] * strides[0]
    for axis in tl.static_range(1, len(index)):
        offset += index[axis] * strides[axis]
    return base + offset[:, None] + FIRST + STEP * cols, is_row[:, None] & (cols < SIZE)


def strides_of_outputs(layout: Layout) -> StateStrides:
    *state, batch, token, head, _ = layout.strides
    return StateStrides(*state or (None,), batch, token, head)


def strides_of_lses(layout: Layout) -> StateStrides:
    *state, batch, head, token = layout.strides
    return StateStrides(*state or (None,), batch, token, head)
