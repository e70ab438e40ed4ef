"""Sums of the gradients that ranks send to where keys are held."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_attn.kernels.sum import sum_rows
from twin_attention.contract.transfers import Rows

_KEPT = 4  # arrivals kept before they are summed, since their memory is reused
_AT_A_TIME = 8  # addends per pass over memory


class _Addend(NamedTuple):
    """Gradients [B, rows, H, D] float32; `places` [num_rows] has each key's row, or -1."""

    gradients: tuple[Tensor, ...]
    places: Tensor


class GradientSums:
    """Gradients of a rank's keys, through all ranks' queries, summed in the plan's order."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._kept = 0
        self._addends: list[_Addend] = []

    def add(self, gradients: tuple[Tensor, ...] | None, rows: tuple[Rows, ...]) -> None:
        """Add gradients.

        Args:
            gradients: [B, any, H, D] float32 each, None for none.
            rows: which of their rows, from `Rows.place` on, belong to which keys, from `Rows.token`
                on. They are added in this order.
        """
        if gradients is None:
            return
        if self._kept == _KEPT:
            self._addends = [self._whole(self.total(torch.float32))]
            self._kept = 1
        self._kept += 1
        for places in _places(rows, self._num_rows, gradients[0].device):
            self._addends.append(_Addend(gradients, places))

    def total(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        addends = self._addends
        while len(addends) > _AT_A_TIME:
            first = self._whole(_sum(addends[:_AT_A_TIME], torch.float32))
            addends = [first, *addends[_AT_A_TIME:]]
        return _sum(addends, dtype)

    def _whole(self, sums: tuple[Tensor, ...]) -> _Addend:
        every = Rows(0, 0, self._num_rows, 0)
        return _Addend(sums, _places((every,), self._num_rows, sums[0].device)[0])


def _sum(addends: Sequence[_Addend], dtype: torch.dtype) -> tuple[Tensor, ...]:
    places = [x.places for x in addends]
    return tuple(
        sum_rows(xs, places, dtype) for xs in zip(*(x.gradients for x in addends), strict=True)
    )


@lru_cache(maxsize=1024)
def _places(rows: tuple[Rows, ...], num_rows: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return each key's row among the gradients from each rank, [num_rows] int32."""
    found = []
    for _, of_rank in groupby(rows, key=attrgetter("rank")):
        places = np.full(num_rows, -1, np.int32)
        for _, start, end, token, place in of_rank:
            places[token : token + end - start] = np.arange(place, place + end - start)
        found.append(torch.from_numpy(places).to(device))
    return tuple(found)
