"""Keys that a query does not see because of their segment, end or depth, or outside of its ranges.

The values of the item's rows stay in registers; those of visited rows are loaded only in steps that
need a mask, before the scores are awaited, where registers are free.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.explicit.query_ranges import load_ranges, show_keys, show_queries
from torch_attn.kernels.library.segments import STAYS, VISITED


class Marks(NamedTuple):
    """Hold what hides visited rows besides the window; 0 where there is none.

    Attributes:
        ids: segments of the rows that stay, STAYS for padding.
        ends: pointer to visited keys' ends; or ends of keys that stay, in query coordinates.
        depths: of queries that stay, or the greatest that see keys that stay.
        ranges: begin and length of each range of queries that stay; or, where keys stay, a pointer
            to visited queries' ranges, and the position of query 0.
    """

    ids: Any
    own_ids: Any
    other_ids: Any
    ends: Any
    depths: Any
    other_depths: Any
    ranges: Any


@gluon.jit
def mark_queries(mask, q_ranges, row_q, row_kv, rows, num_rows, num_keys):
    """Return the `Marks` of queries; row_q, row_kv: where their data and those of keys begin."""
    # Triton 3.6 cannot return None.
    ids, own_ids, other_ids, ends, depths, other_depths, ranges = 0, 0, 0, 0, 0, 0, 0
    if mask.segments is not None:
        own_ids, other_ids = mask.segments.q + row_q, mask.segments.kv + row_kv
        ids = _load_ids(own_ids, rows, num_rows)
    if mask.tree is not None:
        ends = mask.tree.ends + row_kv
    if mask.depths is not None:
        depths = gl.load(mask.depths.q + row_q + rows, mask=rows < num_rows, other=0)
        other_depths = mask.depths.reach + row_kv
    if q_ranges is not None:
        ranges = load_ranges(q_ranges, row_q, rows, num_rows, num_keys)
    return Marks(ids, own_ids, other_ids, ends, depths, other_depths, ranges)


@gluon.jit
def mark_keys(mask, q_ranges, row_q, row_kv, rows, num_rows, diagonal):
    """Return the `Marks` of keys; diagonal: position of query 0."""
    ids, own_ids, other_ids, ends, depths, other_depths, ranges = 0, 0, 0, 0, 0, 0, 0
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
    if q_ranges is not None:
        ranges = q_ranges.bounds + row_q * (2 * q_ranges.number), diagonal
    return Marks(ids, own_ids, other_ids, ends, depths, other_depths, ranges)


@gluon.jit
def _load_ids(ids_ptr, rows, num_rows):
    ids = gl.load(ids_ptr + rows, mask=rows < num_rows, other=STAYS)
    return gl.where(ids < 0, STAYS, ids)


@gluon.jit
def load_keys(
    mask, marks, start, num_keys, BLOCK: gl.constexpr, LAYOUT: gl.constexpr, alike=False
):  # fmt: skip
    """Load what `hide_keys` needs of keys from `start` on; alike: segments hide none."""
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
def hide_keys(s, mask, q_ranges, marks, position, of_keys, limits):
    """Set hidden scores to -inf; queries are rows. With ranges, `Limits` are applied here."""
    ids, ends, reach, alike = of_keys
    if mask.segments is not None:  # noqa: SIM102 (Triton evaluates both sides of an "and")
        if not alike:
            s = _where(marks.ids[:, None], ids[None, :], s, "eq")
    if q_ranges is not None:
        s = show_keys(s, mask, q_ranges, marks, position, of_keys, limits)
    else:
        if mask.tree is not None:
            s = _where(position[:, None], ends[None, :], s, "lt")
        if mask.depths is not None:
            s = _where(marks.depths[:, None], reach[None, :], s, "le")
    return s


@gluon.jit
def load_queries(
    mask, marks, start, num_queries, BLOCK: gl.constexpr, LAYOUT: gl.constexpr, alike=False
):  # fmt: skip
    ids, depths = 0, 0
    if mask.segments is not None:
        ids = _load_other_ids(marks, start, num_queries, BLOCK, LAYOUT, alike)
    if mask.depths is not None:
        depths = _load_depths(marks, start, num_queries, BLOCK, LAYOUT)
    return ids, depths, alike


@gluon.jit
def hide_queries(s, mask, q_ranges, marks, position, of_queries, limits):
    ids, depths, alike = of_queries
    if mask.segments is not None:  # noqa: SIM102 (Triton evaluates both sides of an "and")
        if not alike:
            s = _where(marks.ids[:, None], ids[None, :], s, "eq")
    if q_ranges is not None:
        s = show_queries(s, mask, q_ranges, marks, position, of_queries, limits)
    else:
        if mask.tree is not None:
            row = limits.start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
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
