"""Ranges of values, for every BLOCK_TOKENS tokens, that tell which tiles to skip."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS = tl.constexpr(64)
# Blocks, or tiles, that a search reads at once.
SCAN_WIDTH = tl.constexpr(512)
# Begin of an empty block's range.
LARGEST = tl.constexpr(2**31 - 1)


def in_blocks(x: Tensor, padding: int) -> Tensor:
    """Return [B, S, ...] int32 as [B, blocks, BLOCK_TOKENS, ...], padded."""
    batch, size, *more = x.shape
    blocks = triton.cdiv(size, BLOCK_TOKENS.value)
    widths = [*(0, 0) * len(more), 0, blocks * BLOCK_TOKENS.value - size]
    x = torch.constant_pad_nd(x, widths, padding)
    return x.view(batch, blocks, BLOCK_TOKENS.value, *more)
