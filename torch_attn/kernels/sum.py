"""Sum rows of several tensors in one pass over memory."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_attn.driver import launcher_of
from torch_attn.layouts import layouts_of
from torch_attn.operands import strides_in_memory
from torch_attn.replay import Launcher

_BLOCK_MAX, _NUM_WARPS = 2048, 4
# Compiled sums, by all that they depend on except addresses.
_launchers: dict[tuple[Any, ...], Launcher] = {}
_LAUNCHERS_MAX = 1024


@triton.jit
def sum_rows_kernel(out_ptr, x_ptrs, place_ptrs, x_strides, num_rows, width, BLOCK: tl.constexpr):
    """One program sums a row of float32 tensors, in their order, and rounds it once.

    The result is [B, num_rows, width], the tensors [B, any, width], with x_strides between batch
    elements.
    """
    row, batch = tl.program_id(0) % num_rows, (tl.program_id(0) // num_rows).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(len(x_ptrs)):
            place = tl.load(place_ptrs[i] + row)
            x_ptr = x_ptrs[i] + batch * x_strides[i] + place.to(tl.int64) * width
            total += tl.load(x_ptr + column, mask=(column < width) & (place >= 0), other=0.0)
        out_row_ptr = out_ptr + (batch * num_rows + row) * width
        tl.store(out_row_ptr + column, total.to(out_ptr.dtype.element_ty), mask=column < width)


def sum_rows(xs: Sequence[Tensor], places: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return sums of rows of tensors, added in order, [B, S, H, D] in a dtype.

    xs are [B, any, H, D] float32. places are [S] int32: the row that is added to each row of the
    result, -1 for none. Memory alone determines the time, so there is no configuration.
    """
    first, num_rows = xs[0], len(places[0])
    out = first.new_empty((first.shape[0], num_rows, *first.shape[2:]), dtype=dtype)
    if not first.is_cuda:
        total = first.new_zeros(out.shape)
        for x, place in zip(xs, places, strict=True):
            total[:, place >= 0] += x[:, place[place >= 0]]
        return out.copy_(total)
    if not out.numel():
        return out
    rows_behind_each_other = out.stride()[1:]
    xs = [x if strides_in_memory(x)[1:] == rows_behind_each_other else x.contiguous() for x in xs]
    addresses = tuple([x.data_ptr() for x in (out, *xs, *places)])
    strides = tuple([strides_in_memory(x)[0] for x in xs])
    aligned = tuple([address % 16 == 0 for address in addresses])
    key = first.device, dtype, out.shape, strides, aligned
    with torch.cuda.device(first.device):
        if key not in _launchers:
            if len(_launchers) >= _LAUNCHERS_MAX:
                _launchers.clear()
            _launchers[key] = _compile(out, tuple(xs), tuple(places), strides)
        _launchers[key](torch.cuda.current_stream().cuda_stream, addresses)
    return out


def _compile(
    out: Tensor, xs: tuple[Tensor, ...], places: tuple[Tensor, ...], strides: tuple[int, ...]
) -> Launcher:
    batch, num_rows, *row = out.shape
    width = row[0] * row[1]
    numbers = strides, num_rows, width, min(triton.next_power_of_2(width), _BLOCK_MAX)
    grid = (num_rows * batch, 1, 1)
    compiled = sum_rows_kernel.warmup(out, xs, places, *numbers, grid=grid, num_warps=_NUM_WARPS)
    return launcher_of(compiled, grid, [*layouts_of((out, xs, places)), *numbers])
