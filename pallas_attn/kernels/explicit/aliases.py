"""Arrays whose memory a kernel's outputs reuse."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def zeros_of_batch(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Callable[..., Array]:
    """Return a function that returns zeros, for each element of a batch under `vmap`."""

    @jax.custom_batching.custom_vmap
    def zeros(*_):
        return jnp.zeros(shape, dtype)

    @zeros.def_vmap
    def _(axis_size, in_batched, *operands):
        return zeros_of_batch((axis_size, *shape), dtype)(*operands), True

    return zeros


@jax.custom_batching.custom_vmap
def of_batch(arrays: tuple[Array, ...], *_: Array) -> tuple[Array, ...]:
    """Return arrays whose memory a kernel writes to, one for each element under `vmap`."""
    return arrays


@of_batch.def_vmap
def _(axis_size, in_batched, arrays, *operands):
    pairs = zip(arrays, in_batched[0], strict=True)
    arrays = tuple(
        x if batched else jnp.broadcast_to(x, (axis_size, *x.shape)) for x, batched in pairs
    )
    return of_batch(arrays, *operands), (True,) * len(arrays)
