"""Prefixes: which sequences begin with the same pages, and how many they share.

Sequences with the same first page form tiles. A tile's prefix is the pages that all begin with,
before any new token.
"""

import triton
import triton.language as tl

# Pages that a program compares at once.
_BLOCK_PAGES = tl.constexpr(128)
_NO_PAGE = tl.constexpr(2147483647)


@triton.jit
def find_leaders(cache, tiles, first, batch_size, max_pages, TOKENS: tl.constexpr):
    """Return sequences first .., which begin a tile of several, and which are alone."""
    own = first + tl.arange(0, tiles.members)
    other = tl.arange(0, tiles.block_batch)
    page, pages = _begin(cache, other, batch_size, max_pages, TOKENS)
    own_page, own_pages = _begin(cache, own, batch_size, max_pages, TOKENS)
    is_alike = (
        (page[None, :] == own_page[:, None]) & (pages > 0)[None, :] & (own_pages > 0)[:, None]
    )
    before = tl.sum((is_alike & (other[None, :] < own[:, None])).to(tl.int32), 1)
    behind = tl.sum((is_alike & (other[None, :] > own[:, None])).to(tl.int32), 1)
    place = before % tiles.members
    return own, (place == 0) & (behind > 0), (place == 0) & (behind == 0) & (own < batch_size)


@triton.jit
def find_members(cache, tiles, leader, batch_size, max_pages, TOKENS: tl.constexpr):
    """Return the sequences of a leader's tile, then -1, and how many keys they share."""
    other = tl.arange(0, tiles.block_batch)
    page, pages = _begin(cache, other, batch_size, max_pages, TOKENS)
    table_ptr = cache.tables + leader.to(tl.int64) * cache.table_stride
    is_alike = (other >= leader) & (pages > 0) & (page == tl.load(table_ptr))
    place = tl.cumsum(is_alike.to(tl.int32), 0) - 1
    is_placed = is_alike[None, :] & (place[None, :] == tl.arange(0, tiles.members)[:, None])
    member = tl.max(tl.where(is_placed, other[None, :], -1), 1)
    common = tl.min(tl.min(tl.where(is_placed, pages[None, :], max_pages), 1), 0)

    # Find the first page that not all share.
    is_member = member >= 0
    rows = cache.tables + member.to(tl.int64)[:, None] * cache.table_stride
    differs = tl.full([tiles.members, _BLOCK_PAGES], _NO_PAGE, tl.int32)
    for start in tl.range(0, common, _BLOCK_PAGES):
        entry = start + tl.arange(0, _BLOCK_PAGES)
        first = tl.load(table_ptr + entry, mask=entry < common, other=0)
        inside = is_member[:, None] & (entry < common)[None, :]
        others = tl.load(rows + entry[None, :], mask=inside, other=0)
        is_other = inside & (others != first[None, :])
        differs = tl.minimum(differs, tl.where(is_other, entry[None, :], _NO_PAGE))
    common = tl.minimum(common, tl.min(tl.min(differs, 1), 0))
    return member, common * cache.page_size // tiles.block_keys * tiles.block_keys


@triton.jit
def _begin(cache, sequence, batch_size, max_pages, TOKENS: tl.constexpr):
    """Return sequences' first pages, and how many pages all their new tokens see in full."""
    exists = sequence < batch_size
    length = tl.load(cache.lens + sequence, mask=exists, other=0)
    # Loaded without waiting for the length.
    table = sequence.to(tl.int64) * cache.table_stride
    page = tl.load(cache.tables + table, mask=exists, other=0)
    length = tl.minimum(tl.maximum(length, 0), max_pages * cache.page_size)
    return page, tl.maximum(length - TOKENS, 0) // cache.page_size
