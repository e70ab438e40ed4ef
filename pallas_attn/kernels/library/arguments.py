"""Arguments of the kernels that follow from a problem, and what a program sees of each tensor."""

from __future__ import annotations

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


# BlockSpecs of a paged decode, whose grid is (row tiles, kv heads, batch, splits).


def tokens_spec(x: Any, group_size: int) -> pl.BlockSpec:
    """Return the BlockSpec of a kv head's query heads.

    Args:
        x: [B, T, Hq, D] gives [T, group_size, D]; [B, Hq, T] gives [group_size, T].
        group_size: query heads of a kv head.
    """
    if len(x.shape) == 3:
        block = (None, group_size, x.shape[2])
        return pl.BlockSpec(block, lambda tile, head, batch, split: (batch, head, 0))
    block = (None, x.shape[1], group_size, padded_head_dim(x.shape[3]))
    return pl.BlockSpec(block, lambda tile, head, batch, split: (batch, 0, head, 0))


def split_spec(x: Any, group_size: int) -> pl.BlockSpec:
    """Return the BlockSpec of a kv head's query heads in the results of one split.

    Args:
        x: [N, B, T, Hq, Dv] gives [T, group_size, Dv]; [N, B, Hq, T] gives [group_size, T].
        group_size: query heads of a kv head.
    """
    if len(x.shape) == 4:
        block = (None, None, group_size, x.shape[3])
        return pl.BlockSpec(block, lambda tile, head, batch, split: (split, batch, head, 0))
    block = (None, None, x.shape[2], group_size, padded_head_dim(x.shape[4]))
    return pl.BlockSpec(block, lambda tile, head, batch, split: (split, batch, 0, head, 0))


def pool_spec(x: Any) -> pl.BlockSpec:
    """Return the BlockSpec of one head of every page: [P, page_size, Hkv, D] gives
    [P, page_size, D].
    """
    block = (*x.shape[:2], None, padded_head_dim(x.shape[3]))
    return pl.BlockSpec(block, lambda tile, head, batch, split: (0, 0, head, 0))


def sequence_spec(x: Any) -> pl.BlockSpec:
    """Return the BlockSpec of one sequence: [B, ...] gives [...]."""
    rest = (0,) * (x.ndim - 1)
    return pl.BlockSpec((None, *x.shape[1:]), lambda tile, head, batch, split: (batch, *rest))


def sinks_spec(x: Any, group_size: int) -> pl.BlockSpec | None:
    """Return the BlockSpec of a kv head's query heads: [Hq] gives [group_size], None gives None."""
    if x is None:
        return None
    return pl.BlockSpec((group_size,), lambda tile, head, batch, split: (head,))


def scale_spec(x: Any) -> pl.BlockSpec | None:
    """Return the BlockSpec of a kv head's scale: [] or [Hkv] gives [], None gives None."""
    if x is None:
        return None
    return pl.BlockSpec((None,) * x.ndim, lambda tile, head, batch, split: (head,) * x.ndim)
