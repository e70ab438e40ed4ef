"""Sums of the gradients that ranks send to where keys are held."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_attn.kernels.sum import sum_tensors

_AT_A_TIME = 4  # addends of a pass over memory


class GradientSums:
    """Gradients of a rank's keys, through its own queries and through those of others.

    A few are kept and summed in one pass over memory, in the order in which they are given.
    """

    def __init__(self, own: Sequence[Tensor]) -> None:
        """Take gradients in float32, contiguous."""
        self._addends = [tuple(own)]

    def add(self, arrived: Sequence[Tensor] | None) -> None:
        """Add gradients of the same shapes; None for nothing."""
        if arrived is None:
            return
        if len(self._addends) == _AT_A_TIME:
            self._addends = [self.total(torch.float32)]
        self._addends.append(tuple(arrived))

    def total(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the sums in a dtype."""
        return tuple(sum_tensors(xs, dtype) for xs in zip(*self._addends, strict=True))
