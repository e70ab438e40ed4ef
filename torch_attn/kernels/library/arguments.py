"""Kernel arguments that follow from a problem and its tensors' layouts."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.pages import Cache, PoolStrides
from torch_attn.kernels.library.quantized import swizzled_alike
from torch_attn.launch import rule_argument
from torch_attn.layouts import Layout
from twin_attention.contract.operands import AppendOperands, DecodeOperands, PagedOperands
from twin_attention.contract.paged_spec import DecodeSpec, PagedCache
from twin_attention.targets import ptx
from twin_attention.targets.config import padded_head_dim


class Tangents(NamedTuple):
    """The tangents of a kernel's operands, shaped as these, or None."""

    q: Any
    k: Any
    v: Any
    sinks: Any


def cache_of(
    operands: DecodeOperands[Tensor] | PagedOperands[Tensor] | AppendOperands[Tensor],
) -> Cache:
    v_scale = operands.k_scale if operands.v_pages is None else operands.v_scale
    return Cache(
        operands.k_pages, operands.v_pages, operands.block_tables, operands.seq_lens,
        operands.k_scale, v_scale,
    )  # fmt: skip


def decode_arguments(
    spec: DecodeSpec, target: str | None, q: Layout, cache: Cache
) -> dict[str, Any]:
    arguments = cache_arguments(spec.cache, cache)
    if spec.cache.latent and spec.cache.is_quantized and target == "sm90":
        sizes = arguments["BLOCK_D"], arguments["BLOCK_DV"]
        arguments |= {"BLOCK_D": swizzled_alike(*sizes), "BLOCK_DV": swizzled_alike(*sizes[::-1])}
    return arguments | {
        "q_strides": q.strides[:-1],
        "rule": rule_argument(spec.scores),
        "window_left": spec.bounded_window.left,
        "GROUP_SIZE": spec.group_size,
        "UPCAST": ptx.choose_upcast(spec.cache.dtype, target),
        "PAST_2G": any(
            x is not None and _elements_per_head(x) >= 2**31 for x in (cache.k, cache.v)
        ),
    }


def cache_arguments(spec: PagedCache, cache: Cache) -> dict[str, Any]:
    """Return a paged cache's arguments; BLOCK_D covers columns after the values'."""
    v, packed = cache.v, spec.head_dim // cache.k.shape[3]
    head_dim, head_dim_v = spec.head_dim // packed, spec.head_dim_v // packed
    return {
        "cache": cache._replace(
            k_scale_stride=_scale_stride(cache.k_scale),
            v_scale_stride=_scale_stride(cache.v_scale),
            table_stride=cache.tables.strides[0],
            k_strides=PoolStrides(*map(tl.constexpr, cache.k.strides[:3])),
            v_strides=None if v is None else PoolStrides(*map(tl.constexpr, v.strides[:3])),
            page_size=tl.constexpr(spec.page_size),
        ),
        "num_pages": spec.num_pages,
        "max_pages": spec.max_pages,
        "HEADS_KV": spec.heads,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_D": padded_head_dim(head_dim if v is not None else head_dim - head_dim_v),
        "BLOCK_DV": padded_head_dim(head_dim_v),
    }


def _scale_stride(scale: Layout | None) -> int:
    return 0 if scale is None or not scale.strides else scale.strides[0]


def _elements_per_head(pages: Layout) -> int:
    return 1 + sum((pages.shape[axis] - 1) * pages.strides[axis] for axis in (0, 1, 3))
