"""Ranges of keys that a query sees whatever its window, its keys' ends and its depth hide.

Where queries stay, their ranges stay in registers. Where keys stay, registers are scarce: a score
loads the ranges of its query, just before it is hidden. One PTX text decides about a score, since
LLVM would pack bits into words.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_NO_KEY = gl.constexpr(2**31 - 1)


class Limits(NamedTuple):
    """The first visited row, the end of visited rows and of keys that stay, and the window."""

    start: Any
    size: Any
    end: Any
    left: Any
    right: Any


@gluon.jit
def load_ranges(q_ranges, row_q, rows, num_rows, num_keys):
    """Load begin and length of each range of queries; row_q: where the first query's are."""
    found = ()
    for i in gl.static_range(q_ranges.number):
        place = q_ranges.bounds + ((row_q + rows) * (2 * q_ranges.number) + 2 * i)
        begin = gl.load(place, mask=rows < num_rows, other=0)
        end = gl.minimum(gl.load(place + 1, mask=rows < num_rows, other=0), num_keys)
        found = found + (begin, gl.where(begin < end, end - begin, 0))
    return found


@gluon.jit
def show_keys(s, mask, q_ranges, marks, position, of_keys, limits):
    """Set scores to -inf of keys that neither the window nor a range shows; queries are rows."""
    _ids, ends, reach, _alike = of_keys
    start, limit, _end, left, right = limits
    key = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))[None, :]
    position = position[:, None]
    if right is not None:
        limit = gl.minimum(limit, position + right + 1)
    values = (s, key, limit)
    if left is not None:
        values = values + (position - left, key)
    if mask.tree is not None:
        values = values + (position, ends[None, :])
    if mask.depths is not None:
        values = values + (marks.depths[:, None], reach[None, :])
    for i in gl.static_range(2 * q_ranges.number):
        values = values + (marks.ranges[i][:, None],)
    return _show(values, mask, q_ranges, left, False)


@gluon.jit
def show_queries(s, mask, q_ranges, marks, position, of_queries, limits):
    _ids, depths, _alike = of_queries
    start, num_queries, end, left, right = limits
    query = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))[None, :]
    exists, position = (position < end)[:, None], position[:, None]
    limit = _NO_KEY
    if right is not None:
        limit = query + (right + 1)
    values = (s, gl.where(exists, position, _NO_KEY), limit)
    if left is not None:
        values = values + (query - left, position)
    if mask.tree is not None:
        values = values + (query, marks.ends[:, None])
    if mask.depths is not None:
        values = values + (depths[None, :], marks.depths[:, None])
    ranges_ptr, diagonal = marks.ranges
    key = gl.where(exists, position + diagonal, _NO_KEY)
    # Triton 3.6 takes no pointer beside numbers.
    values = values + (key, query, num_queries, gl.cast(ranges_ptr, gl.int64))
    return _show(values, mask, q_ranges, left, True)


@triton.constexpr_function
def show_code(has_left, has_ends, has_depths, number, loads):
    """Return PTX and its constraints: keep $1 where all pairs compare so, or $2 is in a range.

    The pairs from $2 on are key < limit, least <= key, position < end and depth <= reach. A begin
    and a length follow for each range; or, where it loads, a key, a query, the number of queries
    and the address of the first one's ranges.
    """
    compared = ("lt", *["le"] * has_left, *["lt"] * has_ends, *["le"] * has_depths)
    code = ["setp.lt.s32 seen, $2, $3"]
    for i in range(1, len(compared)):
        code += [f"setp.{compared[i]}.and.s32 seen, ${2 + 2 * i}, ${3 + 2 * i}, seen"]
    first = 2 + 2 * len(compared)
    names = [f"bound{i}" for i in range(2 * number)]
    if loads:
        code += [f"mov.b32 {name}, 0" for name in names]
        code += [
            f"setp.lt.s32 within, ${first + 1}, ${first + 2}",
            f"mad.wide.s32 place, ${first + 1}, {8 * number}, ${first + 3}",
            f"@within ld.global.nc.v{2 * number}.b32 {{{', '.join(names)}}}, [place]",
        ]
        for begin, end in zip(names[::2], names[1::2], strict=True):
            code += [f"setp.le.s32 within, {begin}, ${first}"]
            code += [f"setp.lt.and.s32 within, ${first}, {end}, within"]
            code += ["or.pred seen, seen, within"]
    else:
        for i in range(first, first + 2 * number, 2):
            code += [f"sub.s32 bound0, $2, ${i}", f"setp.lt.or.u32 seen, bound0, ${i + 1}, seen"]
    names = ", ".join(names)
    code += ["selp.f32 $0, $1, 0fFF800000, seen"]
    registers = f".reg .pred seen, within; .reg .b32 {names}; .reg .b64 place; "
    rest = ",r,r,r,l" if loads else ",r" * (2 * number)
    text = "{ " + registers + "; ".join(code) + "; }"
    return text, "=f,f" + ",r,r" * len(compared) + rest


@gluon.jit
def _show(values, mask, q_ranges, left, LOADS: gl.constexpr):
    CODE: gl.constexpr = show_code(
        left is not None, mask.tree is not None, mask.depths is not None, q_ranges.number, LOADS
    )
    return gl.inline_asm_elementwise(
        CODE[0], CODE[1], values, dtype=gl.float32, is_pure=True, pack=1
    )
