"""Keywords of the public functions that do not change what they return, for type checkers."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from torch_attn.dispatch import Implementation
from twin_attention.contract.spec import Precision


class VarlenKeywords(TypedDict, total=False):
    causal: bool
    scale: float | None
    window_size: tuple[int | None, int | None] | None
    softcap: float | None
    sinks: Tensor | None
    kv_ends: Tensor | None
    q_depths: Tensor | None
    kv_depths: Tensor | None
    q_ranges: Tensor | None
    relative_bias: Tensor | None
    alibi_slopes: Tensor | None
    dropout_rate: float
    dropout_seed: Tensor | None
    deterministic: bool | None
    precision: Precision
    batch_invariant: bool
    implementation: Implementation | None


class FlashKeywords(VarlenKeywords, total=False):
    q_segment_ids: Tensor | None
    kv_segment_ids: Tensor | None
    bias: Tensor | None


class CacheKeywords(TypedDict, total=False):
    causal: bool
    scale: float | None
    window_size: tuple[int | None, int | None] | None
    softcap: float | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    tree_ends: Tensor | None
    alibi_slopes: Tensor | None
    num_splits: int | None
    value_dim: int | None
    batch_invariant: bool
    implementation: Implementation | None


class PagedKeywords(CacheKeywords, total=False):
    q_ranges: Tensor | None


class DecodeKeywords(CacheKeywords, total=False):
    cascade: bool
