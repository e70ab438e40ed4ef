"""Keys that a query does not see because of their segment, end or depth, as in portable kernels.

A score is hidden by comparing a value of its row with one of its column. The rows' values stay in
registers. The columns' values are loaded only in steps that need a mask, before the scores are
awaited, where registers are free.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.library.segments import STAYS, VISITED


class Marks(NamedTuple):
    """Hold what decides, beside the window, which visited rows the rows of an item see.

    Each field is 0 where a problem lacks it.

    Attributes:
        ids: segments of the rows that stay, STAYS for padding.
        own_ids, other_ids: pointers to the segments of the rows that stay and of the rows that are
            visited, from row 0 on.
        ends: where queries stay, pointer to the keys' ends, from key 0 on; where keys stay, their
            ends, in query coordinates.
        depths: depths of the queries that stay, or the greatest depths that see the keys that stay.
        other_depths: pointer to the depths of the rows that are visited, from row 0 on.
    """

    ids: Any
    own_ids: Any
    other_ids: Any
    ends: Any
    depths: Any
    other_depths: Any


@gluon.jit
def mark_queries(mask, row_q, row_kv, rows, num_rows):
    """Return the `Marks` of queries.

    Args:
        mask: has segments, a tree and depths: a `library.mask.Mask`, or an `items.Problem`.
        row_q, row_kv: index of the ids and depths of query 0 and of key 0, and of the end of key 0.
        rows: the queries' rows, up to `num_rows`.
    """
    # Triton 3.6 cannot return None.
    ids, own_ids, other_ids, ends, depths, other_depths = 0, 0, 0, 0, 0, 0
    if mask.segments is not None:
        own_ids, other_ids = mask.segments.q + row_q, mask.segments.kv + row_kv
        ids = _load_ids(own_ids, rows, num_rows)
    if mask.tree is not None:
        ends = mask.tree.ends + row_kv
    if mask.depths is not None:
        depths = gl.load(mask.depths.q + row_q + rows, mask=rows < num_rows, other=0)
        other_depths = mask.depths.reach + row_kv
    return Marks(ids, own_ids, other_ids, ends, depths, other_depths)


@gluon.jit
def mark_keys(mask, row_q, row_kv, rows, num_rows, diagonal):
    """Return the `Marks` of keys.

    Args:
        mask, row_q, row_kv: as in `mark_queries`.
        rows: the keys' rows, up to `num_rows`.
        diagonal: position of query 0 of the sequence, counted as ends are.
    """
    ids, own_ids, other_ids, ends, depths, other_depths = 0, 0, 0, 0, 0, 0
    if mask.segments is not None:
        own_ids, other_ids = mask.segments.kv + row_kv, mask.segments.q + row_q
        ids = _load_ids(own_ids, rows, num_rows)
    if mask.tree is not None:
        ends = gl.load(mask.tree.ends + row_kv + rows, mask=rows < num_rows, other=0)
        # The stored ends may be any numbers.
        ends = gl.minimum(gl.maximum(ends, 0), num_rows) - diagonal
    if mask.depths is not None:
        depths = gl.load(mask.depths.reach + row_kv + rows, mask=rows < num_rows, other=0)
        other_depths = mask.depths.q + row_q
    return Marks(ids, own_ids, other_ids, ends, depths, other_depths)


@gluon.jit
def _load_ids(ids_ptr, rows, num_rows):
    ids = gl.load(ids_ptr + rows, mask=rows < num_rows, other=STAYS)
    return gl.where(ids < 0, STAYS, ids)


@gluon.jit
def load_keys(
    mask, marks, start, num_keys, BLOCK: gl.constexpr, LAYOUT: gl.constexpr, alike=False
):  # fmt: skip
    """Load the data by which `hide_keys` hides BLOCK keys from `start` on: segments, ends, reach.

    Args:
        LAYOUT: of the scores. Queries are rows.
        alike: all queries and keys are of one segment, so segments hide none.
    """
    ids, ends, reach = 0, 0, 0
    if mask.segments is not None:
        ids = _load_other_ids(marks, start, num_keys, BLOCK, LAYOUT, alike)
    if mask.tree is not None:
        key = start + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
        ends = gl.load(marks.ends + key, mask=key < num_keys, other=0)
    if mask.depths is not None:
        reach = _load_depths(marks, start, num_keys, BLOCK, LAYOUT)
    return ids, ends, reach, alike


@gluon.jit
def hide_keys(s, mask, marks, position, of_keys):
    """Set the scores of keys that queries do not see to -inf.

    Args:
        position: of the queries, which are rows.
        of_keys: what `load_keys` returns.
    """
    ids, ends, reach, alike = of_keys
    if mask.segments is not None:  # noqa: SIM102 (Triton evaluates both sides of an "and")
        if not alike:
            s = _where(marks.ids[:, None], ids[None, :], s, "eq")
    if mask.tree is not None:
        s = _where(position[:, None], ends[None, :], s, "lt")
    if mask.depths is not None:
        s = _where(marks.depths[:, None], reach[None, :], s, "le")
    return s


@gluon.jit
def load_queries(
    mask, marks, start, num_queries, BLOCK: gl.constexpr, LAYOUT: gl.constexpr, alike=False
):  # fmt: skip
    """Load the data by which `hide_queries` hides keys from BLOCK queries from `start` on.

    That is the queries' segments and depths.

    Args:
        LAYOUT: of the scores. Keys are rows.
        alike: as in `load_keys`.
    """
    ids, depths = 0, 0
    if mask.segments is not None:
        ids = _load_other_ids(marks, start, num_queries, BLOCK, LAYOUT, alike)
    if mask.depths is not None:
        depths = _load_depths(marks, start, num_queries, BLOCK, LAYOUT)
    return ids, depths, alike


@gluon.jit
def hide_queries(s, mask, marks, start, of_queries):
    """Set the scores of queries from `start` on that do not see keys to -inf.

    Args:
        of_queries: what `load_queries` returns. Keys are rows.
    """
    ids, depths, alike = of_queries
    if mask.segments is not None:  # noqa: SIM102 (Triton evaluates both sides of an "and")
        if not alike:
            s = _where(marks.ids[:, None], ids[None, :], s, "eq")
    if mask.tree is not None:
        row = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        s = _where(row[None, :], marks.ends[:, None], s, "lt")
    if mask.depths is not None:
        s = _where(depths[None, :], marks.depths[:, None], s, "le")
    return s


@gluon.jit
def _load_depths(marks, start, num_rows, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    rows = start + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    return gl.load(marks.other_depths + rows, mask=rows < num_rows, other=0)


@gluon.jit
def _load_other_ids(marks, start, num_rows, BLOCK: gl.constexpr, LAYOUT: gl.constexpr, alike):
    rows = start + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    ids = gl.full([BLOCK], VISITED, gl.int32, rows.type.layout)
    if not alike:
        ids = gl.load(marks.other_ids + rows, mask=rows < num_rows, other=VISITED)
        ids = gl.maximum(ids, VISITED)
    return ids


@triton.constexpr_function
def _select(comparison):
    return (
        f"{{ .reg .pred seen; setp.{comparison}.s32 seen, $1, $2; "
        "selp.f32 $0, $3, 0fFF800000, seen; }"
    )


@gluon.jit
def _where(a, b, s, COMPARISON: gl.constexpr):
    """Return s where the comparison holds, else -inf; in PTX, since LLVM would pack the bits."""
    return gl.inline_asm_elementwise(
        _select(COMPARISON), "=f,r,r,f", [a, b, s], dtype=gl.float32, is_pure=True, pack=1
    )
