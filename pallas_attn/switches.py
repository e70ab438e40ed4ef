"""JAX's switches of types and shapes, set as this library's own code needs them.

A caller who forbids promotion or enables 64 bits means code of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def promoting(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function in which ranks and dtypes are promoted as JAX does by default."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return run


def in_32_bits(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return a kernel whose integers have 32 bits, wherever it is traced: `vmap` does so again."""

    @wraps(kernel)
    def traced(*refs: object, **memory: object) -> None:
        with jax.enable_x64(False):
            kernel(*refs, **memory)

    return promoting(traced)
