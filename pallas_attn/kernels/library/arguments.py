"""Kernel arguments for paged caches that follow from a problem."""

from __future__ import annotations

from typing import Any

from twin_attention.contract.paged_spec import DecodeSpec, PagedCache
from twin_attention.targets import ptx
from twin_attention.targets.config import padded_head_dim


def decode_arguments(spec: DecodeSpec, k_pages: Any, target: str | None) -> dict[str, Any]:
    return cache_arguments(spec.cache, k_pages) | {
        "rule": spec.scores,
        "window_left": spec.bounded_window.left,
        "group_size": spec.group_size,
        "upcast": ptx.choose_upcast(spec.cache.dtype, target),
    }


def cache_arguments(cache: PagedCache, k_pages: Any) -> dict[str, Any]:
    packed = cache.head_dim // k_pages.shape[3]
    head_dim, head_dim_v = cache.head_dim // packed, cache.head_dim_v // packed
    return {
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "block_d": padded_head_dim(head_dim - head_dim_v if cache.latent else head_dim),
        "block_dv": padded_head_dim(head_dim_v),
    }
