"""`batch_invariant`: which kernels keep its order of sums (docs/semantics.md), and for what."""

from __future__ import annotations

from typing import Any, TypeGuard

from twin_attention.contract.paged_spec import DecodeSpec, PagedSpec
from twin_attention.contract.spec import AttentionSpec, VarlenSpec
from twin_attention.targets.kernels import Spec

SPAN, BLOCK = 2048, 128  # keys that are summed from nothing, and at a time
HEAD_DIM_MAX = 128  # with more, registers do not hold two sums of values
DERIVATIVES = ("flash_bwd", "flash_jvp")  # promise no such bits
_MOST_OF_PARTS = 2**28  # numbers of all spans' results together


def is_asked_of(spec: Spec) -> TypeGuard[AttentionSpec | DecodeSpec]:
    """Return True for a problem with the option, unless it is empty and runs no kernel."""
    if not isinstance(spec, AttentionSpec | DecodeSpec):
        return False
    return spec.batch_invariant and not spec.is_empty


def lacks(spec: Any) -> str | None:
    """Return why the kernels do not cover a problem with `batch_invariant`, or None."""
    if isinstance(spec, AttentionSpec):
        names = ("segmented", "tree", "ranges", "terms", "dropout_rate")
        said = "segment ids, kv_ends, q_ranges, bias, relative_bias, alibi_slopes and dropout"
    else:
        names = ("has_tree", "ranges", "alibi")
        said = "tree_ends, q_ranges and alibi_slopes"
    if any(getattr(spec, name) for name in names):
        return f"batch_invariant takes no {said}"
    if spec.dtype_bits != 16 or (isinstance(spec, DecodeSpec) and spec.cache.latent):
        return "batch_invariant takes keys and values in float16 and bfloat16"
    if max(spec.head_dim, spec.head_dim_v) > HEAD_DIM_MAX:
        return f"batch_invariant takes head dimensions up to {HEAD_DIM_MAX}"
    return None


def row_tiles(spec: AttentionSpec | DecodeSpec, rows: int) -> int:
    """Return the row tiles of a kv head, of a batch element or of all packed sequences."""
    tokens = spec.tokens if isinstance(spec, DecodeSpec) else spec.seq_q
    if isinstance(spec, VarlenSpec | PagedSpec):
        sequences = spec.batch if isinstance(spec, PagedSpec) else spec.num_sequences
        return tokens * spec.group_size // rows + sequences + 1
    return -(-tokens * spec.group_size // rows)


def choose_spans(spec: DecodeSpec, rows: int, num_sms: int) -> int:
    """Return into how many spans a paged decode divides keys, or 1: no bit depends on it."""
    spans, batch = -(-spec.cache.capacity // SPAN), spec.merge(1).batch
    splits = batch * row_tiles(spec, rows) * spec.heads_kv < 4 * num_sms
    if spec.num_splits is not None:
        splits = spec.num_splits > 1
    numbers = spans * batch * spec.tokens * spec.heads_q * spec.head_dim_v
    return spans if splits and numbers <= _MOST_OF_PARTS else 1
