"""Pages: a tile of keys or values takes one TMA instruction for each of its pages."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_attn.kernels.explicit.tma import load_box, num_pieces, piece_start, tile_bytes


@gluon.jit
def find_pages(table_ptr, start, end, num_pages, PAGE_SIZE: gl.constexpr, BLOCK: gl.constexpr):
    """Return the pages of keys from `start` on, within the pool; from `end` on `num_pages`."""
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
    maps, tile, slot, pages, start, head, full, PAGE_SIZE: gl.constexpr, SIZE: gl.constexpr,
    FIRST: gl.constexpr = 0, END: gl.constexpr = None,
):  # fmt: skip
    """Load keys from `start` on, 0 without a page; `full` completes.

    FIRST, END: of the column pieces.
    """
    BLOCK: gl.constexpr = tile[0].shape[3]
    ROWS: gl.constexpr = BLOCK // len(pages)
    mbarrier.expect(full, tile_bytes(BLOCK, SIZE, FIRST, END))
    for i in gl.static_range(len(pages)):
        for j in gl.static_range(FIRST, num_pieces(SIZE) if END is None else END):
            rows = tile[j].index(slot).slice(i * ROWS, ROWS, dim=2)
            place = [
                pages[i],
                head,
                start % PAGE_SIZE if PAGE_SIZE > ROWS else 0,
                piece_start(SIZE, j),
            ]
            load_box(maps[j], place, full, rows)
