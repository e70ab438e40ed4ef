"""Context parallel attention: which rank holds which tokens of a sequence, and who sees whom.

A rank's tokens are in the order of the sequence. A query sees an interval of any rank's keys, whose
bounds never decrease from one query to the next. A kernel needs only these bounds (`Intervals`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from array_api_compat import array_namespace, device, is_jax_array

from twin_attention.contract.balance import balanced_owners
from twin_attention.contract.spec import Window
from twin_attention.contract.validate.context import (
    check_context_plan,
    check_rank,
    check_shards,
    check_whole,
)

LAYOUTS = ("contiguous", "zigzag", "stripe", "balanced")


class Intervals(NamedTuple):
    """Say which rows of the other axis each row sees: int32 bounds that never decrease.

    key_begins, key_ends: [Sq], the first key that each query sees, and one past the last.
    query_begins, query_ends: [Skv], the same for the queries that see each key.
    """

    key_begins: Any
    key_ends: Any
    query_begins: Any
    query_ends: Any


class Runs(NamedTuple):
    """The increasing positions of each rank's tokens, as runs: [size, runs] int32.

    counts: tokens of a run; 0 for runs that only other ranks have.
    step: distance from one position of a run to the next.
    """

    starts: np.ndarray
    counts: np.ndarray
    step: int

    @classmethod
    def of(cls, positions: Iterable[np.ndarray], step: int) -> Runs:
        """Return the runs of each rank's positions; within a run they are `step` apart."""
        split = [np.split(x, np.flatnonzero(np.diff(x) != step) + 1) for x in positions]
        starts, counts = np.zeros((2, len(split), max(map(len, split))), np.int32)
        for rank, runs in enumerate(split):
            starts[rank, : len(runs)] = [run[0] if len(run) else 0 for run in runs]
            counts[rank, : len(runs)] = [len(run) for run in runs]
        return cls(starts, counts, step)


@dataclass(frozen=True)
class ContextPlan:
    """Describe how a sequence's tokens are divided over a group's ranks; made by `context_plan`.

    Attributes:
        seq_len: tokens of the sequence, or of all packed documents with their padding.
        size: number of ranks.
        layout: one of `LAYOUTS`.
        cu_seqlens: offsets of packed documents, padding behind the last one; None without
            documents.
    """

    seq_len: int
    size: int
    layout: str
    cu_seqlens: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Every call looks its plan up, and there may be many documents.
        return hash((self.seq_len, self.size, self.layout, self.cu_seqlens))

    @property
    def local_len(self) -> int:
        """Tokens of each rank."""
        return self.seq_len // self.size

    @cached_property
    def owners(self) -> np.ndarray:
        """The rank that holds each token, [seq_len] int32."""
        token = np.arange(self.seq_len, dtype=np.int32)
        if self.layout == "stripe":
            return token % self.size
        if self.layout == "contiguous":
            return token // max(self.local_len, 1)
        if self.layout == "zigzag":
            chunk = token // max(self.local_len // 2, 1)
            return np.minimum(chunk, 2 * self.size - 1 - chunk)
        return balanced_owners(self.cu_seqlens or (0, self.seq_len), self.seq_len, self.size)

    @property
    def _num_tokens(self) -> int:
        """Tokens before the padding."""
        return self.seq_len if self.cu_seqlens is None else self.cu_seqlens[-1]

    def positions(self, rank: int) -> np.ndarray:
        """Return the positions of a rank's tokens in the sequence, [local_len] int32, increasing.

        Raises:
            TypeError: the rank is no integer.
            ValueError: the plan has no such rank.
        """
        return self.positions_by_rank[check_rank(rank, self.size)]

    @cached_property
    def positions_by_rank(self) -> np.ndarray:
        """The positions of each rank's tokens, [size, local_len] int32."""
        order = np.argsort(self.owners, kind="stable").astype(np.int32)
        return order.reshape(self.size, self.local_len)

    @property
    def step(self) -> int:
        """The distance from one of a rank's positions to the next within a run."""
        return self.size if self.layout == "stripe" else 1

    @cached_property
    def runs(self) -> Runs:
        """The positions of each rank's tokens."""
        return Runs.of(self.positions_by_rank, self.step)

    @cached_property
    def order(self) -> np.ndarray:
        """The row of each token if all ranks' tokens are joined in rank order."""
        return np.argsort(self.positions_by_rank.reshape(-1), kind="stable").astype(np.int32)

    def documents(self, rank: int) -> np.ndarray:
        """Return where the document of each of a rank's tokens begins, [local_len] int32.

        A position minus this is the position within the document, as for rotary embeddings.
        """
        begins, _ = self.bounds(Window())
        return begins[self.positions(rank)]

    @cached_property
    def document_ids(self) -> np.ndarray:
        """The document of each token, -1 for padding, [seq_len] int32."""
        token = np.arange(self.seq_len)
        offsets = np.asarray(self.cu_seqlens or (0, self.seq_len))
        ids = np.searchsorted(offsets, token, side="right") - 1
        return np.where(token < self._num_tokens, ids, -1).astype(np.int32)

    def bounds(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        """Return each token's first visible position and one past the last, [seq_len]; none for
        padding.
        """
        token, left, right = np.arange(self.seq_len), window.left, window.right
        offsets = np.asarray(self.cu_seqlens or (0, self.seq_len))
        begins, ends = offsets[self.document_ids], offsets[self.document_ids + 1]
        if left is not None:
            begins = np.maximum(begins, token - min(left, self.seq_len))
        if right is not None:
            ends = np.minimum(ends, token + min(right, self.seq_len) + 1)
        is_padding = token >= self._num_tokens
        bounds = (np.where(is_padding, self.seq_len, x).astype(np.int32) for x in (begins, ends))
        begins, ends = bounds
        return begins, ends

    def intervals(self, rank: int, window: Window, rank_kv: int | None = None) -> Intervals:
        """Return which keys of `rank_kv`, or of the whole sequence for None, the queries of `rank`
        see.

        `window` includes `causal`.
        """
        begins, ends = (bound[self.positions(rank)] for bound in self.bounds(window))
        keys = np.arange(self.seq_len, dtype=np.int32)
        return intervals_of(begins, ends, keys if rank_kv is None else self.positions(rank_kv))

    def pairs(self, window: Window) -> np.ndarray:
        """Return how many pairs each rank's queries see with each rank's keys, [size, size]."""
        found = np.zeros((self.size, self.size), np.int64)
        begins, ends = self.bounds(window)
        for rank_kv in range(self.size):
            before = np.cumsum(np.append(0, self.owners == rank_kv))
            seen = before[ends] - before[begins]
            found[:, rank_kv] = np.bincount(self.owners, seen, self.size)
        return found

    def needed(self, window: Window) -> np.ndarray:
        """Return whose keys each rank's queries see, [size, size] bool; always its own."""
        return (self.pairs(window) > 0) | np.eye(self.size, dtype=bool)

    def distances(self, window: Window) -> tuple[int, ...]:
        """Return the distances at which some rank needs keys; first 0, for own keys.

        At distance d, rank r takes the keys of rank ``(r - d) % size``.
        """
        needed, rank = self.needed(window), np.arange(self.size)
        return tuple(d for d in range(self.size) if needed[rank, (rank - d) % self.size].any())


def intervals_of(begins: np.ndarray, ends: np.ndarray, positions: np.ndarray) -> Intervals:
    """Return which keys, at positions [Skv], each query sees: from begins on, before ends, [Sq]."""

    def search(bounds: np.ndarray, x: np.ndarray, side: Literal["left", "right"]) -> np.ndarray:
        return np.searchsorted(bounds, x, side=side).astype(np.int32)

    query_begins = search(ends, positions, "right")
    query_ends = np.maximum(search(begins, positions, "right"), query_begins)
    return Intervals(
        search(positions, begins, "left"), search(positions, ends, "left"), query_begins, query_ends
    )


def context_plan(
    seq_len: int,
    size: int,
    layout: str = "zigzag",
    cu_seqlens: Sequence[int] | np.ndarray | None = None,
) -> ContextPlan:
    """Plan which rank holds which tokens of a sequence, without communication.

    Every rank makes the same plan from the same numbers.

    Args:
        seq_len: tokens of the whole sequence, a multiple of `size`.
        size: ranks that share it.
        layout: "contiguous": rank r has the r-th part; under a causal mask the last rank has most
            work. "zigzag": of 2 · size parts, rank r has the r-th from the front and the r-th from
            the back, so causal work is equal; `seq_len` is a multiple of 2 · size. "stripe": rank r
            has every size-th token from the r-th on. "balanced": whole documents, and equal shares
            of a few long ones as in "zigzag"; no rank has more than 1.05 times the mean causal
            work, unless ranks have few tokens.
        cu_seqlens: [N + 1], offsets of packed documents as in `flash_attention_varlen`, but numbers
            on the host. Tokens past the last one are padding. None is one document.

    Returns:
        The plan, which can be compared and hashed.

    Raises:
        TypeError: a number that is no integer.
        ValueError: lengths that do not divide, another layout, offsets that decrease.

    Source: Liu et al. 2023 (Ring Attention, arXiv 2310.01889); Brandon et al. 2023 (Striped
    Attention, arXiv 2311.09431); for "zigzag" Dubey et al. 2024 (Llama 3), section 3.3.2.

    Example::

        from twin_attention.contract.context import context_plan

        plan = context_plan(16, 2)
        assert plan.positions(0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
        assert plan.positions(1).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    """
    return ContextPlan(*check_context_plan(seq_len, size, layout, cu_seqlens, LAYOUTS))


def shard_sequence(x: Any, plan: ContextPlan, rank: int | None = None, axis: int = 1) -> Any:
    """Return a rank's tokens from a whole sequence.

    Args:
        x: an array of any library, `plan.seq_len` long along `axis`. It may be traced.
        plan: where the tokens go.
        rank: whose tokens; None joins all ranks' in rank order, as JAX shards an axis.
        axis: of the tokens.

    Raises:
        ValueError: another length, or no such rank.
    """
    check_whole("x", x.shape, axis, plan.seq_len)
    rows = plan.positions_by_rank.reshape(-1) if rank is None else plan.positions(rank)
    return _take(x, rows, axis)


def unshard_sequence(xs: Any, plan: ContextPlan, axis: int = 1) -> Any:
    """Return the whole sequence from all ranks' tokens: undo `shard_sequence`.

    Args:
        xs: a list of each rank's tokens, `plan.local_len` long along `axis`; or one array that
            joins them in rank order.
        plan: where they came from.
        axis: of the tokens.

    Raises:
        ValueError: another number of ranks, or another length.
    """
    if isinstance(xs, list | tuple):
        check_shards([x.shape for x in xs], axis, plan.size, plan.local_len)
        joined = array_namespace(*xs).concat(list(xs), axis=axis)
    else:
        check_whole("xs", xs.shape, axis, plan.seq_len)
        joined = xs
    return _take(joined, plan.order, axis)


def _take(x: Any, rows: np.ndarray, axis: int) -> Any:
    xp = array_namespace(x)
    # A JAX array may be sharded over an axis that the rows lack; JAX moves the rows itself.
    where = {} if is_jax_array(x) else {"device": device(x)}
    return xp.take(x, xp.asarray(rows, **where), axis=axis)
