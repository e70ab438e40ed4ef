"""Operands without values for a problem, and the calls that compile its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from twin_attention.contract.operands import (
    DIFFERENTIABLE,
    AppendOperands,
    AttentionOperands,
    BlockSparseOperands,
    DecodeOperands,
    FlashOperands,
    PagedOperands,
    PartialOperands,
    VarlenOperands,
)
from twin_attention.contract.paged_spec import AppendSpec, DecodeSpec, PagedSpec
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec, PartialSpec, VarlenSpec
from twin_attention.targets.family import Backend

X = TypeVar("X")
Empty = Callable[..., X]  # a dtype's name and a shape: an array without values


def operands_of(
    spec: AttentionSpec | DecodeSpec | AppendSpec, empty: Empty[X], sinks: bool
) -> tuple[Any, ...]:
    """Return the operands of a problem's functions, including a decode's `append_kv`."""
    if isinstance(spec, PartialSpec):
        return partial_operands(spec, empty)
    if isinstance(spec, AttentionSpec):
        return (flash_operands(spec, empty, sinks),)
    if isinstance(spec, AppendSpec):
        return (append_operands(spec, empty),)
    is_packed = isinstance(spec, PagedSpec)
    decoded = paged_operands(spec, empty) if is_packed else decode_operands(spec, empty)
    return decoded, append_operands(append_spec(spec), empty)


def run_kernels(
    spec: AttentionSpec | DecodeSpec | AppendSpec,
    backend: Backend,
    *operands: Any,
    deterministic: Sequence[bool] = (False, True),
    tangents: bool = False,
) -> list[Any]:
    """Call a family's functions for a problem, with `operands_of`; return the results.

    tangents: forward mode, in place of backwards.
    """
    deterministic = () if tangents else deterministic
    family, run = backend.family, backend.family.function
    if isinstance(spec, PartialSpec):
        part, rounded, out, lse = operands
        found: list[Any] = [run("partial_fwd")(part, out, lse, spec, backend)]
        if family.package == "torch_attn":  # XLA decides what a result's memory is
            for first, last in ((True, False), (True, True), (False, True)):
                carry = (None, None) if first else (out, lse)
                kind = replace(spec, first=first, last=last)
                found.append(run("partial_fwd")(part, *carry, kind, backend))
        for kind in (replace(spec, deterministic=x) for x in deterministic):
            if family.supports("partial_bwd", kind, backend.target) is None:
                operands = rounded, lse, part, rounded, lse, None
                carry, *of_keys = run("partial_bwd")(*operands, kind, backend)
                found += [carry, *of_keys]
                if family.package == "torch_attn":  # XLA rounds dq
                    found.append(run("partial_dq")(part.q, carry, kind, backend))
        return found
    if isinstance(spec, AttentionSpec):
        out, lse, *others = run("flash_fwd")(*operands, spec, backend)
        rest = others[0] if spec.terms else None
        plain = replace(spec, row_max=False)
        found = [out, lse, *others] + [
            run("flash_bwd")(out, lse, *operands, out, lse, rest, kind, backend)
            for kind in (replace(plain, deterministic=x) for x in deterministic)
            if family.supports("flash_bwd", kind, backend.target) is None
        ]
        if tangents:
            (x,) = operands
            of = x._make(
                y if name in DIFFERENTIABLE else None for name, y in zip(x._fields, x, strict=True)
            )
            found += run("flash_jvp")(of, x, out, lse, rest, plain, backend)
        return found
    *decoded, appended = operands
    found, append = [], spec if isinstance(spec, AppendSpec) else append_spec(spec)
    if not isinstance(spec, AppendSpec):
        name = "paged_attention" if isinstance(spec, PagedSpec) else "paged_decode"
        found.append(run(name)(*decoded, spec, backend))
    if family.supports("append_kv", append, backend.target) is None:
        found.append(run("append_kv")(appended, append, backend))
    return found


def flash_operands(spec: AttentionSpec, empty: Empty[X], sinks: bool) -> AttentionOperands[X]:
    is_packed = isinstance(spec, VarlenSpec)
    queries, keys = ((x,) if is_packed else (spec.batch, x) for x in (spec.seq_q, spec.seq_kv))
    common: dict[str, Any] = {
        "q": empty(spec.dtype, *queries, spec.heads_q, spec.head_dim),
        "k": empty(spec.dtype, *keys, spec.heads_kv, spec.head_dim),
        "v": empty(spec.dtype, *keys, spec.heads_kv, spec.head_dim_v),
        "sinks": empty("float32", spec.heads_q) if sinks else None,
    }
    if isinstance(spec, BlockSparseSpec):
        tiles = -(-spec.seq_q // spec.tile_q), -(-spec.seq_kv // spec.tile_kv)
        masks = ("int32", spec.mask_batch, spec.mask_heads)
        return BlockSparseOperands(
            kv_counts=empty(*masks, tiles[0]),
            kv_tiles=empty(*masks, *tiles),
            q_counts=empty(*masks, tiles[1]),
            q_tiles=empty(*masks, *tiles[::-1]),
            **common,
        )
    common |= {
        "kv_ends": empty("int32", *keys) if spec.tree else None,
        "q_depths": empty("int32", *queries) if spec.depths else None,
        "kv_depths": empty("int32", *keys) if spec.depths else None,
        "q_ranges": empty("int32", *queries, spec.ranges, 2) if spec.ranges else None,
        **_terms(spec, empty),
    }
    if isinstance(spec, VarlenSpec):
        offsets = [empty("int32", spec.num_sequences + 1) for _ in range(2)]
        return VarlenOperands(cu_seqlens_q=offsets[0], cu_seqlens_kv=offsets[1], **common)
    return FlashOperands(
        q_segment_ids=empty("int32", *queries) if spec.segmented else None,
        kv_segment_ids=empty("int32", *keys) if spec.segmented else None,
        **common,
    )


def _terms(spec: AttentionSpec, empty: Empty[X]) -> dict[str, X]:
    """Return a problem's terms of scores and dropout seed; all sequences share a bias."""
    shapes = {
        "bias": (1, spec.heads_q, spec.seq_q, spec.seq_kv),
        "relative_bias": (spec.heads_q, 257),
        "alibi_slopes": (spec.heads_q,),
    }
    dtypes = {"bias": "float32" if spec.wide_bias else spec.dtype}
    found = {name: empty(dtypes.get(name, "float32"), *shapes[name]) for name in spec.terms}
    return found if spec.dropout is None else found | {"dropout_seed": empty("int32", 2)}


def partial_operands(spec: PartialSpec, empty: Empty[X]) -> tuple[Any, ...]:
    keys = (spec.batch, spec.seq_kv, spec.heads_kv)
    rows = (spec.batch, spec.seq_q, spec.heads_q)
    part = PartialOperands(
        q=empty(spec.dtype, *rows, spec.head_dim),
        k=empty(spec.dtype, *keys, spec.head_dim),
        v=empty(spec.dtype, *keys, spec.head_dim_v),
        key_begins=empty("int32", spec.seq_q),
        key_ends=empty("int32", spec.seq_q),
        query_begins=empty("int32", spec.seq_kv),
        query_ends=empty("int32", spec.seq_kv),
    )
    rounded, out = (empty(dtype, *rows, spec.head_dim_v) for dtype in (spec.dtype, "float32"))
    return part, rounded, out, empty("float32", spec.batch, spec.heads_q, spec.seq_q)


def decode_operands(spec: DecodeSpec, empty: Empty[X]) -> DecodeOperands[X]:
    """Return a decode's operands, with sinks, scales per kv head, and a tree's ends if any."""
    cache = spec.cache
    pages = (cache.num_pages, cache.page_size, cache.heads)
    scale = empty("float32", cache.heads) if cache.is_quantized else None
    return DecodeOperands(
        q=empty(spec.dtype, spec.batch, spec.tokens, spec.heads_q, spec.head_dim),
        k_pages=empty(cache.dtype, *pages, cache.head_dim),
        v_pages=None if cache.latent else empty(cache.dtype, *pages, cache.head_dim_v),
        block_tables=empty("int32", spec.batch, cache.max_pages),
        seq_lens=empty("int32", spec.batch),
        sinks=empty("float32", spec.heads_q),
        k_scale=scale,
        v_scale=None if cache.latent else scale,
        tree_ends=empty("int32", spec.batch, spec.tokens) if spec.has_tree else None,
        alibi_slopes=empty("float32", spec.heads_q) if spec.alibi else None,
    )


def paged_operands(spec: PagedSpec, empty: Empty[X]) -> PagedOperands[X]:
    """Return the operands of `paged_attention`, otherwise as a decode's."""
    return PagedOperands(
        **decode_operands(spec, empty)._asdict()
        | {
            "q": empty(spec.dtype, spec.tokens, spec.heads_q, spec.head_dim),
            "cu_seqlens_q": empty("int32", spec.batch + 1),
            "tree_ends": empty("int32", spec.tokens) if spec.has_tree else None,
            "q_ranges": empty("int32", spec.tokens, spec.ranges, 2) if spec.ranges else None,
        }
    )


def append_spec(spec: DecodeSpec) -> AppendSpec:
    """Return the `append_kv` before a decode.

    Before a `paged_attention` it is packed, and rotates all dimensions of keys and queries.
    """
    plain = AppendSpec(spec.batch, spec.tokens, spec.cache, spec.dtype)
    if not isinstance(spec, PagedSpec):
        return plain
    return replace(plain, packed=True, heads_q=spec.heads_q, rotary_dim=spec.head_dim)


def append_operands(spec: AppendSpec, empty: Empty[X]) -> AppendOperands[X]:
    cache = spec.cache
    pages = (cache.num_pages, cache.page_size, cache.heads)
    new = (spec.dtype, spec.tokens) if spec.packed else (spec.dtype, spec.batch, spec.tokens)
    scale = empty("float32", cache.heads) if cache.is_quantized else None
    rotation = empty("float32", cache.capacity, spec.rotary_dim // 2) if spec.rotary_dim else None
    return AppendOperands(
        k_new=empty(*new, cache.heads, cache.head_dim),
        v_new=None if cache.latent else empty(*new, cache.heads, cache.head_dim_v),
        k_pages=empty(cache.dtype, *pages, cache.head_dim),
        v_pages=None if cache.latent else empty(cache.dtype, *pages, cache.head_dim_v),
        block_tables=empty("int32", spec.batch, cache.max_pages),
        seq_lens=empty("int32", spec.batch),
        k_scale=scale,
        v_scale=None if cache.latent else scale,
        cu_seqlens_q=empty("int32", spec.batch + 1) if spec.packed else None,
        q=empty(*new, spec.heads_q, cache.head_dim) if spec.heads_q else None,
        rotary_cos=rotation,
        rotary_sin=rotation,
    )
