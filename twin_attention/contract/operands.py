"""The operands of each operation, as one tuple in the order that every function takes them.

A tuple holds tensors, `Operand`s or layouts. Optional operands come last, and are None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

X = TypeVar("X")

TERMS = ("bias", "relative_bias", "alibi_slopes")
# Floating-point operands without a gradient.
CONSTANTS = ("alibi_slopes",)
# Operands that a model may have in its own dtype; kernels read float32.
WIDENED = ("sinks", "alibi_slopes")
# Operands before required ones that are None where a cache's keys hold its values.
OF_VALUES = ("v_new", "v_pages")
# Operands whose gradient a backward may leave out.
FREEZABLE = ("sinks", "bias", "relative_bias")
# Operands that may have tangents.
DIFFERENTIABLE = ("q", "k", "v", *FREEZABLE)


class FlashOperands(NamedTuple, Generic[X]):
    """Operands of `flash_attention`, or their gradients.

    Attributes:
        q: [B, Sq, Hq, D].
        k: [B, Skv, Hkv, D].
        v: [B, Skv, Hkv, Dv].
        sinks: [Hq] float32, one logit per head in the denominator.
        q_segment_ids, kv_segment_ids: [B, Sq] and [B, Skv] int32, the segment of each token,
            negative for padding.
        kv_ends: [B, Skv] int32, the first key position whose query no longer sees the key.
        q_depths, kv_depths: [B, Sq] and [B, Skv] int32, what a window counts in place of positions.
        q_ranges: [B, Sq, R, 2] int32, begins and ends of keys that a query sees whatever the window
            and the ends hide; R is 1 or 2.
        bias: [B, Hq, Sq, Skv], or 1 in place of any, float32 or q's dtype, added to each score.
        relative_bias: [Hq, 2R + 1] float32 or q's dtype, added to a score by the key's distance
            from the query, clipped to -R .. R.
        alibi_slopes: [Hq] or [B, Hq] float32, subtracted once for each position between query and
            key; no gradient.
        dropout_seed: [2] or [4] int32 or uint32, see `twin_attention.contract.dropout`.
    """

    q: X
    k: X
    v: X
    sinks: X | None = None
    q_segment_ids: X | None = None
    kv_segment_ids: X | None = None
    kv_ends: X | None = None
    q_depths: X | None = None
    kv_depths: X | None = None
    q_ranges: X | None = None
    bias: X | None = None
    relative_bias: X | None = None
    alibi_slopes: X | None = None
    dropout_seed: X | None = None


class VarlenOperands(NamedTuple, Generic[X]):
    """Operands of `flash_attention_varlen`; others are as in `FlashOperands`.

    Attributes:
        q, k, v: [Tq, Hq, D], [Tkv, Hkv, D] and [Tkv, Hkv, Dv], all sequences one after the other.
        cu_seqlens_q, cu_seqlens_kv: [N + 1] int32, the offset of each sequence's first token, then
            the end of the last sequence; tokens from there on are padding.
        kv_ends: [Tkv] int32, counted from the sequence's first key.
        q_depths, kv_depths: [Tq] and [Tkv] int32.
        q_ranges: [Tq, R, 2] int32, counted from the sequence's first key.
        alibi_slopes: [Hq] or [N, Hq] float32.
    """

    q: X
    k: X
    v: X
    cu_seqlens_q: X
    cu_seqlens_kv: X
    sinks: X | None = None
    kv_ends: X | None = None
    q_depths: X | None = None
    kv_depths: X | None = None
    q_ranges: X | None = None
    relative_bias: X | None = None
    alibi_slopes: X | None = None
    dropout_seed: X | None = None


class BlockSparseOperands(NamedTuple, Generic[X]):
    """Operands of `FlashOperands`, and the lists of a `BlockMask`."""

    q: X
    k: X
    v: X
    kv_counts: X
    kv_tiles: X
    q_counts: X
    q_tiles: X
    sinks: X | None = None


class PartialOperands(NamedTuple, Generic[X]):
    """Operands of an attention over some of the keys, whose result is merged with that over others.

    `key_begins` to `query_ends` are the bounds of `Intervals`. `sinks` only come with the first
    call, which has no result to merge.
    """

    q: X
    k: X
    v: X
    key_begins: X
    key_ends: X
    query_begins: X
    query_ends: X
    sinks: X | None = None


class GradientCarry(NamedTuple, Generic[X]):
    """Hold what the gradients through some keys pass on to the gradients through others.

    dq: [B, Sq, Hq, D] float32, the gradient of q so far.
    lse2, delta: what a family's backward computes from the forward's rows.
    """

    dq: X
    lse2: X
    delta: X


def has_terms(operands: Any) -> bool:
    return any(getattr(operands, name, None) is not None for name in TERMS)


# Of the flash attention kernels' operations.
AttentionOperands = (
    FlashOperands[X] | VarlenOperands[X] | BlockSparseOperands[X] | PartialOperands[X]
)


class DecodeOperands(NamedTuple, Generic[X]):
    """Operands of `paged_decode`.

    Attributes:
        q: [B, T, Hq, D], or [B, Hq, D] where the public function takes it.
        k_pages, v_pages: [P, page_size, Hkv, D] and [P, page_size, Hkv, Dv]; v_pages is None for a
            latent cache, whose values are the first columns of its keys.
        block_tables: [B, max_pages] int32; entries past a sequence's last page hold anything.
        seq_lens: [B] int32, including the new tokens.
        k_scale, v_scale: [] or [Hkv] float32, factors of the pool's numbers.
        tree_ends: [B, T] int32, the end of the range of new tokens that see each one.
        sinks, alibi_slopes: as in `FlashOperands`.
    """

    q: X
    k_pages: X
    v_pages: X | None
    block_tables: X
    seq_lens: X
    sinks: X | None = None
    k_scale: X | None = None
    v_scale: X | None = None
    tree_ends: X | None = None
    alibi_slopes: X | None = None


class PagedOperands(NamedTuple, Generic[X]):
    """Operands of `paged_attention`; others are as in `DecodeOperands`.

    Attributes:
        q: [Tq, Hq, D], the new tokens of all sequences one after the other.
        cu_seqlens_q: [B + 1] int32, as in `VarlenOperands`.
        tree_ends: [Tq] int32, counted from the sequence's first new token.
        q_ranges: [Tq, R, 2] int32, as in `VarlenOperands`.
    """

    q: X
    k_pages: X
    v_pages: X | None
    block_tables: X
    seq_lens: X
    cu_seqlens_q: X
    sinks: X | None = None
    k_scale: X | None = None
    v_scale: X | None = None
    tree_ends: X | None = None
    alibi_slopes: X | None = None
    q_ranges: X | None = None


class AppendOperands(NamedTuple, Generic[X]):
    """Operands of `append_kv`; others are as in `DecodeOperands`.

    Attributes:
        k_new, v_new: [B, T, Hkv, D] and [B, T, Hkv, Dv], or without T where the public function
            takes them; with `cu_seqlens_q` packed, [Tq, Hkv, D] and [Tq, Hkv, Dv]. v_new is None
            without v_pages.
        q: [B, T, Hq, D] or [Tq, Hq, D], rotated as the keys are.
        rotary_cos, rotary_sin: [positions, R / 2], the rotation of each position.
    """

    k_new: X
    v_new: X | None
    k_pages: X
    v_pages: X | None
    block_tables: X
    seq_lens: X
    k_scale: X | None = None
    v_scale: X | None = None
    cu_seqlens_q: X | None = None
    q: X | None = None
    rotary_cos: X | None = None
    rotary_sin: X | None = None


def frozen_operands(
    names: Iterable[str], operands: Iterable[Any], needed: Iterable[bool]
) -> tuple[str, ...]:
    """Return the operands whose gradient nobody needs; `needed` has their flags."""
    return tuple(
        name
        for name, x, is_needed in zip(names, operands, needed, strict=True)
        if name in FREEZABLE and x is not None and not is_needed
    )


def describe_operands(operands: Any, operand: Callable[[str, Any], Any]) -> Any:
    optional = *operands._field_defaults, *OF_VALUES
    return operands._make(
        None if x is None and name in optional else operand(name, x)
        for name, x in zip(operands._fields, operands, strict=True)
    )
