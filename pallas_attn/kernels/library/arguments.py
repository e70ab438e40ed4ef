"""Arguments of the kernels that follow from a problem, and what a program sees of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax.experimental import pallas as pl

from twin_attention.contract.spec import DecodeSpec
from twin_attention.targets import ptx
from twin_attention.targets.config import padded_head_dim


def decode_arguments(
    spec: DecodeSpec, k_pages: Any, v_pages: Any, target: str | None
) -> dict[str, Any]:
    """Return the arguments that describe a paged decode, but for its tokens and its splits."""
    return cache_arguments(k_pages, v_pages) | {
        "rule": spec.scores,
        "window_left": spec.bounded_window.left,
        "group_size": spec.group_size,
        "upcast": ptx.choose_upcast(spec.cache.dtype, target),
    }


def cache_arguments(k_pages: Any, v_pages: Any) -> dict[str, Any]:
    """Return the arguments that describe a paged cache."""
    return {
        "head_dim": k_pages.shape[3],
        "head_dim_v": v_pages.shape[3],
        "block_d": padded_head_dim(k_pages.shape[3]),
        "block_dv": padded_head_dim(v_pages.shape[3]),
    }


# What a program reads of an axis: all of it, or all columns, padded to a power of two.
ALL, COLUMNS = "all", "columns"


def block_spec(
    x: Any, place: Callable[..., Mapping[str, Any]], *axes: str | tuple[str, int]
) -> pl.BlockSpec | None:
    """Return what a program reads of `x`, None for None.

    Args:
        place: returns a program's numbers, such as that of its head, from its place in the grid.
        axes: what it reads of each axis: ALL, COLUMNS, the one with the number of this name, or
            that many of them, from that multiple on. `x` may have fewer.
    """
    if x is None:
        return None
    axes = axes[: len(x.shape)]

    def size_of(axis, size):
        whole = {ALL: size, COLUMNS: padded_head_dim(size)}
        return axis[1] if isinstance(axis, tuple) else whole.get(axis)

    def index(*program):
        numbers = place(*program)
        return tuple(numbers.get(x[0] if isinstance(x, tuple) else x, 0) for x in axes)

    return pl.BlockSpec(tuple(map(size_of, axes, x.shape)), index)
