"""The order in which persistent programs take their work items."""

from functools import lru_cache
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_attn.kernels.portable.sequences import count_sequence_tiles
from torch_attn.kernels.sm80.sequences import locate_tile
from torch_attn.kernels.sm90.pipeline import allocate_barriers
from torch_attn.launch import KernelCall, Prepared, flash_arguments
from torch_attn.targets import num_sms
from twin_attention.contract.spec import VarlenSpec

# What an item takes beside its steps, in steps; items of a program and heads that are counted.
ITEM_STEPS = 2
ITEMS_COUNTED = 64
HEADS_COUNTED = 24


@gluon.jit
def work_item(turn):
    """Return a program's work item of a turn; every other turn takes the programs in reverse."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return turn * programs + gl.where(turn & 1 == 0, program, programs - 1 - program)


@gluon.jit
def head_and_tile(item, num_items, together, num_tiles):
    """Return the head of a work item, and which of the head's tiles it is, the longest being 0.

    Items are in order of `together` heads at a time, of these the longest tile of each head first.
    So the items of a turn are about as long as each other, and a program that had a longer one has
    a shorter one in the next turn. `heads_together` counts how well that works out.
    """
    first = item // (together * num_tiles) * together
    rest = item - first * num_tiles
    heads = gl.minimum(together, num_items // num_tiles - first)
    return first + rest % heads, rest // heads


@gluon.jit
def next_item(turn, passed, problem, offsets, BLOCK: gl.constexpr):
    """Return a program's work item of a turn, past those of packed sequences that have no rows.

    Args:
        turn: how many items the program has had.
        passed: how many it has passed over.
        problem: rows of the tiles' axis and of the other one; num_items and together are the last.
        offsets: those of both axes and num_sequences, or None, all of them.

    Returns:
        (item, sequence, passed): the sequence that owns the item's tile, 0 of a dense batch.
    """
    item = work_item(turn + passed)
    sequence = 0
    if offsets[2] is not None:
        is_empty = item < problem[4]
        while is_empty:
            num_tiles = count_sequence_tiles(problem[0], offsets[2], BLOCK)
            _index, tile = head_and_tile(item, problem[4], problem[5], num_tiles)
            sequence, _first, start, end, _first_other, _size_other = locate_tile(
                offsets[0], offsets[1], tile, problem[0], problem[1], offsets[2], BLOCK
            )
            is_empty = start == end
            passed = gl.where(is_empty, passed + 1, passed)
            item = work_item(turn + passed)
            is_empty = is_empty & (item < problem[4])
    return item, sequence, passed


@gluon.jit
def take_item(counter_ptr, problem, offsets, BLOCK: gl.constexpr):
    """Take the next item of packed sequences that has rows, in the order from the last tile on.

    All programs count together, so that one whose items are short takes more of them.

    Args:
        counter_ptr: how many items all programs have taken.
        problem, offsets: as in `next_item`.

    Returns:
        (item, place): place is what `locate_tile` returns from the tile's first row on.
    """
    item = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    start, end, first_other, size_other = 0, 0, 0, 0
    is_empty = item < problem[4]
    while is_empty:
        num_tiles = count_sequence_tiles(problem[0], offsets[2], BLOCK)
        _index, tile = head_and_tile(item, problem[4], problem[5], num_tiles)
        _sequence, _first, start, end, first_other, size_other = locate_tile(
            offsets[0], offsets[1], num_tiles - 1 - tile, problem[0], problem[1], offsets[2], BLOCK
        )
        is_empty = start == end
        if is_empty:
            item = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        is_empty = is_empty & (item < problem[4])
    return item, (start, end, first_other, size_other)


@gluon.jit
def allocate_hand_over(NUM_CONSUMERS: gl.constexpr):
    """Allocate shared memory for an item and its place; barriers for when it is there, and read."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    values = gl.allocate_shared_memory(gl.int32, [8], layout)
    return values, allocate_barriers(1), allocate_barriers(NUM_CONSUMERS)


@gluon.jit
def _fields():
    # Each thread has all of them.
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    return gl.arange(0, 8, layout)


@gluon.jit
def hand_over(shared, turn, item, place):
    """Give the consumers an item and its place, when they have read those of the turn before."""
    values, written, read = shared
    NUM_CONSUMERS: gl.constexpr = read.shape[0]
    for consumer in gl.static_range(NUM_CONSUMERS):
        mbarrier.wait(read.index(consumer), (turn & 1) ^ 1)
    field = _fields()
    x = gl.where(field == 0, item, field)
    for i in gl.static_range(4):
        x = gl.where(field == i + 1, place[i], x)
    values.store(x)
    mbarrier.arrive(written.index(0), count=1)


@gluon.jit
def receive(shared, turn, CONSUMER: gl.constexpr):
    """Return what `hand_over` gave in a turn: (item, place)."""
    values, written, read = shared
    mbarrier.wait(written.index(0), turn & 1)
    field = _fields()
    x = values.load(field.type.layout)
    mbarrier.arrive(read.index(CONSUMER), count=1)
    item = gl.sum(gl.where(field == 0, x, 0), 0)
    start, end = gl.sum(gl.where(field == 1, x, 0), 0), gl.sum(gl.where(field == 2, x, 0), 0)
    first, size = gl.sum(gl.where(field == 3, x, 0), 0), gl.sum(gl.where(field == 4, x, 0), 0)
    return item, (start, end, first, size)


def persistent(
    call: KernelCall, steps: tuple[int, ...], heads: int, arguments: dict[str, Any]
) -> Prepared:
    """Return the grid of a kernel whose programs take work items in turn, and its arguments.

    Args:
        steps: how many steps each tile of a head takes, the longest first.
        heads: of all batch elements.
        arguments: those that only this kernel has.
    """
    items = len(steps) * heads
    programs = min(items, num_sms(call.device, call.target))
    # Tiles of packed sequences follow each other as they are.
    is_packed = isinstance(call.spec, VarlenSpec)
    together = heads if is_packed else heads_together(steps, heads, programs)
    order = {"num_items": items, "together": together}
    return (programs,), flash_arguments(call.spec) | order | arguments


@lru_cache(maxsize=1024)
def heads_together(steps: tuple[int, ...], heads: int, programs: int) -> int:
    """Return how many heads' tiles are put in order of length, so that all programs end together.

    The fewest heads that come within 1 % of the best balance: what their tiles share is what
    programs have in the L2 cache at a time.
    """
    if min(steps) == max(steps):
        return 1
    num_tiles = len(steps)
    counted = min(heads, triton.cdiv(ITEMS_COUNTED * programs, num_tiles))
    balance = {
        together: _balance(steps, counted, programs, together)
        for together in {*range(1, min(heads, HEADS_COUNTED) + 1), counted}
    }
    return min(x for x in balance if balance[x] > max(balance.values()) - 0.01)


def _balance(steps: tuple[int, ...], heads: int, programs: int, together: int) -> float:
    """Return how long the mean program works, over the one that works longest."""
    num_tiles = len(steps)
    item = torch.arange(heads * num_tiles, device="cpu")
    turn, program = item // programs, item % programs
    program = torch.where(turn % 2 == 0, program, programs - 1 - program)
    first = item // (together * num_tiles) * together
    size = (heads - first).clamp(max=together)
    cost = torch.tensor(steps, device="cpu")[(item - first * num_tiles) // size] + ITEM_STEPS
    of_program = torch.zeros(programs, dtype=cost.dtype, device="cpu").index_add_(0, program, cost)
    return float(of_program.sum() / (programs * of_program.max()))
