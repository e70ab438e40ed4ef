"""The gradient of a table of distances, in the register layout of accumulators.

In most tiles all pairs share the table's first or last entry: each thread sums these over tiles of
a head. In others, pairs of the same distance are summed before they reach memory.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.explicit.terms import axis_layout, table_sides


class EndSums(NamedTuple):
    """Each thread's sums for a head's first and last entry: [4, 8, 4] float32."""

    first: Any
    last: Any


@gluon.jit
def no_end_sums(terms):
    found = ()
    if terms.drelative is not None:
        layout: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [4, 1, 1], [2, 1, 0])
        zero = gl.zeros([4, 8, 4], gl.float32, layout)
        found = EndSums(zero, zero)
    return found


@gluon.jit
def add_end_sums(ends, terms, head):
    """Add `EndSums`, each warp to entries of its own, so that warps need not meet."""
    if terms.drelative is not None:
        row = terms.drelative + gl.cast(head, gl.int64) * (2 * terms.radius + 1)
        _add_of_warps(row, ends.first)
        _add_of_warps(row + 2 * terms.radius, ends.last)


@gluon.jit
def _add_of_warps(entry, parts):
    of_warps = gl.sum(gl.sum(parts, 2), 1)
    layout: gl.constexpr = of_warps.type.layout
    gl.atomic_add(entry + gl.zeros([4], gl.int32, layout), of_warps, sem="relaxed")


@gluon.jit
def follow_head(ends, terms, head, before):
    """Return the `EndSums` for a tile of `head` after one of `before`."""
    if terms.drelative is not None:
        first, last = ends
        if head != before:
            add_end_sums(ends, terms, before)
            first, last = no_end_sums(terms)
        ends = EndSums(first, last)
    return ends


@gluon.jit
def add_relative_gradient(ends, terms, head, offset, ds, FAR: gl.constexpr):
    """Add the gradient of a tile's scores to a table's, in any order; return the `EndSums`.

    offset: from the first query to the first key. ds: 64 keys down, queries across. FAR: as in
    `terms.add_terms`.
    """
    QUERIES: gl.constexpr = ds.shape[1]
    is_before, is_behind = table_sides(terms, offset, ds.shape[0], QUERIES)
    # A thread has every eighth of its warp's 16 keys, and the same two of every eight queries.
    blocks = gl.reshape(ds, [4, 2, 8, QUERIES // 8, 4, 2])
    first, last = ends
    layout: gl.constexpr = first.type.layout
    if FAR or (is_before | is_behind):
        found = gl.sum(gl.sum(gl.sum(blocks, 5), 3), 1)
        found = gl.convert_layout(found, layout, assert_trivial=True)
        first += gl.where(is_before, found, 0.0)
        last += gl.where(is_before, 0.0, found)
    else:
        row = terms.drelative + gl.cast(head, gl.int64) * (2 * terms.radius + 1)
        first, last = _add_band(row + terms.radius, terms.radius, offset, blocks, first, last)
    return EndSums(first, last)


@gluon.jit
def _add_band(middle, radius, offset, blocks, first_end, last_end):
    """Add a tile within the table, 16 keys a warp; return the sums of the ends.

    A pair's distance is 8 · eights + key - 2 · quad - pair: key, quad and pair are an element's
    place in its eight keys and eight queries, eights the number of eights between them. A thread
    sums elements of the same eights and pair. Then rows of 8 are rotated so that threads of a row
    share a distance, and quads and pairs are summed. middle: pointer to the sum of distance 0.
    """
    EIGHTS: gl.constexpr = blocks.shape[3]
    first, second = gl.split(gl.permute(blocks, (0, 2, 3, 4, 5, 1)))
    first, second = _split_eights(first), _split_eights(second)
    layout: gl.constexpr = first[0].type.layout
    row = gl.arange(0, 8, axis_layout(layout, 4, 1))[None, :, None, None]
    quad = gl.arange(0, 4, axis_layout(layout, 4, 2))[None, None, :, None]
    pair = gl.arange(0, 2, axis_layout(layout, 4, 3))[None, None, None, :]
    key = row + 2 * quad + pair + gl.zeros([4, 8, 4, 2], gl.int32, layout)
    # Keys that rotate past the eighth belong to the next eight.
    turned = key >= 8
    key = key & 7
    zero = gl.zeros([4, 8, 4, 2], gl.float32, layout)
    sums = ()
    before = zero
    for i in gl.static_range(EIGHTS + 4):
        # 1 - i eights, and one less for distances that turned.
        near = zero
        if i == 0:
            near = gl.gather(second[0], key, 1)
        elif i < EIGHTS:
            near = gl.gather(first[i - 1] + second[i], key, 1)
        elif i == EIGHTS:
            near = gl.gather(first[EIGHTS - 1], key, 1)
        sums = sums + (gl.sum(gl.where(turned, before, near), 3),)
        before = near
    for i in gl.static_range(EIGHTS // 4 + 1):
        a = _exchange(sums[4 * i], sums[4 * i + 1], 1)
        b = _exchange(sums[4 * i + 2], sums[4 * i + 3], 1)
        first_end, last_end = _add_distances(
            middle, radius, offset + (1 - 4 * i) * 8, _exchange(a, b, 2), first_end, last_end
        )
    return first_end, last_end


@gluon.jit
def _exchange(a, b, BIT: gl.constexpr):
    """Return sums over two quads that differ in one bit: of a in the quad without it, else of b."""
    quad = gl.arange(0, 4, axis_layout(a.type.layout, 3, 2))[None, None, :]
    has_bit = quad & BIT != 0
    layout: gl.constexpr = a.type.layout
    other = (quad ^ BIT) + gl.zeros([4, 8, 4], gl.int32, layout)
    return gl.where(has_bit, b, a) + gl.gather(gl.where(has_bit, a, b), other, 2)


@gluon.jit
def _add_distances(middle, radius, offset, sums, first_end, last_end):
    """Add sums of eight distances from `offset` on: 8 less for each quad, 16 more for each warp.

    Those clipped to an end join its sums: in memory all lanes would add to one place.
    """
    layout: gl.constexpr = sums.type.layout
    warp = gl.arange(0, 4, axis_layout(layout, 3, 0))[:, None, None]
    row = gl.arange(0, 8, axis_layout(layout, 3, 1))[None, :, None]
    quad = gl.arange(0, 4, axis_layout(layout, 3, 2))[None, None, :]
    distance = offset + (row + 16 * warp - 8 * quad)
    is_first, is_last = distance <= -radius, distance >= radius
    gl.atomic_add(middle + distance, sums, mask=~(is_first | is_last), sem="relaxed")
    ends: gl.constexpr = first_end.type.layout
    of_first = gl.convert_layout(gl.where(is_first, sums, 0.0), ends, assert_trivial=True)
    # A radius of 0 has one entry.
    of_last = gl.where(is_last & ~is_first, sums, 0.0)
    return first_end + of_first, last_end + gl.convert_layout(of_last, ends, assert_trivial=True)


@gluon.jit
def _split_eights(x):
    if x.shape[2] == 1:
        found = (gl.reshape(x, [4, 8, 4, 2]),)
    else:
        halves = gl.permute(gl.reshape(x, [4, 8, 2, x.shape[2] // 2, 4, 2]), (0, 1, 3, 4, 5, 2))
        a, b = gl.split(halves)
        found = _split_eights(a) + _split_eights(b)
    return found
