"""Ranges of what tokens have, for every BLOCK_TOKENS of them: which tiles a program may skip."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_attn.kernels.library.tiles import arange, cdiv, maximum

# Tokens of a block, which has one range of ids, or of ends.
BLOCK_TOKENS = 64
# Blocks, or tiles, that a step of a search reads at a time: 32768 tokens in blocks.
SCAN_WIDTH = 512
# Behind all values: where the range of a block without a value begins.
LARGEST = 2**31 - 1


def scan(start, end, visit, carry):
    """Call `visit` with the numbers start .. end, SCAN_WIDTH at a time, and what it returned."""
    steps = cdiv(maximum(end - start, 0), SCAN_WIDTH)
    numbers = lambda step: start + step * SCAN_WIDTH + arange(SCAN_WIDTH)  # noqa: E731
    return lax.fori_loop(np.int32(0), steps, lambda step, x: visit(numbers(step), x), carry)


def in_blocks(x: Array, padding: int) -> Array:
    """Return [B, S] int32 as [B, blocks, BLOCK_TOKENS]; what the last block lacks is `padding`."""
    batch, size = x.shape
    blocks = cdiv(size, BLOCK_TOKENS)
    widths = ((0, 0), (0, blocks * BLOCK_TOKENS - size))
    x = jnp.pad(x, widths, constant_values=padding)
    return x.reshape(batch, blocks, BLOCK_TOKENS)
