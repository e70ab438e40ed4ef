"""Choose which tiles each program works on, and in which order."""

from __future__ import annotations

import heapq
from functools import lru_cache
from itertools import pairwise

import numpy as np

from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.steps import steps_of_queries

# What tiles of heads that are worked on at the same time visit fits the L2 cache.
L2_BYTES = 32 * 2**20
# Heads of a section give each program a tile; of long heads there is one for as many programs.
PROGRAMS_OF_HEAD = 8
# Time that a tile of queries takes beside its steps, in steps.
TILE_OVERHEAD = 1.5


# Of the calls traced last: 4 bytes a tile, which is megabytes for the longest problems.
@lru_cache(maxsize=16)
def make_schedule(
    spec: AttentionSpec,
    block_q: int,
    block_kv: int,
    most: int,
    members: int = 1,
) -> np.ndarray:
    """Return which tiles of queries each program works on, in order.

    A tile goes to the program that is free first, the longest tiles first, of a section of heads at
    a time. The keys and values of a section fit the L2 cache. The long tiles are the first to read
    them from memory. Where each program had a long tile of another head, all would wait for memory
    at the same time, and for the products later: so a section is no larger than it has to be.

    Args:
        spec: the problem.
        block_q, block_kv: rows of a tile of q, and of k and v.
        most: programs at most.
        members: heads of what a tile visits, one after the other.

    Returns:
        int32 [programs, 1 + most tiles]: the number of tiles, and their numbers; tile t of head h
        of batch element b has the number (b · heads + h) · tiles + t.
    """
    costs = [x + TILE_OVERHEAD for x in reversed(steps_of_queries(spec, block_q, block_kv))]
    num_tiles = len(costs)
    heads = spec.batch * spec.heads_q
    unit = together = 1
    if min(costs) < max(costs):
        bytes_of_head = spec.seq_kv * (spec.head_dim + spec.head_dim_v) * 2 * members
        unit = spec.group_size
        needed = max(most // num_tiles, most // PROGRAMS_OF_HEAD) // unit
        together = max(min(needed, L2_BYTES // bytes_of_head), 1)
    bounds = [unit * x for x in divide(heads // unit, together)]
    longest_first = sorted(range(num_tiles), key=lambda tile: (-costs[tile], -tile))
    order = [
        (head, tile)
        for first, end in pairwise(bounds)
        for tile in longest_first
        for head in range(first, end)
    ]
    programs = min(len(order), most)
    free = [(0.0, program) for program in range(programs)]
    tiles: list[list[int]] = [[] for _ in range(programs)]
    for head, tile in order:
        time, program = heapq.heappop(free)
        tiles[program].append(head * num_tiles + tile)
        heapq.heappush(free, (time + costs[tile], program))
    schedule = np.zeros((programs, 1 + max(map(len, tiles))), np.int32)
    for program, own in enumerate(tiles):
        schedule[program, : 1 + len(own)] = len(own), *own
    return schedule


def divide(heads: int, together: int) -> list[int]:
    """Return the bounds of sections of about as many heads each, `together` at most.

    A short one at the end would have too few tiles for all programs: those with its longest ones
    would end last.
    """
    sections = -(-heads // together)
    return [heads * section // sections for section in range(sections + 1)]
