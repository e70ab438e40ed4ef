"""Ranges of values, for every BLOCK_TOKENS tokens, that tell a program which tiles to skip."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_attn.kernels.library.tiles import arange, cdiv, maximum

BLOCK_TOKENS = 64
# Blocks, or tiles, that one step of a search reads.
SCAN_WIDTH = 512
# Greater than all values: where the range of a block without a value begins.
LARGEST = 2**31 - 1


def scan(start, end, visit, carry):
    """Call `visit` with the numbers start .. end, SCAN_WIDTH at a time, and its last result."""
    steps = cdiv(maximum(end - start, 0), SCAN_WIDTH)
    numbers = lambda step: start + step * SCAN_WIDTH + arange(SCAN_WIDTH)  # noqa: E731
    return lax.fori_loop(np.int32(0), steps, lambda step, x: visit(numbers(step), x), carry)


def in_blocks(x: Array, padding: int) -> Array:
    batch, size, *more = x.shape
    blocks = cdiv(size, BLOCK_TOKENS)
    widths = ((0, 0), (0, blocks * BLOCK_TOKENS - size), *((0, 0),) * len(more))
    x = jnp.pad(x, widths, constant_values=padding)
    return x.reshape(batch, blocks, BLOCK_TOKENS, *more)
