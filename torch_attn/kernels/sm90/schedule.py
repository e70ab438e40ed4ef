"""The order in which persistent programs take their work items."""

from functools import lru_cache
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.portable.sequences import count_sequence_tiles
from torch_attn.kernels.sm80.sequences import locate_tile
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
def next_item(turn, passed, problem, offsets, BLOCK: gl.constexpr, LAST_FIRST: gl.constexpr):
    """Return a program's work item of a turn, past those of packed sequences that have no rows.

    Args:
        turn: how many items the program has had.
        passed: how many it has passed over.
        problem: rows of the tiles' axis and of the other one; num_items and together are the last.
        offsets: those of both axes and num_sequences, or None, all of them.
        LAST_FIRST: the last tile is the longest.

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
            if LAST_FIRST:
                tile = num_tiles - 1 - tile
            sequence, _first, start, end, _first_other, _size_other = locate_tile(
                offsets[0], offsets[1], tile, problem[0], problem[1], offsets[2], BLOCK
            )
            is_empty = start == end
            passed = gl.where(is_empty, passed + 1, passed)
            item = work_item(turn + passed)
            is_empty = is_empty & (item < problem[4])
    return item, sequence, passed


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
