"""Ranges of what tokens have, for every BLOCK_TOKENS of them: which tiles a program may skip."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens of a block, which has one range of ids, or of ends.
BLOCK_TOKENS = tl.constexpr(64)
# Blocks, or tiles, that a step of a search reads at a time: 32768 tokens in blocks.
SCAN_WIDTH = tl.constexpr(512)
# Behind all values: where the range of a block without a value begins.
LARGEST = tl.constexpr(2**31 - 1)


def in_blocks(x: Tensor, padding: int) -> Tensor:
    """Return [B, S] int32 as [B, blocks, BLOCK_TOKENS]; what the last block lacks is `padding`."""
    batch, size = x.shape
    blocks = triton.cdiv(size, BLOCK_TOKENS.value)
    x = torch.constant_pad_nd(x, [0, blocks * BLOCK_TOKENS.value - size], padding)
    return x.view(batch, blocks, BLOCK_TOKENS.value)
