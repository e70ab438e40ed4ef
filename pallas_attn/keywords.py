"""Keywords of the public functions that do not change what they return, for type checkers."""

from __future__ import annotations

from typing import TypedDict

import jax

from pallas_attn.dispatch import Implementation
from twin_attention.contract.spec import Precision


class VarlenKeywords(TypedDict, total=False):
    causal: bool
    scale: float | None
    window_size: tuple[int | None, int | None] | None
    softcap: float | None
    sinks: jax.Array | None
    kv_ends: jax.Array | None
    q_depths: jax.Array | None
    kv_depths: jax.Array | None
    q_ranges: jax.Array | None
    relative_bias: jax.Array | None
    alibi_slopes: jax.Array | None
    dropout_rate: float
    dropout_seed: jax.Array | None
    deterministic: bool | None
    precision: Precision
    batch_invariant: bool
    implementation: Implementation | None


class FlashKeywords(VarlenKeywords, total=False):
    q_segment_ids: jax.Array | None
    kv_segment_ids: jax.Array | None
    bias: jax.Array | None


class CacheKeywords(TypedDict, total=False):
    causal: bool
    scale: float | None
    window_size: tuple[int | None, int | None] | None
    softcap: float | None
    sinks: jax.Array | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    tree_ends: jax.Array | None
    alibi_slopes: jax.Array | None
    num_splits: int | None
    value_dim: int | None
    batch_invariant: bool
    implementation: Implementation | None


class PagedKeywords(CacheKeywords, total=False):
    q_ranges: jax.Array | None


class DecodeKeywords(CacheKeywords, total=False):
    cascade: bool
