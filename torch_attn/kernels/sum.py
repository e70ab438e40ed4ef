"""A sum of several tensors in one pass over memory."""

from functools import reduce

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _NUM_WARPS = 4096, 8


@triton.jit
def sum_kernel(out_ptr, x_ptrs, size, BLOCK: tl.constexpr):
    """One program sums BLOCK elements of float32 tensors, in their order, and rounds them once."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x_ptrs[0] + element, mask=element < size)
    for i in tl.static_range(1, len(x_ptrs)):
        total += tl.load(x_ptrs[i] + element, mask=element < size)
    tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=element < size)


def sum_tensors(xs: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Return the sum of float32 tensors of one shape, contiguous, in their order, in a dtype.

    No configuration: memory alone says how long it takes.
    """
    if not xs[0].is_cuda or len(xs) == 1:
        return reduce(torch.add, xs).to(dtype)
    out = xs[0].new_empty(xs[0].shape, dtype=dtype)
    with torch.cuda.device(out.device):
        grid = (triton.cdiv(out.numel(), _BLOCK),)
        sum_kernel[grid](out, xs, out.numel(), _BLOCK, num_warps=_NUM_WARPS)
    return out
