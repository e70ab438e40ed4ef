"""Functions that XLA compiles to kernels, and that other frameworks have their own kernels for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import core

fusion_p = core.Primitive("fusion")
fusion_p.multiple_results = True

_are_whole: ContextVar[bool] = ContextVar("are_whole", default=False)


@dataclass(frozen=True)
class Operand:
    """Stands for the operation's operand `number` among the arguments of a function kept whole."""

    number: int


@contextmanager
def whole_fusions() -> Iterator[None]:
    """Trace each call of a `fusion` in the block as one operation that cannot be lowered."""
    token = _are_whole.set(True)
    try:
        yield
    finally:
        _are_whole.reset(token)


def fusion(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `whole_fusions` keep calls of a function whole; elsewhere calls are unchanged."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not _are_whole.get():
            return function(*args)
        leaves, tree = jax.tree.flatten(args)
        arrays = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]

        def of_arrays(*operands: Any) -> Any:
            given = dict(zip(arrays, operands, strict=True))
            return function(*tree.unflatten([given.get(i, x) for i, x in enumerate(leaves)]))

        operands = [leaves[i] for i in arrays]
        results, places = jax.tree.flatten(jax.eval_shape(of_arrays, *operands))
        for number, i in enumerate(arrays):
            leaves[i] = Operand(number)
        found = fusion_p.bind(
            *operands,
            name=function.__name__,
            arguments=tree.unflatten(leaves),
            results=tuple(results),
        )
        return places.unflatten(found)

    return call


@fusion_p.def_abstract_eval
def _abstract(*operands, name, arguments, results):
    return [ShapedArray(x.shape, x.dtype) for x in results]
