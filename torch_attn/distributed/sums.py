"""Sums of the gradients that ranks send to where keys are held."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from torch_attn.kernels.sum import sum_tensors
from twin_attention.contract.exchange import Rows

_AT_A_TIME = 4  # addends of a pass over memory


class GradientSums:
    """Gradients of a rank's keys, through its own queries and through those of others.

    A few of all rows are kept and summed in one pass over memory. Those of some rows are added to
    the first at once. What is added when follows from the plan.
    """

    def __init__(self, num_rows: int) -> None:
        """Take the number of the rank's keys."""
        self._num_rows = num_rows
        self._addends: list[tuple[Tensor, ...]] = []

    def add(self, arrived: Sequence[Tensor] | None, rows: Sequence[Rows]) -> None:
        """Add gradients that arrived, None for nothing.

        Args:
            arrived: [B, S, H, D] float32 each, which may be overwritten.
            rows: what `Peers.exchange` was to receive.
        """
        if arrived is None:
            return
        start = 0
        for _, group in groupby(rows, key=attrgetter("rank")):
            of_rank = list(group)
            count = sum(x.end - x.start for x in of_rank)
            found = tuple(x[:, start : start + count] for x in arrived)
            if count == self._num_rows:
                self._add_whole(found)  # in their order
            else:
                self._add_rows(found, of_rank)
            start += count

    def _add_whole(self, found: tuple[Tensor, ...]) -> None:
        if len(self._addends) == _AT_A_TIME:
            self._addends = [self.total(torch.float32)]
        self._addends.append(tuple(x.contiguous() for x in found))

    def _add_rows(self, found: tuple[Tensor, ...], rows: Sequence[Rows]) -> None:
        if not self._addends:
            shapes = ((x.shape[0], self._num_rows, *x.shape[2:]) for x in found)
            self._addends = [tuple(x.new_zeros(y) for x, y in zip(found, shapes, strict=True))]
        start = 0
        for _, first, end, token, _ in rows:
            count = end - first
            for total, x in zip(self._addends[0], found, strict=True):
                total[:, token : token + count] += x[:, start : start + count]
            start += count

    def total(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the sums in a dtype."""
        return tuple(sum_tensors(xs, dtype) for xs in zip(*self._addends, strict=True))
