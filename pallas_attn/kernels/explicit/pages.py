"""Pages: a tile of keys or values takes one TMA copy for each of its pages."""

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.explicit.tma import load_tile


def find_pages(table_ref, sequence, start, end, num_pages, page_size, block):
    """Return the pages of keys from `start` on; from `end` on they are `num_pages`, no page."""
    last_page = lax.div(jnp.maximum(end - 1, 0), page_size)
    pages = []
    for first in range(0, block, min(page_size, block)):
        key = start + first
        page = table_ref[sequence, jnp.minimum(lax.div(key, page_size), last_page)]
        page = jnp.minimum(jnp.maximum(page, 0), num_pages - 1)
        pages.append(jnp.where(key < end, page, num_pages))
    return pages


def load_pages(pool, tile, pages, start, head, page_size, barrier):
    """Start to load the keys from `start` on by TMA; keys without a page become 0."""
    rows = tile.copied[0].shape[0] // len(pages)
    for i, page in enumerate(pages):
        load_tile(pool, tile.rows(i * rows, rows), page, head, lax.rem(start, page_size), barrier)
