"""Make a gradient of the float32 sums that a kernel of `pallas_attn` added up.

XLA does this for JAX (``pallas_attn.kernels.gradients.gradient_of_sums``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.sequences import count_sequence_tiles, locate_tile, num_padded_rows
from torch_attn.kernels.library.tiles import ROW_PADDING, padded_head_dim
from torch_attn.launch import KernelCall, Prepared, launch, num_sequences
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend


@triton.jit(do_not_specialize=["seq", "num_sequences"])
def ordered_sums_kernel(
    sum_ptr,
    grad_ptr,
    cu_seqlens_ptr,
    seq,
    num_sequences,
    heads,
    scale,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    STRIDE_16_ROWS: tl.constexpr,
    STRIDE_8_ROWS: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_PAIR: tl.constexpr,
    STRIDE_COLUMN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Scale and store BLOCK_Q rows of a gradient of one head; BLOCK_Q is a multiple of TILE.

    Operands: sums [B, H, rows, COLUMNS] float32, in tiles of TILE rows, each in blocks of 8
    columns, in which rows and columns have the given strides; the gradient [B, S, H, D];
    cu_seqlens [N + 1] of packed sequences, each of which begins a tile of ROW_PADDING rows of the
    sums, or None. Grid: (tiles of the sums' rows, heads, batch) in one axis.
    """
    num_rows = count_sequence_tiles(seq, num_sequences, ROW_PADDING) * ROW_PADDING
    num_tiles = num_rows // BLOCK_Q
    padded = tl.program_id(0) % num_tiles * BLOCK_Q
    head = tl.program_id(0) // num_tiles % heads
    batch = (tl.program_id(0) // num_tiles // heads).to(tl.int64)
    total, start, end = seq, padded, seq
    if num_sequences is not None:
        _sequence, _first, start, end, _first_other, _size_other = locate_tile(
            cu_seqlens_ptr, cu_seqlens_ptr, padded // ROW_PADDING, seq, seq, num_sequences,
            ROW_PADDING,
        )  # fmt: skip
        start += padded % ROW_PADDING
    rows = tl.arange(0, BLOCK_Q)[:, None]
    columns = tl.arange(0, padded_head_dim(HEAD_DIM))[None, :]
    of_row = rows // TILE * (TILE * COLUMNS) + rows % TILE // 16 * STRIDE_16_ROWS
    of_row += rows // 8 % 2 * STRIDE_8_ROWS + rows % 8 * STRIDE_ROW
    of_column = columns // 8 * (TILE * 8)
    of_column += columns // 2 % 4 * STRIDE_PAIR + columns % 2 * STRIDE_COLUMN
    base = sum_ptr + ((batch * heads + head) * num_rows + padded) * COLUMNS
    exists = (rows < end - start) & (columns < HEAD_DIM)
    sums = tl.load(base + (of_row + of_column), exists, other=0.0)
    row = (batch * total + start + rows) * heads + head
    grad = (sums * scale).to(grad_ptr.dtype.element_ty)
    tl.store(grad_ptr + (row * HEAD_DIM + columns), grad, exists)


def gradient_of_sums(
    sums: Tensor,
    gradient: Tensor,
    cu_seqlens: Tensor | None,
    order: Any,
    spec: AttentionSpec,
    backend: Backend,
) -> None:
    """Launch `ordered_sums_kernel`, with the tiles of `flash_bwd_preprocess`.

    Args:
        sums, gradient, cu_seqlens: operands of the kernel.
        order: in which the sums lie, a ``pallas_attn.kernels.gradients.SumsOrder``.
        spec: the problem whose queries have the gradient's rows, heads and size.
        backend: of the portable kernels.
    """
    columns = sums.shape[-1]
    sizes = columns // 8, *order.block
    strides = [math.prod(sizes[i:]) for i in range(len(sizes) + 1)]  # of all axes
    *of_16_rows, of_8_rows, of_row = (strides[axis] for axis in order.rows[1:])
    _of_block, of_pair, of_column = (strides[axis] for axis in order.columns)
    launch(
        "flash_bwd_preprocess", ordered_sums_kernel, _prepare, (sums, gradient, cu_seqlens), spec,
        backend, order.tile, *(of_16_rows or [0]), of_8_rows, of_row, of_pair, of_column,
    )  # fmt: skip


def _prepare(call: KernelCall) -> Prepared:
    """Return grid and arguments of `ordered_sums_kernel`."""
    spec, (sums, *_) = call.spec, call.layouts
    names = (
        "TILE", "STRIDE_16_ROWS", "STRIDE_8_ROWS", "STRIDE_ROW", "STRIDE_PAIR", "STRIDE_COLUMN",
    )  # fmt: skip
    arguments = {
        "seq": spec.seq_q,
        "num_sequences": num_sequences(spec),
        "heads": spec.heads_q,
        "scale": spec.scale,
        "HEAD_DIM": spec.head_dim,
        "COLUMNS": sums.shape[-1],
        **dict(zip(names, call.constants, strict=True)),
    }
    tiles = num_padded_rows(spec) // call.config.block_q
    return (tiles * spec.heads_q * spec.batch,), arguments


def rows_of_sequences(cu_seqlens: Tensor, num_rows: int, padded_rows: int) -> Tensor:
    """Return which rows of lse2 and delta are a row of packed sequences, or of their padding.

    Args:
        cu_seqlens: [N + 1] offsets; any numbers are clamped.
        num_rows: rows of the sequences' axis.
        padded_rows: rows of lse2 and delta, in which a sequence begins a tile of ROW_PADDING rows.
    """
    padding = ROW_PADDING.value
    starts = cu_seqlens.clamp(0, num_rows)
    numbers = torch.arange(len(starts), device=starts.device, dtype=starts.dtype)
    begins = (starts.div(padding, rounding_mode="floor") + numbers) * padding
    ends = torch.constant_pad_nd(starts[1:], (0, 1), num_rows)
    rows = torch.arange(padded_rows, device=starts.device, dtype=starts.dtype)
    sequence = (torch.searchsorted(begins, rows, right=True) - 1).clamp(min=0)
    return rows - begins.take(sequence) < (ends - starts).take(sequence)
