"""Where a program's tile is: a tile of queries that visits keys, or of keys that visits queries."""

from typing import Any, NamedTuple

from pallas_attn.kernels.library.intervals import load_intervals
from pallas_attn.kernels.library.scores import round_operand
from pallas_attn.kernels.library.segments import STAYS, load_segments
from pallas_attn.kernels.library.sequences import (
    TileRows,
    count_sequence_tiles,
    first_tile,
    locate_tile,
)
from pallas_attn.kernels.library.softmax import LOG2E, lse_to_subtract
from pallas_attn.kernels.library.tiles import (
    ROW_PADDING,
    arange,
    load_padded_rows,
    load_rows,
    load_tile,
    rows_from,
)


class Rows(NamedTuple):
    """A program's tile of one axis. What a mask lacks is None.

    Own rows are counted from the first row of all sequences, rows of the other axis from the
    sequence's first.

    Attributes:
        element: the batch element, or the packed sequence.
        head: the query head, or the first query head of a tile of keys.
        start, end: the tile's first row, and the end of the sequence's rows.
        diagonal: position on the other axis of row 0.
        padded: what is added to a query's row to find it in lse2 and delta.
        ids, exists: segments of the rows, and which are not padding.
        begins, ends: intervals that the rows see.
        member: the head in references that have several.
    """

    element: Any
    head: Any
    start: Any
    end: Any
    first: Any
    first_other: Any
    size_other: Any
    diagonal: Any
    padded: Any
    rows: Any
    ids: Any
    exists: Any
    begins: Any
    ends: Any
    member: Any


def own_queries(mask, place, seq_q, seq_kv, block):
    """Return the queries of a program; place: its tile, head and batch element."""
    tile, head, batch = place
    found = locate_tile(*mask.offsets, tile, seq_q, seq_kv, block)
    padded = first_tile(found.first, found.sequence, ROW_PADDING) * ROW_PADDING - found.first
    element = batch if mask.offsets.num_sequences is None else found.sequence
    return rows_at(mask, mask.segments.q_ids, element, head, found, padded, block)


def own_keys(mask, place, group_size, seq_q, seq_kv, block):
    tile, head, batch = place
    # Most queries see the first keys, which come first.
    tile = count_sequence_tiles(seq_kv, mask.offsets.num_sequences, block) - 1 - tile
    found = locate_tile(*reversed(mask.offsets), tile, seq_kv, seq_q, block)
    padded = first_tile(found.first_other, found.sequence, ROW_PADDING) * ROW_PADDING
    element = batch if mask.offsets.num_sequences is None else found.sequence
    ids_ref = mask.segments.kv_ids
    return rows_at(mask, ids_ref, element, head * group_size, found, padded, block)


def rows_at(mask, ids_ref, element, head, found: TileRows, padded, block, member=None):
    _sequence, first, start, end, first_other, size_other = found
    rows = start + arange(block)
    return Rows(
        element, head, start, end, first, first_other, size_other, size_other - end, padded, rows,
        *load_segments(ids_ref, start, end, block, STAYS),
        *load_intervals(mask.intervals, start, end, block), member,
    )  # fmt: skip


def load_own(ref, rows, rule, size):
    block = rows.rows.shape[0]
    x = load_tile(ref, rows.start, rows.end, block, size, True, rows.exists, rows.member)
    return round_operand(x, rule.precision)


def load_prepared(ref, first, start, block, member=None, across=False):
    """Load rows first + start .. of what `flash_bwd_preprocess_kernel` computed; None for None."""
    if ref is None:
        return None
    x = load_padded_rows(rows_from(ref, first), start, block, member)
    return x[None, :] if across else x[:, None]


def load_forward_lse(lse_ref, rest_ref, rows):
    """Load what `load_prepared` does from a forward's lse and its rest."""
    own = rows.start, rows.end, rows.rows.shape[0]
    lse, rest2 = load_rows(lse_ref, *own, float("inf")), None
    if rest_ref is not None:
        rest2 = (load_rows(rest_ref, *own, 0.0) * LOG2E)[:, None]
    return lse_to_subtract(lse, in_base_2=rest_ref is None)[:, None], rest2
