"""Count the steps of explicit SM90 kernels: products of a tile of queries and one of keys."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from twin_attention.contract.spec import AttentionSpec, VarlenSpec, Window

# Programs share a tile that takes longer than this multiple of an SM's mean work.
MOST_OF_MEAN = 1.25
# With this many query heads per kv head, and head dimensions above 64, the queries that programs
# read at a time do not fit in the L2 cache, unless all tiles of keys see the same queries.
LARGE_GROUP = 8


@lru_cache(maxsize=1024)
def steps_of_queries(spec: AttentionSpec, block_q: int, block_kv: int) -> tuple[int, ...]:
    """Return how many tiles of keys each tile of queries visits, the last tile first."""
    if isinstance(spec, VarlenSpec):
        return (1,) * (spec.seq_q // block_q + spec.num_sequences + 1)
    steps = []
    for start in range(0, spec.seq_q, block_q):
        last = min(start + block_q, spec.seq_q) - 1
        begin, end = spec.visible_keys(start).start, spec.visible_keys(last).stop
        steps.append(max(-(-end // block_kv) - begin // block_kv, 1))
    return tuple(reversed(steps))


@lru_cache(maxsize=1024)
def steps_of_keys(spec: AttentionSpec, block_q: int, block_kv: int) -> tuple[int, ...]:
    """Return how many tiles of a head's queries each tile of keys visits, the first tile first."""
    return tuple(reversed(steps_of_queries(exchange_sides(spec), block_kv, block_q)))


def exchange_sides(spec: AttentionSpec) -> AttentionSpec:
    """Return the problem with queries and keys exchanged, with the same number of heads."""
    window = Window(spec.window.right, spec.window.left)
    return replace(spec, seq_q=spec.seq_kv, seq_kv=spec.seq_q, window=window)


@lru_cache(maxsize=1024)
def keys_of_query(spec: AttentionSpec) -> float:
    """Return how many keys a query sees by its position, on average."""
    if isinstance(spec, VarlenSpec):
        share = 2 / (spec.num_sequences + 1)
        seq_q, seq_kv = (max(int(share * size), 1) for size in (spec.seq_q, spec.seq_kv))
        spec = replace(spec, seq_q=seq_q, seq_kv=seq_kv)
    queries = range(min(32, spec.seq_q - 1), spec.seq_q, 64)
    return sum(len(spec.visible_keys(query)) for query in queries) / len(queries)


@lru_cache(maxsize=1024)
def splits_group(
    spec: AttentionSpec,
    block_q: int,
    block_kv: int,
    num_sms: int,
    most_of_mean: float = MOST_OF_MEAN,
) -> bool:
    """Return whether programs share a tile of keys, each with one query head, and add up dk and dv.

    With one program for all query heads and few kv heads, most SMs would wait for the longest
    tiles, which may take `most_of_mean` times an SM's mean work.
    """
    if spec.is_packed or spec.group_size == 1:
        return False
    steps = steps_of_keys(spec, block_q, block_kv)
    if is_uneven(spec) and has_wide_rows(spec) and spec.group_size >= LARGE_GROUP:
        return True
    mean = spec.batch * spec.heads_kv * sum(steps) / num_sms
    return max(steps) > most_of_mean * mean


def is_uneven(spec: AttentionSpec) -> bool:
    """Return True if not all tiles of keys are seen by the same queries."""
    return spec.window != Window()


def has_wide_rows(spec: AttentionSpec) -> bool:
    return max(spec.head_dim, spec.head_dim_v) > 64
