"""Pages: a tile of keys or values is a TMA instruction for each of its pages."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_attn.kernels.sm90.pipeline import (
    barrier,
    load_box,
    num_pieces,
    piece,
    piece_start,
    tile_bytes,
)


@gluon.jit
def find_pages(table_ptr, start, end, num_pages, PAGE_SIZE: gl.constexpr, BLOCK: gl.constexpr):
    """Return the pages of keys start .. start + BLOCK of a sequence.

    For a page from `end` on the table is not read; it becomes `num_pages`, which is none. An id out
    of range, which is the caller's mistake, becomes one within the pool.
    """
    ROWS: gl.constexpr = PAGE_SIZE if PAGE_SIZE < BLOCK else BLOCK
    pages = ()
    for i in gl.static_range(BLOCK // ROWS):
        key = start + i * ROWS
        page = gl.load(table_ptr + key // PAGE_SIZE, mask=key < end, other=0)
        page = gl.minimum(gl.maximum(page, 0), num_pages - 1)
        pages = pages + (gl.where(key < end, page, num_pages),)
    return pages


@gluon.jit
def load_pages(
    maps, tile, slot, pages, start, head, full, PAGE_SIZE: gl.constexpr, SIZE: gl.constexpr
):
    """Load the keys from `start` on to a tile; `full` completes when they are there.

    A page that is none becomes 0.
    """
    BLOCK: gl.constexpr = tile[0].shape[3]
    ROWS: gl.constexpr = BLOCK // len(pages)
    mbarrier.expect(full, tile_bytes(BLOCK, SIZE))
    for i in gl.static_range(len(pages)):
        for j in gl.static_range(num_pieces(SIZE)):
            rows = tile[j].index(slot).slice(i * ROWS, ROWS, dim=2)
            place = [
                pages[i],
                head,
                start % PAGE_SIZE if PAGE_SIZE > ROWS else 0,
                piece_start(SIZE, j),
            ]
            load_box(maps[j], place, full, rows)


@gluon.jit
def clear_values(tile, slot, count, full, phase):
    """Set what follows the first `count` values of a tile to 0, once `full` has completed.

    It may be NaN, which a product with 0 keeps. Each consumer does so for itself: what another one
    reads meanwhile changes to 0, or not at all.
    """
    if count < tile[0].shape[3]:
        mbarrier.wait(full, phase)
        for i in gl.static_range(len(tile)):
            for j in gl.static_range(tile[0].shape[3] // 16):
                _clear_rows(piece(tile[i], slot).slice(16 * j, 16, dim=0), count - 16 * j)
        fence_async_shared()
        barrier()


@gluon.jit
def _clear_rows(rows, count):
    if count < 16:
        layout: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
        x = rows.load(layout)
        row = gl.arange(0, 16, gl.SliceLayout(1, layout))
        rows.store(gl.where((row < count)[:, None], x, 0.0))
