"""Kernel arguments for paged caches that follow from a problem."""

from __future__ import annotations

from typing import Any

from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.targets import ptx
from twin_attention.targets.config import padded_head_dim


def decode_arguments(
    spec: DecodeSpec, k_pages: Any, v_pages: Any, target: str | None
) -> dict[str, Any]:
    """Return the arguments of a paged decode, except its tokens and its splits."""
    return cache_arguments(k_pages, v_pages) | {
        "rule": spec.scores,
        "window_left": spec.bounded_window.left,
        "group_size": spec.group_size,
        "upcast": ptx.choose_upcast(spec.cache.dtype, target),
    }


def cache_arguments(k_pages: Any, v_pages: Any) -> dict[str, Any]:
    return {
        "head_dim": k_pages.shape[3],
        "head_dim_v": v_pages.shape[3],
        "block_d": padded_head_dim(k_pages.shape[3]),
        "block_dv": padded_head_dim(v_pages.shape[3]),
    }
