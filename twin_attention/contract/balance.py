"""Deal out documents to ranks with equal causal work, and few documents shared between ranks.

A rank reads a whole document without an exchange, so a document is cut only for equal work. Its
*degree* is the number of ranks that share it, each a part from both ends, as in "zigzag".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from operator import attrgetter
from typing import NamedTuple

import numpy as np

_IMBALANCE_MAX = 1.05  # of the rank with most work over the mean
_POURED = 1 / 16  # of all tokens: the shortest documents, which fill the room that others leave
_RELIEF_LEAST = 0.5  # of a rank's work above the mean: what one more cut should take from it
_SHARE_LEAST = 1 / 64  # of a rank's tokens: a document is not cut into shares that are shorter
_TRIES = 2  # before one more rank is relieved at a time, so that many ranks need few tries


class _Document(NamedTuple):
    """Its first position, and one past its last."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def work(self) -> int:
        """Pairs of tokens under a causal mask."""
        return self.length * (self.length + 1) // 2


class _Share(NamedTuple):
    """A rank's tokens of a document: the bounds of its runs, and the pairs that they see."""

    document: _Document
    parts: tuple[tuple[int, int], ...]
    num_tokens: int
    work: int

    @classmethod
    def of(cls, document: _Document, *parts: tuple[int, int]) -> _Share:
        num_tokens = sum(end - start for start, end in parts)
        before = 2 * document.start - 1
        work = sum((end - start) * (start + end - before) // 2 for start, end in parts)
        return cls(document, parts, num_tokens, work)


@dataclass
class _Rank:
    """Its shares, its work in pairs, and its room for more tokens."""

    room: int
    work: int = 0
    shares: list[_Share] = field(default_factory=list)

    def take(self, share: _Share) -> None:
        self.room -= share.num_tokens
        self.work += share.work
        self.shares.append(share)


def balanced_owners(offsets: Sequence[int], seq_len: int, size: int) -> np.ndarray:
    """Return the rank that holds each token, [seq_len] int32; all ranks hold the same number.

    Padding begins at the last offset.
    """
    local_len = seq_len // size
    documents = [_Document(start, end) for start, end in pairwise(offsets) if start < end]
    mean = sum(document.work for document in documents) / size
    degrees = {x: _degree_least(x, local_len, _IMBALANCE_MAX * mean, size) for x in documents}
    best = ranks = _deal(degrees, local_len, size)
    tries = 0
    while _most(best) > _IMBALANCE_MAX * mean:
        busiest = sorted(ranks, key=attrgetter("work"))[-1 - tries // _TRIES :]
        found = [_document_to_cut(rank, degrees, local_len, size, mean) for rank in busiest]
        to_cut = {document for document in found if document is not None}
        if not to_cut:
            break
        for document in to_cut:
            degrees[document] += 1
        ranks = _deal(degrees, local_len, size)
        best = min(best, ranks, key=_most)
        tries += 1
    owners = np.empty(seq_len, np.int32)
    for number, rank in enumerate(best):
        for share in rank.shares:
            for start, end in share.parts:
                owners[start:end] = number
    owners[offsets[-1] :] = np.repeat(np.arange(size), [rank.room for rank in best])
    return owners


def _most(ranks: Iterable[_Rank]) -> int:
    return max(rank.work for rank in ranks)


def _degree_least(document: _Document, local_len: int, work_max: float, size: int) -> int:
    """Return the fewest ranks that can share a document, by a rank's limits of room and work."""
    return min(size, ceil(max(document.length / local_len, document.work / work_max)))


def _shares(document: _Document, degree: int) -> Iterator[_Share]:
    if degree == 1:
        yield _Share.of(document, (document.start, document.end))
        return
    cuts = [document.start + document.length * i // (2 * degree) for i in range(2 * degree + 1)]
    parts = list(pairwise(cuts))
    for i in range(degree):
        yield _Share.of(document, parts[i], parts[-1 - i])


def _deal(degrees: dict[_Document, int], local_len: int, size: int) -> list[_Rank]:
    """Deal out the costliest shares first, each to the rank with least work that has room."""
    ranks = [_Rank(local_len) for _ in range(size)]
    shares = [share for item in degrees.items() for share in _shares(*item)]
    shares.sort(key=attrgetter("work"), reverse=True)
    num_tokens = sum(share.num_tokens for share in shares)
    count, count_max = 0, int(_POURED * num_tokens)
    poured = []
    while shares and degrees[shares[-1].document] == 1:
        if count + shares[-1].num_tokens > count_max:
            break
        count += shares[-1].num_tokens
        poured.append(shares.pop())
    # Poured documents or padding.
    room = local_len * size - num_tokens + count
    work_of_room = sum(share.work for share in poured) / max(room, 1)
    for share in shares:
        # If a rank had too little room, more than two ranks would share a poured document.
        spare = count // (2 * size) if degrees[share.document] == 1 else 0
        roomy = [rank for rank in ranks if rank.room >= share.num_tokens + spare]
        if roomy:
            min(roomy, key=lambda rank: rank.work + work_of_room * rank.room).take(share)
        else:
            poured.append(share)
    _pour(sorted(poured, key=attrgetter("parts")), ranks)
    return ranks


def _pour(shares: Sequence[_Share], ranks: Sequence[_Rank]) -> None:
    """Fill the ranks one after the other, so that a cut document continues on the next rank.

    Each rank keeps room for padding in proportion to its own room.
    """
    room = sum(rank.room for rank in ranks)
    padding = room - sum(share.num_tokens for share in shares)
    fillable = iter([(rank, rank.room * padding // max(room, 1)) for rank in ranks])
    rank, kept = next(fillable)
    for share in shares:
        for start, end in share.parts:
            while start < end:
                while rank.room == kept:
                    rank, kept = next(fillable)
                stop = min(end, start + rank.room - kept)
                rank.take(_Share.of(share.document, (start, stop)))
                start = stop


def _document_to_cut(
    rank: _Rank, degrees: dict[_Document, int], local_len: int, size: int, mean: float
) -> _Document | None:
    """Return the document to cut: the shortest that takes enough work, or what takes most."""
    length_least = max(_SHARE_LEAST * local_len, 1)

    def can_be_cut(document: _Document) -> bool:
        degree = degrees[document]
        return degree < size and document.length > degree * length_least

    def relief(document: _Document) -> float:
        degree = degrees[document]
        return document.work / (degree * (degree + 1))

    own = dict.fromkeys(share.document for share in rank.shares)
    found = [x for x in own if can_be_cut(x)] or [x for x in degrees if can_be_cut(x)]
    enough = [x for x in found if relief(x) >= _RELIEF_LEAST * (rank.work - mean)]
    if enough:
        return min(enough, key=attrgetter("length"))
    return max(found, key=relief, default=None)
