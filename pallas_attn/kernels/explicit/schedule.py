"""Choose which tiles each program works on, and in which order."""

from __future__ import annotations

import heapq
from functools import lru_cache
from itertools import pairwise

import numpy as np

from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.steps import steps_of_queries

# What the tiles of heads that are worked on at the same time visit fits in the L2 cache.
L2_BYTES = 32 * 2**20
# A section has about a tile for each program, and a head for every PROGRAMS_OF_HEAD programs.
PROGRAMS_OF_HEAD = 8
# Time of a tile of queries besides its steps, in steps.
TILE_OVERHEAD = 1.5


# Only the last calls: 4 bytes a tile are megabytes for the longest problems.
@lru_cache(maxsize=16)
def make_schedule(
    spec: AttentionSpec, block_q: int, block_kv: int, most: int, members: int = 1
) -> np.ndarray:
    """Return which tiles of queries each program works on, in order.

    The tiles of one section of heads are dealt out at a time, the longest first, each to the
    program that is free first. The keys and values of a section fit in the L2 cache. Sections are
    no larger than needed, so that not all programs wait for memory at the same time.

    most: the most programs. members: how many heads a tile visits, one after the other.

    Returns:
        int32 [programs, 1 + most tiles]: the number of tiles, then the tiles' numbers; tile t of
        head h of batch element b has the number (b · heads + h) · tiles + t.
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
    """Return bounds of about equal sections of heads: a short last one has too few tiles."""
    sections = -(-heads // together)
    return [heads * section // sections for section in range(sections + 1)]
