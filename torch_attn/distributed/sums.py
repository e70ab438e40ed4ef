"""Sums of the gradients that ranks send to where keys are held."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import triton
import triton.language as tl
from torch import Tensor

_AT_A_TIME = 4  # addends of a pass over memory
_BLOCK, _NUM_WARPS = 4096, 8


@triton.jit
def sum_kernel(out_ptr, x_ptrs, size, BLOCK: tl.constexpr):
    """One program sums BLOCK elements of float32 tensors, in their order, and rounds them once."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x_ptrs[0] + element, mask=element < size)
    for i in tl.static_range(1, len(x_ptrs)):
        total += tl.load(x_ptrs[i] + element, mask=element < size)
    tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=element < size)


class GradientSums:
    """Gradients of a rank's keys, through its own queries and through those of others.

    A few are kept and summed in one pass over memory; their order is that in which they are given.
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
        return tuple(_sum(xs, dtype) for xs in zip(*self._addends, strict=True))


def _sum(xs: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    if not xs[0].is_cuda or len(xs) == 1:
        return reduce(torch.add, xs).to(dtype)
    out = xs[0].new_empty(xs[0].shape, dtype=dtype)
    with torch.cuda.device(out.device):
        grid = (triton.cdiv(out.numel(), _BLOCK),)
        sum_kernel[grid](out, xs, out.numel(), _BLOCK, num_warps=_NUM_WARPS)
    return out
