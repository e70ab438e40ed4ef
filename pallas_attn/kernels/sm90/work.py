"""A program's work: tiles of one axis, and the tiles of the other axis that each one visits."""

from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_attn.kernels.explicit.items import Place
from pallas_attn.kernels.explicit.wgmma_launch import Problem
from pallas_attn.kernels.library.tiles import Visible, cdiv, maximum, visible_tiles

# Consumer warpgroups of a backward's kernel, each with 64 rows of a tile.
CONSUMERS = 2


class Work(NamedTuple):
    """A tile of queries or of keys, and the tiles of the other axis that it visits.

    Attributes:
        first_row: its first row of lse2 and delta; for a tile of keys, that of its sequence.
        diagonal: the key position of query 0 of its sequence.
        visited: returns the first row of a step's tile; in `flash_fwd`, the end of keys as well.
        masked_steps, steps: how many tiles are at edges (these come first), and in all.
    """

    batch: Any
    place: Place
    head_kv: Any
    first_row: Any
    diagonal: Any
    visited: Callable[..., Any] | None = None
    masked_steps: Any = None
    steps: Any = None


def place_of(item: Any, rows: int, rows_other: int, heads: int, block: int) -> tuple[Any, Place]:
    """Return an item's batch element and place, of `make_schedule` or among packed sequences."""
    if isinstance(item, Place):
        return item.head * 0, item
    num_tiles = cdiv(rows, block)
    tile = item % num_tiles
    start = tile * block
    batch, head = item // num_tiles // heads, item // num_tiles % heads
    return batch, Place(head, tile, start, rows, 0, rows_other, 0)


def locate_queries(problem: Problem, heads: int, item: Any) -> tuple[Work, Visible, Any]:
    """Return a tile of queries as `Work`, its tiles of keys, and the last tile's first key."""
    batch, place = place_of(item, problem.seq_q, problem.seq_kv, heads, problem.block_q)
    first_row = place.tile * problem.block_q
    diagonal, window = place.size_other - place.end, problem.window
    visible = visible_tiles(
        place.start, place.end, place.size_other, diagonal, window.left, window.right,
        problem.block_q, problem.block_kv,
    )  # fmt: skip
    work = Work(batch, place, None, first_row, diagonal)
    return work, visible, last_tile(place.size_other, problem.block_kv)


def own_tile(full: Any, turn: Any, w: int) -> Any:
    """Return which tile in shared memory has a consumer's rows in a turn."""
    stages = full.shape[0] // CONSUMERS
    return w if stages == 1 else turn % stages * CONSUMERS + w


def last_tile(size: Any, block: int) -> Any:
    return maximum(cdiv(size, block) * block - block, 0)
