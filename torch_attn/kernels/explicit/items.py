"""The order in which persistent programs take their work items."""

import heapq
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_attn.kernels.explicit.barriers import allocate_barriers
from torch_attn.kernels.explicit.intervals import tiles_of_rows
from torch_attn.kernels.explicit.sections import report_added
from torch_attn.kernels.explicit.sequences import locate_tile
from torch_attn.kernels.explicit.steps import TileList, listed_tiles, middle_of_list
from torch_attn.kernels.library.sequences import count_sequence_tiles, rows_of_sequence
from torch_attn.launch import KernelCall, Prepared, flash_arguments
from torch_attn.targets import num_sms
from twin_attention.contract.spec import AttentionSpec, PartialSpec, VarlenSpec
from twin_attention.targets.steps import is_uneven

# The cost of an item besides its steps, in steps; how many items of a program and heads to count.
ITEM_STEPS = 2
ITEMS_COUNTED = 64
HEADS_COUNTED = 24
FEW_TILES = 8  # of a head
# At most this many heads share the L2 cache at a time, where items come from a counter.
PACKED_HEADS = 8


class Problem(NamedTuple):
    """The problem from which a kernel's work items follow; absent parts are None.

    Attributes:
        size, size_other: rows of the axis whose tiles are items, and of the other one.
        diagonal: key position of the first query.
        together: see `head_and_tile`.
        offsets, offsets_other: where packed sequences begin on both axes.
        tiles: the lists of `kernels.tile_lists`.
        elements_adjoin: in dense problems, the batch elements of a head follow each other.
    """

    size: Any
    size_other: Any
    diagonal: Any
    heads_q: Any
    num_items: Any
    together: Any
    offsets: Any
    offsets_other: Any
    num_sequences: Any
    segments: Any
    tree: Any
    depths: Any
    tiles: Any
    intervals: Any
    elements_adjoin: Any = None


class Own(NamedTuple):
    """A work item's rows, to the end of the head or sequence; packed sequences count from the
    first.

    diagonal: key position of the first query.
    """

    start: Any
    end: Any
    diagonal: Any


class Others(NamedTuple):
    """The rows that an item may visit: `size`, from the sequence's `first` on."""

    first: Any
    size: Any


class Place(NamedTuple):
    """A work item of packed sequences."""

    head: Any
    tile: Any
    start: Any
    end: Any
    first_other: Any
    size_other: Any
    sequence: Any


class ListedPlace(NamedTuple):
    """A work item whose tiles are listed; end ... sequence are 0 in a dense batch.

    before, full: how many tiles need a mask, and how many need none.
    """

    head: Any
    tile: Any
    start: Any
    end: Any
    first_other: Any
    size_other: Any
    sequence: Any
    before: Any
    full: Any
    first: Any
    padding: Any


class Pairs(NamedTuple):
    """A work item's pairs of query and key, as the terms of scores count them.

    Attributes:
        element: of the batch, or the packed sequence.
        head: the query head, or the first of them.
        first: the first row that stays, counted from its sequence's first.
        position: that row's position on the other axis.
    """

    element: Any
    head: Any
    first: Any
    position: Any


class Part(NamedTuple):
    """A work item whose rows have intervals."""

    head: Any
    tile: Any
    start: Any
    begin: Any
    before: Any
    full: Any
    after: Any


@gluon.jit
def work_item(turn):
    """Return a program's item; in every other turn programs go in reverse order."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return turn * programs + gl.where(turn & 1 == 0, program, programs - 1 - program)


@gluon.jit
def head_and_tile(item, num_items, together, num_tiles):
    """Return an item's head, and which of its tiles it is, the longest being 0.

    Of `together` heads at a time the longest come first, so that turns even out.
    """
    first = item // (together * num_tiles) * together
    rest = item - first * num_tiles
    heads = gl.minimum(together, num_items // num_tiles - first)
    return first + rest % heads, rest // heads


@gluon.jit
def next_item(
    turn, problem, shared, counter_ptr, BLOCK: gl.constexpr, LAST_FIRST: gl.constexpr, row_ptrs,
    sections, heads, BLOCK_OTHER: gl.constexpr, PASSES_OVER: gl.constexpr = False,
):  # fmt: skip
    """Take the producer's item of a turn and hand it over; return what `own_item` does.

    From a counter, a program whose items are short takes more. Tiles without rows are passed over.

    Args:
        shared: of `allocate_hand_over`, or () where programs take turns.
        counter_ptr: items taken by all programs, or None. Lists have their own counter.
        LAST_FIRST: the last tile is the longest.
        row_ptrs: (), or lse2, delta and rest2, prepared for tiles that are passed over too.
        sections: (), or the `Sections` in which packed tiles that are passed over count as added.
        PASSES_OVER: also pass over tiles whose rows see nothing in their intervals.
    """
    item, place = work_item(turn), Place(0, 0, 0, 0, 0, 0, 0)
    if problem.intervals is not None:
        item, place = _take_part(counter_ptr, problem, BLOCK, BLOCK_OTHER, LAST_FIRST)
        if PASSES_OVER:
            while (item < problem.num_items) & (place.before + place.full + place.after == 0):
                item, place = _take_part(counter_ptr, problem, BLOCK, BLOCK_OTHER, LAST_FIRST)
        hand_over_item(shared, turn, item, place)
    elif problem.num_sequences is not None:
        item, place = _take_item(counter_ptr, problem, BLOCK, LAST_FIRST)
        while (item < problem.num_items) & (place.start == place.end):
            if len(row_ptrs) > 0:
                _prepare_rows(row_ptrs, place, problem, BLOCK)
            if len(sections) > 0:
                report_added(sections, item)
            item, place = _take_item(counter_ptr, problem, BLOCK, LAST_FIRST)
        if problem.tiles is not None:
            place = _with_list(problem, place, 0, BLOCK, BLOCK_OTHER)
        hand_over_item(shared, turn, item, place)
    elif problem.tiles is not None:
        item, place = _take_listed(problem, BLOCK, LAST_FIRST)
        place = _with_list(problem, place, place.head // heads, BLOCK, BLOCK_OTHER)
        hand_over_item(shared, turn, item, place)
    elif len(shared) > 0:
        item = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        hand_over_item(shared, turn, item, place)
    return item, place


@gluon.jit
def own_item(turn, problem, shared, READER: gl.constexpr = None):
    """Return an item, and the `Place`, `ListedPlace` or `Part` of one from a counter."""
    item, place = work_item(turn), Place(0, 0, 0, 0, 0, 0, 0)
    if len(shared) > 0:
        item, found = _receive(shared, turn, READER)
        if problem.intervals is not None:
            place = Part(*found)
        elif problem.tiles is not None:
            place = ListedPlace(*found)
        elif problem.num_sequences is not None:
            place = Place(*found)
    return item, place


@gluon.jit
def locate_pairs(problem, place, batch, head, start, position):
    element = batch
    if problem.num_sequences is not None:
        element = place.sequence
        first, _size = rows_of_sequence(
            problem.offsets, element, problem.size, problem.num_sequences, problem.size
        )
        start -= first
    return Pairs(element, head, start, position)


@triton.constexpr_function
def are_counted(num_sequences, tiles):
    return num_sequences is not None or tiles is not None


@gluon.jit
def tiles_of_list(problem, place, batch, BLOCK: gl.constexpr, BLOCK_OTHER: gl.constexpr):
    middle = middle_of_list(
        problem.tiles, batch, place.tile, problem.size, problem.size_other, problem.num_sequences,
        BLOCK, BLOCK_OTHER,
    )  # fmt: skip
    return TileList(middle, place.first, place.padding), place.before, place.full, 0


@gluon.jit
def _take_item(counter_ptr, problem, BLOCK: gl.constexpr, LAST_FIRST: gl.constexpr):
    item = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    # After the last item, the place is still that of the last one.
    num_tiles = count_sequence_tiles(problem.size, problem.num_sequences, BLOCK)
    existing = gl.minimum(item, problem.num_items - 1)
    head, tile = head_and_tile(existing, problem.num_items, problem.together, num_tiles)
    if LAST_FIRST:
        tile = num_tiles - 1 - tile
    sequence, _first, start, end, first_other, size_other = locate_tile(
        problem.offsets, problem.offsets_other, tile, problem.size, problem.size_other,
        problem.num_sequences, BLOCK,
    )  # fmt: skip
    return item, Place(head, tile, start, end, first_other, size_other, sequence)


@gluon.jit
def _take_listed(problem, BLOCK: gl.constexpr, LAST_FIRST: gl.constexpr):
    item = gl.atomic_add(problem.tiles, 1, sem="relaxed")
    # As in `_take_item`.
    num_tiles = gl.cdiv(problem.size, BLOCK)
    existing = gl.minimum(item, problem.num_items - 1)
    head, tile = head_and_tile(existing, problem.num_items, problem.together, num_tiles)
    if LAST_FIRST:
        tile = num_tiles - 1 - tile
    return item, Place(head, tile, tile * BLOCK, 0, 0, 0, 0)


@gluon.jit
def _with_list(problem, place, batch, BLOCK: gl.constexpr, BLOCK_OTHER: gl.constexpr):
    """Add its list to a place; where nothing is visible there is one masked tile."""
    found, before, full, _after = listed_tiles(
        problem.tiles, batch, place.tile, problem.size, problem.size_other, problem.num_sequences,
        BLOCK, BLOCK_OTHER,
    )  # fmt: skip
    return ListedPlace(
        place.head, place.tile, place.start, place.end, place.first_other, place.size_other,
        place.sequence, gl.maximum(before, 1 - full), full, found.first, found.padding,
    )  # fmt: skip


@gluon.jit
def _take_part(
    counter_ptr, problem, BLOCK: gl.constexpr, BLOCK_OTHER: gl.constexpr, LAST_FIRST: gl.constexpr
):
    item = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    # As in `_take_item`.
    num_tiles = gl.cdiv(problem.size, BLOCK)
    existing = gl.minimum(item, problem.num_items - 1)
    head, tile = head_and_tile(existing, problem.num_items, problem.together, num_tiles)
    if LAST_FIRST:
        tile = num_tiles - 1 - tile
    start = tile * BLOCK
    begin, before, full, after = tiles_of_rows(
        problem.intervals, start, problem.size, BLOCK, BLOCK_OTHER
    )
    return item, Part(head, tile, start, begin, before, full, after)


@gluon.jit
def _prepare_rows(row_ptrs, place, problem, BLOCK: gl.constexpr):
    """Store statistics of ROW_PADDING missing rows, so that p and ds are 0."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tiles = count_sequence_tiles(problem.size, problem.num_sequences, BLOCK)
    first = (place.head.to(gl.int64) * tiles + place.tile) * BLOCK
    rows = first + gl.arange(0, BLOCK, layout)
    gl.store(row_ptrs[0] + rows, gl.full([BLOCK], float("inf"), gl.float32, layout))
    for i in gl.static_range(1, len(row_ptrs)):
        gl.store(row_ptrs[i] + rows, gl.zeros([BLOCK], gl.float32, layout))


@gluon.jit
def allocate_hand_over(READERS: gl.constexpr, LISTED: gl.constexpr, SLOTS: gl.constexpr = 1):
    """Allocate memory and mbarriers to write and read; with two SLOTS, one item ahead."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    values = gl.allocate_shared_memory(gl.int32, [SLOTS, 16 if LISTED else 8], layout)
    return values, allocate_barriers(SLOTS), allocate_barriers(SLOTS * READERS)


@gluon.jit
def _fields(COUNT: gl.constexpr):
    # Each thread has all fields.
    layout: gl.constexpr = gl.BlockedLayout([COUNT], [32], [gl.num_warps()], [0])
    return gl.arange(0, COUNT, layout)


@gluon.jit
def hand_over_item(shared, turn, item, place):
    """Give the readers an item, once they have read what its slot had."""
    values, written, read = shared
    SLOTS: gl.constexpr = values.shape[0]
    READERS: gl.constexpr = read.shape[0] // SLOTS
    slot, phase = turn % SLOTS, turn // SLOTS & 1
    for reader in gl.static_range(READERS):
        mbarrier.wait(read.index(slot * READERS + reader), phase ^ 1)
    field = _fields(values.shape[1])
    x = gl.where(field == 0, item, field)
    for i in gl.static_range(len(place)):
        x = gl.where(field == i + 1, place[i], x)
    values.index(slot).store(x)
    mbarrier.arrive(written.index(slot), count=1)


@gluon.jit
def _receive(shared, turn, READER: gl.constexpr):
    values, written, read = shared
    SLOTS: gl.constexpr = values.shape[0]
    READERS: gl.constexpr = read.shape[0] // SLOTS
    slot, phase = turn % SLOTS, turn // SLOTS & 1
    mbarrier.wait(written.index(slot), phase)
    field = _fields(values.shape[1])
    x = values.index(slot).load(field.type.layout)
    if READER is not None:
        mbarrier.arrive(read.index(slot * READERS + READER), count=1)
    found = ()
    for i in gl.static_range(7 if values.shape[1] == 8 else 11):
        found = found + (gl.sum(gl.where(field == i + 1, x, 0), 0),)
    return gl.sum(gl.where(field == 0, x, 0), 0), found


def persistent(
    call: KernelCall,
    steps: tuple[int, ...],
    heads: int,
    arguments: dict[str, Any],
    is_counted: bool = False,
    has_sections: bool = False,
) -> Prepared:
    """Return grid and arguments of a kernel whose programs take work items in turn.

    Args:
        steps: how many each tile of a head takes, the longest first.
        heads: of all batch elements.
        arguments: those that only this kernel has.
        is_counted: a dense problem's items come from a counter.
        has_sections: groups of heads are `Sections`, and many are better than few.
    """
    items = len(steps) * heads
    programs = min(items, num_sms(call.device, call.target))
    together = heads_at_a_time(call.spec, steps, heads, programs, is_counted, has_sections)
    order = {"num_items": items, "together": together}
    return (programs,), flash_arguments(call.spec) | order | arguments


def heads_at_a_time(
    spec: AttentionSpec,
    steps: tuple[int, ...],
    heads: int,
    programs: int,
    is_counted: bool,
    has_sections: bool,
) -> int:
    """Return `together` of `head_and_tile`; without known lengths tiles are not sorted."""
    if has_unknown_lengths(spec) and has_sections:
        together = min(triton.cdiv(programs, len(steps)), heads)
    elif has_unknown_lengths(spec):
        together = triton.cdiv(heads, triton.cdiv(heads, PACKED_HEADS))
    elif is_counted:
        together = heads_in_cache(steps, heads, programs)
    else:
        together = heads_together(steps, heads, programs)
    return together


def has_unknown_lengths(spec: AttentionSpec) -> bool:
    return isinstance(spec, VarlenSpec | PartialSpec) or spec.hides_by_data


def item_counter(
    q: torch.Tensor, spec: AttentionSpec, has_uneven: bool = False, has_sections: bool = False
) -> torch.Tensor | None:
    """Return a zero counter of items, [1] int32; None where programs take turns.

    Uneven dense tiles need one. With `Sections` it has their counts: [2 + 3 · batch · heads].
    """
    is_counted = has_sections or isinstance(spec, VarlenSpec | PartialSpec)
    if has_uneven and not spec.hides_by_data:
        is_counted |= is_uneven(spec)
    counts = 2 + 3 * spec.batch * spec.heads_q if has_sections else 1
    return q.new_zeros(counts, dtype=torch.int32) if is_counted else None


@lru_cache(maxsize=1024)
def heads_together(steps: tuple[int, ...], heads: int, programs: int) -> int:
    """Return how many heads' tiles to sort by length, so that programs end together.

    It is the fewest within 1 % of the best balance, as their tiles share the L2 cache; or a pair,
    whose rows are adjacent, within 3 %.
    """
    if min(steps) == max(steps):
        return 1
    num_tiles = len(steps)
    counted = min(heads, triton.cdiv(ITEMS_COUNTED * programs, num_tiles))
    balance = {
        together: _balance(steps, counted, programs, together)
        for together in {*range(1, min(heads, HEADS_COUNTED) + 1), counted}
    }
    best = max(balance.values())
    if num_tiles <= FEW_TILES and balance.get(2, 0.0) > best - 0.03:
        return 2
    return min(x for x in balance if balance[x] > best - 0.01)


@lru_cache(maxsize=1024)
def heads_in_cache(steps: tuple[int, ...], heads: int, programs: int) -> int:
    """Return how many heads' tiles to sort where a counter gives items: a power of two."""
    counted = min(heads, triton.cdiv(ITEMS_COUNTED * programs, len(steps)))
    numbers = [x for x in (1, 2, 4, 8, 16, 32) if x <= counted]
    balance = {x: _balance_of_counter(steps, counted, programs, x) for x in numbers}
    return min(x for x in numbers if balance[x] > max(balance.values()) - 0.02)


def _balance_of_counter(steps: tuple[int, ...], heads: int, programs: int, together: int) -> float:
    ends = [0] * programs
    for first in range(0, heads, together):
        for cost in steps:
            for _ in range(first, min(first + together, heads)):
                heapq.heapreplace(ends, ends[0] + cost + ITEM_STEPS)
    return sum(ends) / (programs * max(ends))


def _balance(steps: tuple[int, ...], heads: int, programs: int, together: int) -> float:
    """Return the programs' average time, divided by the longest."""
    num_tiles = len(steps)
    item = torch.arange(heads * num_tiles, device="cpu")
    turn, program = item // programs, item % programs
    program = torch.where(turn % 2 == 0, program, programs - 1 - program)
    first = item // (together * num_tiles) * together
    size = (heads - first).clamp(max=together)
    cost = (
        torch.tensor(steps, dtype=torch.int64, device="cpu")[(item - first * num_tiles) // size]
        + ITEM_STEPS
    )
    of_program = torch.zeros(programs, dtype=cost.dtype, device="cpu").index_add_(0, program, cost)
    return int(of_program.sum()) / (programs * int(of_program.max()))
