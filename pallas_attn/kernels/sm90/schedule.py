"""Choose which tiles each program works on, and in which order."""

from __future__ import annotations

import heapq
from functools import cache

import numpy as np

from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.steps import steps_of_queries

# Keys and values of heads that are worked on at the same time fit the L2 cache.
L2_BYTES = 32 * 2**20
# Time that a tile of queries takes beside its steps, in steps.
TILE_OVERHEAD = 1.5


@cache
def make_schedule(spec: AttentionSpec, block_q: int, block_kv: int, most: int) -> np.ndarray:
    """Return which tiles of queries each program works on, in order.

    A tile goes to the program that is free first, the longest tiles first, for the heads whose keys
    and values fit the L2 cache together.

    Args:
        spec: the problem.
        block_q, block_kv: rows of a tile of q, and of k and v.
        most: programs at most.

    Returns:
        int32 [programs, 1 + most tiles]: the number of tiles, and their numbers; tile t of head h
        of batch element b has the number (b · heads + h) · tiles + t.
    """
    costs = [x + TILE_OVERHEAD for x in reversed(steps_of_queries(spec, block_q, block_kv))]
    num_tiles = len(costs)
    heads = spec.batch * spec.heads_q
    together = 1
    if min(costs) < max(costs):
        bytes_of_head = spec.seq_kv * (spec.head_dim + spec.head_dim_v) * 2
        together = max(L2_BYTES // bytes_of_head, 1) * spec.group_size
    longest_first = sorted(range(num_tiles), key=lambda tile: (-costs[tile], -tile))
    order = [
        (head, tile)
        for first in range(0, heads, together)
        for tile in longest_first
        for head in range(first, min(first + together, heads))
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
