"""Prefixes: which sequences of a batch begin with the same pages, and how many they share."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_attn.kernels.library.tiles import arange, cdiv

# Pages that a program compares at a time.
_BLOCK_PAGES = 128
_NO_PAGE = 2**31 - 1


def find_leaders(table_ref, len_ref, tiles, first, page_size, tokens):
    own, other = first + arange(tiles.members), arange(tiles.block_batch)
    page, pages = _begin(table_ref, len_ref, other, page_size, tokens)
    own_page, own_pages = _begin(table_ref, len_ref, own, page_size, tokens)
    has_pages = (pages > 0)[None, :] & (own_pages > 0)[:, None]
    is_alike = has_pages & (page[None, :] == own_page[:, None])
    before = jnp.sum((is_alike & (other[None, :] < own[:, None])).astype(jnp.int32), 1)
    behind = jnp.sum((is_alike & (other[None, :] > own[:, None])).astype(jnp.int32), 1)
    is_first = before % tiles.members == 0
    exists = own < len_ref.shape[0]
    return own, is_first & (behind > 0), is_first & (behind == 0) & exists


def find_members(table_ref, len_ref, tiles, leader, page_size, tokens):
    other, max_pages = arange(tiles.block_batch), table_ref.shape[1]
    page, pages = _begin(table_ref, len_ref, other, page_size, tokens)
    first_page = jnp.max(jnp.where(other == leader, page, -(2**31)), 0)
    is_alike = (other >= leader) & (pages > 0) & (page == first_page)
    place = jnp.cumsum(is_alike, dtype=jnp.int32) - 1
    is_placed = is_alike[None, :] & (place[None, :] == arange(tiles.members)[:, None])
    member = jnp.max(jnp.where(is_placed, other[None, :], -1), 1)
    common = jnp.min(jnp.min(jnp.where(is_placed, pages[None, :], max_pages), 1), 0)

    # Find the first page that not all of them share.
    is_member, shape = member >= 0, (tiles.members, _BLOCK_PAGES)
    rows = jnp.broadcast_to(jnp.maximum(member, 0)[:, None], shape)

    def visit(step, differs):
        entry = lax.convert_element_type(step, jnp.int32) * _BLOCK_PAGES + arange(_BLOCK_PAGES)
        first = plt.load(
            table_ref.at[jnp.full_like(entry, leader), entry], mask=entry < common, other=0
        )
        inside = is_member[:, None] & (entry < common)[None, :]
        entry = jnp.broadcast_to(entry[None, :], shape)
        others = plt.load(table_ref.at[rows, entry], mask=inside, other=0)
        is_other = inside & (others != first[None, :])
        return jnp.minimum(differs, jnp.where(is_other, entry, _NO_PAGE))

    differs = jnp.full(shape, _NO_PAGE, jnp.int32)
    differs = lax.fori_loop(0, cdiv(common, _BLOCK_PAGES), visit, differs)
    common = jnp.minimum(common, jnp.min(jnp.min(differs, 1), 0))
    return member, common * page_size // tiles.block_keys * tiles.block_keys


def _begin(table_ref, len_ref, sequence, page_size, tokens):
    batch_size, max_pages = table_ref.shape
    exists = sequence < batch_size
    length = plt.load(len_ref.at[sequence], mask=exists, other=0)
    # Loaded without waiting for the length, which says whether it counts.
    page = plt.load(table_ref.at[sequence, jnp.zeros_like(sequence)], mask=exists, other=0)
    length = jnp.minimum(jnp.maximum(length, 0), max_pages * page_size)
    return page, jnp.maximum(length - tokens, 0) // page_size
