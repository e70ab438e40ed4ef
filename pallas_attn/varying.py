"""Types of arrays inside `shard_map`, which say over which mesh axes an array varies.

Elsewhere, and with ``check_vma=False``, no array varies.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax.sharding import ManualAxisType

T = TypeVar("T")


def alike(tree: T) -> T:
    """Let arrays vary over every mesh axis that one of them varies over.

    The gradient of an array that varied over fewer axes is then summed over the others.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return tree

    def axes_of(x: jax.Array) -> frozenset[str]:
        return jax.typeof(x).manual_axis_type.varying

    every = frozenset().union(*map(axes_of, jax.tree.leaves(tree)))

    def vary(x: jax.Array) -> jax.Array:
        others = tuple(every - axes_of(x))
        return jax.lax.pcast(x, others, to="varying") if others else x

    return jax.tree.map(vary, tree)


def unvarying(results: Any) -> Any:
    """Return types of a kernel's results, which vary over no mesh axis."""
    return jax.tree.map(lambda x: x.update(manual_axis_type=ManualAxisType()), results)
