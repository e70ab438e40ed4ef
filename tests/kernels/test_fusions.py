"""Check what torch does in the place of XLA between kernels of `pallas_attn`, against XLA."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from interop.exchange import to_torch
from interop.kernels import run_in_torch
from pallas_attn.kernels.gradients import sinks_gradient

HEADS, LENGTHS = 3, [33, 0, 130, 60]  # the last are padding
NUM_ROWS = sum(LENGTHS)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def row_exists(count):
    """Return which rows of lse2 and delta are one of the packed sequences, or of the padding."""
    exists, start = np.zeros(count, bool), 0
    for number, length in enumerate(LENGTHS):
        first = (start // 128 + number) * 128
        exists[first : first + length] = True
        start += length
    return exists


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_the_gradient_of_sinks(is_packed):
    sinks, offsets = normal(0, HEADS), ()
    rows = NUM_ROWS
    if is_packed:
        offsets = (jnp.cumsum(jnp.array([0, *LENGTHS[:-1]], jnp.int32)), NUM_ROWS)
        rows = (NUM_ROWS // 128 + len(LENGTHS)) * 128
    lse2, delta = (normal(seed, 2, HEADS, rows) for seed in (1, 2))
    lse2 = jnp.where(lse2 > 1, jnp.inf, lse2)
    if is_packed:  # rows that do not exist may hold anything
        lse2, delta = (jnp.where(row_exists(rows), x, jnp.nan) for x in (lse2, delta))
    args = sinks, lse2, delta, *offsets
    given = [to_torch(x) if isinstance(x, jnp.ndarray) else x for x in args]
    (dsinks,) = run_in_torch.FUSIONS["sinks_gradient"](*given)
    assert dsinks.isfinite().all()
    torch.testing.assert_close(dsinks, to_torch(sinks_gradient(*args)), rtol=1e-4, atol=1e-5)
