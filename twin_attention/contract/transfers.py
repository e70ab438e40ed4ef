"""Decide how ranks exchange keys: which way, in which steps, and which rows go where.

Every rank gets the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from twin_attention.contract.context import ContextPlan, Intervals, Runs, intervals_of
from twin_attention.contract.spec import AttentionSpec, FlashOptions, Window

EXCHANGES = ("ring", "gather", "heads")
BLOCK = 128  # rows that travel together: a kernel tile
RUNS_MAX = 4  # of one rank's rows in a step; with more, the rows between runs travel too
PIECES_MAX = 2  # per run, plus a few; with more, keys are put in order after they arrive
_PIECES_BESIDE = 8
# The numbers that `exchange=None` uses, for an H200 with NVLink and NCCL.
_FLOPS = 650e12  # a second, of the kernels
_MEMORY = 3e12  # bytes a second
_LINK = 240e9  # bytes a second that one rank receives
# Seconds of the host: to launch a step, to begin an exchange, and for a run of rows of keys and
# values.
_STEP, _EXCHANGE, _RUN = 30e-6, 100e-6, 20e-6
_RANKS_COUNTED = 4  # or a few more, of all, for the slowest


class Rows(NamedTuple):
    """Rows of tensors that one rank sends to another.

    start, end: which rows of the sender's tensors.
    token: the first row's index among the tokens of the rank that holds the keys.
    place: the first row's index among the receiver's received rows.
    """

    rank: int
    start: int
    end: int
    token: int
    place: int = 0


class Step(NamedTuple):
    """The keys that a rank reads at a time, and what it exchanges for them.

    received: the keys that arrive, own keys included, as they are stored.
    order: [rows] int64, the row of each key among the received ones; None in sequence order.
    sent: own keys that go to other ranks in this step.
    returned: rows of the step's gradients that go back to other ranks.
    gathered: rows of the gradients in other ranks' steps that belong to own keys.
    """

    received: tuple[Rows, ...]
    order: np.ndarray | None
    intervals: Intervals
    sent: tuple[Rows, ...]
    returned: tuple[Rows, ...]
    gathered: tuple[Rows, ...]

    @property
    def num_keys(self) -> int:
        """Rows of the step's keys."""
        return sum(rows.end - rows.start for rows in self.received)


class Hop(NamedTuple):
    """The keys that each rank reads at a time from one other rank; all ranks read the same number.

    distance: rank r reads keys of rank ``(r - distance) % size``.
    routes: the ranks that send keys, and to whom.
    sent: [size, rows] int32, the rows that each rank sends, padded with `local_len`; None if all.
    places: [size, local_len] int32, where each row is among `sent`, `rows` if it is not.
    positions: [size, rows] int32, of the keys that each rank reads, padded with `seq_len`.
    runs: the same positions, without padding.
    """

    distance: int
    routes: tuple[tuple[int, int], ...]
    sent: np.ndarray | None
    places: np.ndarray | None
    positions: np.ndarray | None
    runs: Runs


class _Keys(NamedTuple):
    received: tuple[Rows, ...]
    order: np.ndarray | None
    intervals: Intervals

    def of(self, holder: int) -> Iterable[Rows]:
        return (rows for rows in self.received if rows.rank == holder)


@lru_cache(maxsize=256)
def exchange_steps(plan: ContextPlan, window: Window, exchange: str, rank: int) -> tuple[Step, ...]:
    """Return the steps in which a rank reads all keys that its queries see, its own first.

    With `exchange` "ring" there is a step for the keys of each rank; with "gather", one.
    """
    size = plan.size
    if exchange == "gather":
        others = [q for q in range(size) if q != rank]
        return (_step(plan, window, rank, {q: tuple(range(size)) for q in [rank, *others]}),)
    found = []
    for distance in _distances(plan, window):
        holders = {q: ((q - distance) % size,) for q in (rank, (rank + distance) % size)}
        found.append(_step(plan, window, rank, holders))
    return tuple(found)


@lru_cache(maxsize=256)
def equal_hops(plan: ContextPlan, window: Window) -> tuple[Hop, ...]:
    """Return the hops of a ring, own keys first: what one rank must send, all send.

    One program for all ranks needs such hops.
    """
    size, local, needed = plan.size, plan.local_len, plan.needed(window)
    found = []
    for distance in _distances(plan, window):
        pairs = [(rank, (rank + distance) % size) for rank in range(size)]
        rows = [
            np.concatenate([np.arange(x.start, x.end) for x in runs] or [np.zeros(0, int)])
            for runs in (_needed(plan, window, to, rank) for rank, to in pairs)
        ]
        count = max(map(len, rows))
        if count == local:
            rows = [np.arange(local)] * size
        sent = np.full((size, count), local, np.int32)
        places = np.full((size, local), count, np.int32)
        positions = np.full((size, count), plan.seq_len, np.int32)
        for (rank, to), x in zip(pairs, rows, strict=True):
            sent[rank, : len(x)], places[rank, x] = x, np.arange(len(x))
            positions[to, : len(x)] = plan.positions_by_rank[rank, x]
        routes = tuple((rank, to) for rank, to in pairs if needed[to, rank])
        received = [x[x < plan.seq_len] for x in positions]
        rows_of = (None, None, None) if count == local else (sent, places, positions)
        found.append(Hop(distance, routes, *rows_of, Runs.of(received, plan.step)))
    return tuple(found)


def _step(
    plan: ContextPlan, window: Window, rank: int, holders: dict[int, tuple[int, ...]]
) -> Step:
    """Return a rank's step; `holders` exchange keys with it."""
    keys = {q: _keys_of(plan, window, q, ranks) for q, ranks in holders.items()}
    sent = [rows._replace(rank=q) for q in keys if q != rank for rows in keys[q].of(rank)]
    returned = [
        rows._replace(rank=holder)
        for holder in range(plan.size)
        if holder != rank
        for rows in _gathered(keys, holder)
        if rows.rank == rank
    ]
    return Step(*keys[rank], tuple(sent), tuple(returned), tuple(_gathered(keys, rank)))


def _gathered(keys: dict[int, _Keys], holder: int) -> Iterable[Rows]:
    """Yield the rows of other ranks' steps whose gradients a holder of keys receives."""
    place = 0
    for rank in sorted(keys.keys() - {holder}):
        for _, first, end, token, start in keys[rank].of(holder):
            count = end - first
            yield Rows(rank, start, start + count, token, place)
            place += count


def _placed(received: Iterable[Rows]) -> Iterable[Rows]:
    place = 0
    for rows in received:
        yield rows._replace(place=place)
        place += rows.end - rows.start


@lru_cache(maxsize=1024)
def _keys_of(plan: ContextPlan, window: Window, rank: int, holders: tuple[int, ...]) -> _Keys:
    """Return the holders' keys that a rank's queries see, in the order of the sequence."""
    begins, ends = _bounds(plan, window)[:, plan.positions_by_rank[rank]]
    held = [rows for holder in holders for rows in _needed(plan, window, rank, holder)]
    holder_of = np.concatenate(
        [np.full(x.end - x.start, x.rank) for x in held] or [np.zeros(0, int)]
    )
    token_of = np.concatenate([np.arange(x.start, x.end) for x in held] or [np.zeros(0, int)])
    positions = plan.positions_by_rank[holder_of, token_of]
    order = np.argsort(positions, kind="stable")
    intervals = intervals_of(begins, ends, positions[order])
    pieces = _pieces(holder_of[order], token_of[order])
    if len(pieces) <= PIECES_MAX * len(held) + _PIECES_BESIDE:
        return _Keys(tuple(_placed(pieces)), None, intervals)
    return _Keys(tuple(_placed(held)), order, intervals)


@lru_cache(maxsize=16)
def _distances(plan: ContextPlan, window: Window) -> tuple[int, ...]:
    return plan.distances(window)


@lru_cache(maxsize=16)
def _bounds(plan: ContextPlan, window: Window) -> np.ndarray:
    return np.stack(plan.bounds(window))


@lru_cache(maxsize=4096)
def _needed(plan: ContextPlan, window: Window, rank: int, holder: int) -> tuple[Rows, ...]:
    """Return the rows of a holder's keys that a rank's queries see."""
    runs = [(0, plan.local_len)]  # all of its own, so that each has a gradient
    if holder != rank:
        runs = _runs(_seen(plan, window, rank)[plan.positions_by_rank[holder]])
    return tuple(Rows(holder, start, end, start) for start, end in runs)


@lru_cache(maxsize=16)
def _seen(plan: ContextPlan, window: Window, rank: int) -> np.ndarray:
    """Return whether some query of a rank sees each token, [seq_len] bool."""
    begins, ends = _bounds(plan, window)[:, plan.positions_by_rank[rank]]
    opened, closed = (np.bincount(x, minlength=plan.seq_len + 1) for x in (begins, ends))
    return np.cumsum(opened - closed)[:-1] > 0


def _runs(seen: np.ndarray) -> list[tuple[int, int]]:
    """Return the rows that cover all seen tokens, as a few runs of whole blocks."""
    size = len(seen)
    blocks = np.add.reduceat(seen, np.arange(0, size, BLOCK)) > 0 if size else seen
    edges = np.flatnonzero(np.diff(np.concatenate([[False], blocks, [False]]).astype(np.int8)))
    runs = [(int(a) * BLOCK, min(int(b) * BLOCK, size)) for a, b in edges.reshape(-1, 2)]
    if len(runs) > RUNS_MAX:
        runs = [(runs[0][0], runs[-1][1])]
    # No run is shorter than a block, if there are that many rows.
    return [(max(0, min(start, end - BLOCK)), end) for start, end in runs]


def _pieces(holder_of: np.ndarray, token_of: np.ndarray) -> list[Rows]:
    """Return the runs of consecutive tokens of one rank."""
    if not len(token_of):
        return []
    breaks = np.flatnonzero((np.diff(holder_of) != 0) | (np.diff(token_of) != 1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], len(token_of)]
    tokens = token_of[starts].tolist()
    return [
        Rows(holder, token, token + end - start, token)
        for holder, token, start, end in zip(
            holder_of[starts].tolist(), tokens, starts, ends, strict=True
        )
    ]


def choose_exchange(
    exchange: str | None,
    plan: ContextPlan,
    window: Window,
    spec: AttentionSpec,
    one_program: bool = False,
) -> tuple[str, str]:
    """Return how ranks exchange keys, and why; None takes the faster forward by estimate.

    With `one_program`, the same for all ranks, None takes "ring". `spec` is of a rank's queries and
    its own keys.
    """
    if exchange is not None:
        return exchange, "it was asked for"
    if one_program:
        return "ring", "ranks of one program would gather the keys of all"
    seconds = {x: _seconds(x, plan, window, _Sizes.of(spec)) for x in ("ring", "gather")}
    chosen = min(seconds, key=lambda x: seconds[x])
    ring, gather = (f"{1e3 * x:.2g} ms" for x in seconds.values())
    return chosen, f"by estimate a forward takes {ring} in a ring, and {gather} after a gather"


class _Sizes(NamedTuple):
    """The operations of a pair, and the bytes of a query's out and of a token's keys and values."""

    flops: int
    out: int
    keys: int

    @classmethod
    def of(cls, spec: AttentionSpec) -> _Sizes:
        columns = spec.head_dim + spec.head_dim_v
        return cls(
            2 * spec.batch * spec.heads_q * columns,
            4 * spec.batch * spec.heads_q * spec.head_dim_v,
            spec.batch * spec.heads_kv * columns * spec.dtype_bits // 8,
        )


@lru_cache(maxsize=16)
def _pairs(plan: ContextPlan, window: Window) -> np.ndarray:
    return plan.pairs(window)


@lru_cache(maxsize=256)
def _seconds(exchange: str, plan: ContextPlan, window: Window, sizes: _Sizes) -> float:
    """Estimate a forward's time: of GPUs, which wait for the slowest, or of the host ahead."""
    size, pairs = plan.size, _pairs(plan, window)
    counted = range(0, size, max(1, size // _RANKS_COUNTED))
    gathers = exchange == "gather"
    distances = (0,) if gathers else _distances(plan, window)
    computing, arriving, host = [], [], 0.0
    for distance in distances:
        of_step = {q: tuple(range(size)) if gathers else ((q - distance) % size,) for q in counted}
        seen = max(int(pairs[q, list(ranks)].sum()) for q, ranks in of_step.items())
        runs = {
            q: [x for r in ranks if r != q for x in _needed(plan, window, q, r)]
            for q, ranks in of_step.items()
        }
        rows = max(sum(x.end - x.start for x in of_rank) for of_rank in runs.values())
        host += _STEP
        if rows:  # the same number is sent
            host += _EXCHANGE + 2 * _RUN * max(map(len, runs.values()))
        # Out is read and written in float32 where a query sees some key, except first and last.
        memory = (2.0 - (distance == 0) - 0.5 * (distance == distances[-1])) * sizes.out
        memory *= min(plan.local_len, seen)
        if gathers and rows:  # keys are joined
            memory += 2 * (plan.local_len + rows) * sizes.keys
            host += 2 * _RUN * size  # there may be twice as many runs in the order of the sequence
        computing.append(seen * sizes.flops / _FLOPS + memory / _MEMORY)
        arriving.append(rows * sizes.keys / _LINK)
    # In a ring the next step's keys arrive while this one computes.
    keys_first = arriving[0] if gathers else 0.0
    return max(host, keys_first + sum(map(max, computing, [*arriving[1:], 0.0])))


def describe_exchange(
    exchange: str | None,
    plan: ContextPlan,
    window: Window,
    spec: AttentionSpec,
    one_program: bool = False,
) -> str:
    """Return a line for `explain`: how ranks exchange keys, why, and in how many steps."""
    chosen, reason = choose_exchange(exchange, plan, window, spec, one_program)
    if chosen != "ring":
        return f"{chosen}: {reason}"
    steps = len(_distances(plan, window)) - 1
    return f"{chosen}: {reason}; keys of other ranks come in {steps} of up to {plan.size - 1} steps"


def problem_of_rank(
    exchange: str, spec: AttentionSpec, plan: ContextPlan, options: FlashOptions
) -> AttentionSpec:
    """Return the problem of a rank's kernels; `spec` describes its queries and keys."""
    if exchange == "ring":
        return spec
    if exchange == "gather":
        return replace(spec, seq_kv=plan.seq_len)
    heads_q, heads_kv = spec.heads_q // plan.size, spec.heads_kv // plan.size
    same = {field.name: getattr(spec, field.name) for field in fields(AttentionSpec)}
    return replace(
        AttentionSpec(**same), seq_q=plan.seq_len, seq_kv=plan.seq_len, heads_q=heads_q,
        heads_kv=heads_kv, window=options.window, segmented=plan.cu_seqlens is not None,
    )  # fmt: skip
