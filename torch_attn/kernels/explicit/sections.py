"""Sections of heads: which sums are begun and converted at a time, and how programs know.

Sums are begun when they are 0 and their rows are prepared. A GQA group that an item visits together
counts as one head.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.explicit.reports import await_reports, report
from torch_attn.kernels.library.sequences import count_sequence_tiles
from torch_attn.kernels.library.tiles import ROW_PADDING

# Rows of a piece, all of one packed sequence.
PIECE = ROW_PADDING
# Places besides those of sections that are begun or being converted.
SPARE_PLACES = gl.constexpr(2)


class Sections(NamedTuple):
    """The sections of a problem's heads, and the counts by which programs follow them.

    Attributes:
        size: heads of a section, whose items are mixed; the last section may have fewer.
        ahead: how many are begun before the first one is converted.
        places: for how many the sums have room; a converted one's place is used again.
        items, pieces: of a head, and of a query head's rows.
        taken_ptr: pieces that programs have taken, to begin or to convert them.
        begun_ptr, converted_ptr, added_ptr: each section's pieces, and items that were added.
    """

    size: Any
    count: Any
    ahead: Any
    places: Any
    items: Any
    pieces: Any
    heads: Any
    taken_ptr: Any
    begun_ptr: Any
    added_ptr: Any
    converted_ptr: Any


@triton.constexpr_function
def unfinished_sections(has_unknown_lengths):
    """Return how many sections may be unfinished while programs take items of the next.

    It is one where the longest tiles come first; else a section's last tile may outlast the next.
    """
    return 7 if has_unknown_lengths else 1


@gluon.jit
def divide_heads(counter_ptr, problem, UNFINISHED: gl.constexpr, MEMBERS: gl.constexpr):
    """Return the `Sections`; their counts follow the work items' counter.

    So many are begun ahead that each program has two items besides those of UNFINISHED sections:
    none waits for a section's last item. There are places for these, for those converted at a time,
    and a few more.
    """
    items = count_sequence_tiles(problem.size, problem.num_sequences, 128)
    pieces = count_sequence_tiles(problem.size_other, problem.num_sequences, PIECE)
    heads = problem.num_items // items
    size = gl.minimum(problem.together, heads)
    count = gl.cdiv(heads, size)
    ahead = gl.minimum(gl.cdiv(2 * gl.num_programs(0), size * items) + UNFINISHED, count)
    places = ahead + gl.cdiv(gl.num_programs(0), size * pieces * MEMBERS) + SPARE_PLACES
    begun_ptr = counter_ptr + 2
    return Sections(
        size, count, ahead, places, items, pieces, heads, counter_ptr + 1, begun_ptr,
        begun_ptr + count, begun_ptr + 2 * count,
    )  # fmt: skip


def heads_with_sums(
    together: int, heads: int, items: int, pieces: int, programs: int, unfinished: int
) -> int:
    """Return for how many heads there are sums at a time, as `divide_heads` does."""
    size = min(together, heads)
    ahead = triton.cdiv(2 * programs, size * items) + unfinished
    places = ahead + triton.cdiv(programs, size * pieces) + SPARE_PLACES.value
    return min(size * places, heads)


@gluon.jit
def place_of_head(sections, index):
    return index % (sections.size * sections.places)


@gluon.jit
def heads_of_section(sections, section):
    return gl.minimum(sections.size, sections.heads - section * sections.size)


@gluon.jit
def section_of(sections, item):
    return item // (sections.size * sections.items)


@gluon.jit
def await_begun(sections, section, MEMBERS: gl.constexpr):
    pieces = heads_of_section(sections, section) * MEMBERS * sections.pieces
    await_reports(sections.begun_ptr + section, pieces)


@gluon.jit
def await_place(sections, section, MEMBERS: gl.constexpr):
    if section >= sections.places:
        pieces = sections.size * MEMBERS * sections.pieces
        await_reports(sections.converted_ptr + (section - sections.places), pieces)


@gluon.jit
def report_added(sections, item):
    report(sections.added_ptr + section_of(sections, item))
