"""The kinds of problems: a case is one call of a function, without its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from twin_attention.contract.context import ContextPlan, context_plan
from twin_attention.contract.operands import TERMS
from twin_attention.contract.paged_spec import AppendSpec, DecodeSpec, PagedCache, PagedSpec
from twin_attention.contract.spec import (
    WINDOW_UNLIMITED,
    AttentionSpec,
    BlockSparseSpec,
    DilatedSpec,
    Dilation,
    FlashOptions,
    MergeSpec,
    PartialSpec,
    Precision,
    VarlenSpec,
    Window,
    scale_or_default,
)
from twin_attention.contract.transfers import choose_exchange, problem_of_rank
from twin_attention.interop.parity.ranges import KINDS as RANGES

OPTIONS = ("causal", "scale", "window_size", "softcap", "deterministic", "precision")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Hold the fields that calls of `flash_attention` and `flash_attention_varlen` share.

    One that is not listed is the call's option.

    tree: "nested" for a depth-first tree; "any" for arbitrary ends of keys.
    ranges: a kind of `ranges.make_ranges`.
    relative: R of a table of 2R + 1 distances.
    alibi: slopes, "heads" for one per head; "all" for one per head and sequence.
    tangents: forward mode runs too.
    """

    scale: float | None = None
    window_size: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    tree: str = ""
    depths: bool = False
    ranges: str = ""
    relative: int | None = None
    terms_in_q_dtype: bool = False
    alibi: str = ""
    dropout_rate: float = 0.0
    deterministic: bool = False
    precision: Precision = "ieee"
    row_max: bool = False
    batch_invariant: bool = False
    tangents: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The call's options; those that its function lacks have no default here."""
        asked: dict[str, Any] = {"return_row_max": True} if self.row_max else {}
        given = {x: y for x in ("dropout_rate", "batch_invariant") if (y := getattr(self, x))}
        return {name: getattr(self, name) for name in OPTIONS} | asked | given


@dataclass(frozen=True)
class FlashCase(Options):
    """One call of `flash_attention`.

    name: unique, and what `--filter` matches.
    segments: "documents" for ids in order with padding behind them; "shuffled" for any order.
    bias: the axes, of "bhqk", along which it varies; None for no bias.
    layout: "contiguous", or "strided" for views of one packed torch tensor.
    """

    name: str
    batch: int = 2
    seq_q: int = 128
    seq_kv: int = 128
    heads_q: int = 2
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    causal: bool = False
    segments: str = ""
    bias: str | None = None
    gradients: bool = True
    layout: str = "contiguous"

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        return (
            (self.batch, self.seq_q, self.heads_q, self.head_dim),
            (self.batch, self.seq_kv, self.heads_kv, self.head_dim),
            (self.batch, self.seq_kv, self.heads_kv, head_dim_v),
        )

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            self.batch, self.seq_q, self.seq_kv, segmented=bool(self.segments),
            wide_bias=_has_wide_bias(self), **_fields_of(self),
        )  # fmt: skip


@dataclass(frozen=True)
class VarlenCase(Options):
    """One call of `flash_attention_varlen`, with padding after the last sequence."""

    name: str
    lengths: tuple[tuple[int, int], ...] = ((40, 40), (0, 0), (1, 1), (70, 70))
    padding: tuple[int, int] = (9, 9)
    heads_q: int = 2
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    causal: bool = True

    @property
    def spec(self) -> VarlenSpec:
        tokens_q, tokens_kv = (
            sum(pair[side] for pair in self.lengths) + self.padding[side] for side in (0, 1)
        )
        sequences = len(self.lengths)
        return VarlenSpec(1, tokens_q, tokens_kv, num_sequences=sequences, **_fields_of(self))


def _terms(case: FlashCase | VarlenCase) -> tuple[str, ...]:
    given = {
        "bias": getattr(case, "bias", None) is not None,
        "relative_bias": case.relative is not None,
        "alibi_slopes": bool(case.alibi),
    }
    return tuple(name for name in TERMS if given[name])


def _has_wide_bias(case: FlashCase) -> bool:
    """Return True for a float32 bias that varies along rows and keys."""
    is_wide = case.dtype == "float32" or not case.terms_in_q_dtype
    return is_wide and {*"qk"} <= {*(case.bias or "")} and 1 not in (case.seq_q, case.seq_kv)


def _fields_of(case: FlashCase | VarlenCase) -> dict[str, Any]:
    names = (
        "heads_q", "heads_kv", "head_dim", "dtype", "softcap", "deterministic", "precision",
        "row_max", "dropout_rate", "batch_invariant",
    )  # fmt: skip
    left = None if case.window_size is None else case.window_size[0]
    unlimited = left is None or left >= WINDOW_UNLIMITED
    return {name: getattr(case, name) for name in names} | {
        "head_dim_v": case.head_dim if case.head_dim_v is None else case.head_dim_v,
        "scale": scale_or_default(case.scale, case.head_dim),
        "window": Window.of(case.causal, case.window_size),
        "tree": bool(case.tree),
        "depths": case.depths and not unlimited,
        "ranges": RANGES[case.ranges],
        "terms": _terms(case),
    }


@dataclass(frozen=True)
class BlockSparseCase(FlashCase):
    """One call of `block_sparse_attention`; other fields of `FlashCase` keep their defaults.

    own_masks: "" for one shared mask; "heads" for one per head; "all" per head and sequence.
    kept: share of the tiles that are kept, at random.
    """

    tile_q: int = 64
    tile_kv: int = 64
    own_masks: str = ""
    kept: float = 0.5

    @property
    def mask_shape(self) -> tuple[int, ...]:
        batch = self.batch if self.own_masks == "all" else 1
        tiles = -(-self.seq_q // self.tile_q), -(-self.seq_kv // self.tile_kv)
        return batch, self.heads_q if self.own_masks else 1, *tiles

    @property
    def spec(self) -> BlockSparseSpec:
        same: dict[str, Any] = dict(vars(super().spec))
        mask_batch, mask_heads, *_ = self.mask_shape
        return BlockSparseSpec(
            **same, tile_q=self.tile_q, tile_kv=self.tile_kv, mask_batch=mask_batch,
            mask_heads=mask_heads,
        )  # fmt: skip


@dataclass(frozen=True)
class DilatedCase(FlashCase):
    """One call of `dilated_attention`; `seq_kv` equals `seq_q`."""

    segment_lengths: tuple[int, ...] = (32, 64, 128)
    dilation_rates: tuple[int, ...] = (1, 2, 4)

    @property
    def options(self) -> dict[str, Any]:
        names = [name for name in OPTIONS if name != "window_size"]
        return {x: getattr(self, x) for x in ("segment_lengths", "dilation_rates", *names)}

    @property
    def spec(self) -> DilatedSpec:
        same: dict[str, Any] = dict(vars(super().spec))
        return DilatedSpec(
            **same, dilations=tuple(map(Dilation, self.segment_lengths, self.dilation_rates))
        )


@dataclass(frozen=True)
class ContextCase(FlashCase):
    """One call of `context_attention` on every rank; `documents` are followed by padding."""

    ranks: int = 2
    sharding: str = "zigzag"
    documents: tuple[int, ...] = ()
    exchange: str | None = None

    @cached_property
    def plan(self) -> ContextPlan:
        offsets = [0, *accumulate(self.documents)] if self.documents else None
        return context_plan(self.seq_q, self.ranks, self.sharding, offsets)

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*OPTIONS, "exchange")}

    @property
    def spec(self) -> AttentionSpec:
        size = self.plan.size  # a plan that cannot be has no problem
        return replace(super().spec, segmented=bool(self.documents and size))

    @property
    def way(self) -> str:
        return choose_exchange(self.exchange, self.plan, super().spec.window, self._own_part)[0]

    @property
    def part(self) -> AttentionSpec:
        window = super().spec.window
        options = FlashOptions(window_left=window.left, window_right=window.right)
        return problem_of_rank(self.way, self._own_part, self.plan, options)

    @property
    def _own_part(self) -> PartialSpec:
        local = self.plan.local_len
        part = PartialSpec(**vars(super().spec))
        return replace(part, seq_q=local, seq_kv=local, window=Window())


@dataclass(frozen=True)
class DecodeCase:
    """One call of `paged_decode`. What is not listed is the call's option.

    lengths: keys of each sequence, the new tokens included.
    tokens: new tokens T of each; None for a q without that dimension.
    latent: values are the first `head_dim_v` columns of the keys.
    kv_dtype: of the pools; None is q's.
    scale_shape: of the scales of a quantised cache, () or (heads_kv,).
    tree: "drafts" for random trees of the new tokens; "any" for any ends.
    common_pages: the most first pages that sequences share.
    """

    name: str
    lengths: tuple[int, ...] = (100,)
    tokens: int | None = None
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    page_size: int = 16
    max_pages: int = 8
    kv_dtype: str | None = None
    scale_shape: tuple[int, ...] = ()
    sinks: bool = False
    tree: str = ""
    scale: float | None = None
    window_size: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    num_splits: int | None = None
    cascade: bool = False
    common_pages: int = 0
    latent: bool = False
    alibi: str = ""
    batch_invariant: bool = False

    @property
    def value_dim(self) -> int | None:
        return self.spec.head_dim_v if self.latent else None

    @property
    def options(self) -> dict[str, Any]:
        names = ("scale", "window_size", "softcap", "num_splits", "value_dim", "cascade")
        asked = {"batch_invariant": True} if self.batch_invariant else {}
        return {name: getattr(self, name) for name in names} | asked

    @property
    def spec(self) -> DecodeSpec:
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        if self.latent:
            head_dim_v = min(head_dim_v, self.head_dim)
        num_pages = len(self.lengths) * self.max_pages + 3
        return DecodeSpec(
            batch=len(self.lengths),
            tokens=self.tokens or 1,
            heads_q=self.heads_q,
            cache=PagedCache(
                num_pages, self.page_size, self.max_pages, self.heads_kv, self.head_dim,
                head_dim_v, self.kv_dtype or self.dtype, self.latent,
            ),
            dtype=self.dtype,
            scale=scale_or_default(self.scale, self.head_dim),
            window_left=None if self.window_size is None else self.window_size[0],
            softcap=self.softcap,
            num_splits=self.num_splits,
            has_tree=bool(self.tree),
            cascade=self.cascade,
            alibi=bool(self.alibi),
            batch_invariant=self.batch_invariant,
        )  # fmt: skip


@dataclass(frozen=True)
class PagedCase(DecodeCase):
    """One call of `paged_attention`; `new_tokens` of the keys are new, and packed in q."""

    new_tokens: tuple[int, ...] = ()
    ranges: str = ""
    padding: int = 0

    @property
    def options(self) -> dict[str, Any]:
        return {name: x for name, x in super().options.items() if name != "cascade"}

    @property
    def spec(self) -> PagedSpec:
        same: dict[str, Any] = dict(vars(super().spec))
        same["tokens"] = sum(self.new_tokens) + self.padding
        same["ranges"] = RANGES[self.ranges]
        return PagedSpec(**same)


@dataclass(frozen=True)
class AppendCase:
    """One call of `append_kv`. What is not listed is as in `DecodeCase`.

    tokens: new tokens T of each; 0 if they are packed, as many as `new_tokens`.
    heads_q: query heads that are rotated as well; 0 gives no q.
    rotary_dim, positions: of the rotation, 0 for none; rows of its tables.
    """

    name: str
    lengths: tuple[int, ...]
    tokens: int = 0
    new_tokens: tuple[int, ...] | None = None
    padding: int = 0
    heads_q: int = 0
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    page_size: int = 16
    max_pages: int = 8
    kv_dtype: str | None = None
    scale_shape: tuple[int, ...] = ()
    rotary_dim: int = 0
    positions: int = 128
    rotary_interleaved: bool = False
    latent: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"rotary_interleaved": self.rotary_interleaved}

    @property
    def spec(self) -> AppendSpec:
        packed = self.new_tokens is not None
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        head_dim_v = 0 if self.latent else head_dim_v
        return AppendSpec(
            batch=len(self.lengths),
            tokens=self.tokens if self.new_tokens is None else sum(self.new_tokens) + self.padding,
            cache=PagedCache(
                len(self.lengths) * self.max_pages + 3, self.page_size, self.max_pages,
                self.heads_kv, self.head_dim, head_dim_v, self.kv_dtype or self.dtype,
                self.latent,
            ),
            dtype=self.dtype,
            heads_q=self.heads_q,
            packed=packed,
            rotary_dim=self.rotary_dim,
            interleaved=self.rotary_dim > 0 and self.rotary_interleaved,
        )  # fmt: skip


@dataclass(frozen=True)
class MergeCase:
    """One call of `merge_states` on outs [N, B, S, H, Dv] and lses [N, B, H, S]."""

    name: str
    num_states: int = 3
    batch: int = 2
    tokens: int = 5
    heads: int = 4
    head_dim_v: int = 64
    dtype: str = "bfloat16"

    @property
    def options(self) -> dict[str, Any]:
        return {}

    @property
    def spec(self) -> MergeSpec:
        return MergeSpec(
            self.num_states, self.batch, self.tokens, self.heads, self.head_dim_v, self.dtype
        )


# Or a BlockSparseCase, DilatedCase or ContextCase, which are FlashCases.
Case = FlashCase | VarlenCase | DecodeCase | PagedCase | AppendCase | MergeCase


def absent_operands(case: Case) -> dict[str, None]:
    """Return the required operands that a latent cache does not have."""
    if not getattr(case, "latent", False):
        return {}
    return dict.fromkeys(("v_new", "v_pages") if isinstance(case, AppendCase) else ("v_pages",))
