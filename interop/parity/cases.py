"""Named problems, shared by the tests, the parity harness and the benchmark.

A case's name says what it covers; its suite says how large it is:

- ``quick``: small enough for the frameworks' interpreters on a CPU;
- ``full``: every feature, dtype and awkward size, a few hundred tokens long (contains quick);
- ``large``: sizes that only a GPU takes, tensors past 2^31 elements among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, product
from typing import Any, TypeVar

from twin_attention.contract.context import ContextPlan, context_plan
from twin_attention.contract.exchange import choose_exchange, problem_of_rank
from twin_attention.contract.operands import TERMS
from twin_attention.contract.spec import (
    WINDOW_UNLIMITED,
    AppendSpec,
    AttentionSpec,
    BlockSparseSpec,
    DecodeSpec,
    DilatedSpec,
    Dilation,
    FlashOptions,
    MergeSpec,
    PagedCache,
    PagedSpec,
    PartialSpec,
    Precision,
    VarlenSpec,
    Window,
    scale_or_default,
)

SUITES = ("quick", "full", "large")


@dataclass(frozen=True)
class FlashCase:
    """One call of `flash_attention`.

    Attributes:
        name: unique, and what `--filter` matches.
        batch ... dtype: shapes and dtype of q [B, Sq, Hq, D], k [B, Skv, Hkv, D] and
            v [B, Skv, Hkv, Dv].
        causal, scale, window_size, softcap: the call's options.
        sinks: give one logit a head.
        segments: "" for none; "documents" for segment ids in order with padding behind them;
            "shuffled" for ids and padding in any order.
        tree: "" for none; "nested" for ends of keys of a tree in depth-first order; "any" for ends
            that are none of a tree.
        depths: give depths as well.
        relative: R of a table of 2R + 1 distances, None for none; in float32, or with
            `terms_in_q_dtype` in the call's dtype.
        alibi: "" for no slopes; "heads" for one of each head; "all" for one of each head of each
            sequence.
        bias: the axes of a bias that has all of them, of "bhqk": 1 in place of the others; None for
            no bias.
        dropout_rate: the call's option.
        deterministic: the call's option, for the backward.
        precision: the call's option.
        row_max: ask for row maxima.
        gradients: run the backward as well.
        layout: "contiguous", or "strided" for q, k, v that are views of one packed torch tensor
            (JAX arrays have no strides: there the case runs contiguous).
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
    scale: float | None = None
    window_size: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    segments: str = ""
    tree: str = ""
    depths: bool = False
    relative: int | None = None
    terms_in_q_dtype: bool = False
    alibi: str = ""
    bias: str | None = None
    dropout_rate: float = 0.0
    deterministic: bool = False
    precision: Precision = "ieee"
    row_max: bool = False
    gradients: bool = True
    layout: str = "contiguous"

    @property
    def options(self) -> dict[str, Any]:
        """Return the call's arguments other than tensors."""
        return _flash_options(self)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of q, k and v."""
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        return (
            (self.batch, self.seq_q, self.heads_q, self.head_dim),
            (self.batch, self.seq_kv, self.heads_kv, self.head_dim),
            (self.batch, self.seq_kv, self.heads_kv, head_dim_v),
        )

    @property
    def spec(self) -> AttentionSpec:
        """Return the problem with its defaults resolved."""
        return AttentionSpec(
            self.batch, self.seq_q, self.seq_kv, self.heads_q, self.heads_kv, self.head_dim,
            self.shapes[2][3], self.dtype, scale_or_default(self.scale, self.head_dim),
            Window.of(self.causal, self.window_size), self.softcap, self.deterministic,
            self.precision, segmented=bool(self.segments), **_tree_fields(self),
            terms=_terms(self), wide_bias=_has_wide_bias(self), row_max=self.row_max,
            dropout_rate=self.dropout_rate,
        )  # fmt: skip


@dataclass(frozen=True)
class VarlenCase:
    """One call of `flash_attention_varlen`.

    Attributes:
        name: unique, and what `--filter` matches.
        lengths: queries and keys of each sequence.
        padding: tokens after the last sequence, of q and of k and v.
        heads_q, heads_kv, head_dim, head_dim_v, dtype: of q [Tq, Hq, D], k [Tkv, Hkv, D] and
            v [Tkv, Hkv, Dv].
        causal, scale, window_size, softcap: the call's options.
        sinks: give one logit a head.
        tree, depths, relative, terms_in_q_dtype, alibi: as in `FlashCase`, of each sequence.
        deterministic: the call's option, for the backward.
        precision: the call's option.
        dropout_rate: the call's option.
        row_max: ask for row maxima.
    """

    name: str
    lengths: tuple[tuple[int, int], ...] = ((40, 40), (0, 0), (1, 1), (70, 70))
    padding: tuple[int, int] = (9, 9)
    heads_q: int = 2
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    causal: bool = True
    scale: float | None = None
    window_size: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    tree: str = ""
    depths: bool = False
    relative: int | None = None
    terms_in_q_dtype: bool = False
    alibi: str = ""
    dropout_rate: float = 0.0
    deterministic: bool = False
    precision: Precision = "ieee"
    row_max: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Return the call's arguments other than tensors."""
        return _flash_options(self)

    @property
    def spec(self) -> VarlenSpec:
        """Return the problem with its defaults resolved."""
        tokens_q, tokens_kv = (
            sum(pair[side] for pair in self.lengths) + self.padding[side] for side in (0, 1)
        )
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        return VarlenSpec(
            1, tokens_q, tokens_kv, self.heads_q, self.heads_kv, self.head_dim, head_dim_v,
            self.dtype, scale_or_default(self.scale, self.head_dim),
            Window.of(self.causal, self.window_size), self.softcap, self.deterministic,
            self.precision, **_tree_fields(self), terms=_terms(self), row_max=self.row_max,
            dropout_rate=self.dropout_rate, num_sequences=len(self.lengths),
        )  # fmt: skip


def _flash_options(case: FlashCase | VarlenCase) -> dict[str, Any]:
    """Return the options of a call, without defaults of options that not all functions have."""
    names = ("causal", "scale", "window_size", "softcap", "deterministic", "precision")
    asked: dict[str, Any] = {"return_row_max": True} if case.row_max else {}
    if case.dropout_rate:
        asked["dropout_rate"] = case.dropout_rate
    return {name: getattr(case, name) for name in names} | asked


def _terms(case: FlashCase | VarlenCase) -> tuple[str, ...]:
    """Return the names of the operands that are added to the scores."""
    given = {
        "bias": getattr(case, "bias", None) is not None,
        "relative_bias": case.relative is not None,
        "alibi_slopes": bool(case.alibi),
    }
    return tuple(name for name in TERMS if given[name])


def _has_wide_bias(case: FlashCase) -> bool:
    """Return True for a bias in float32 that has rows and keys."""
    is_wide = case.dtype == "float32" or not case.terms_in_q_dtype
    return is_wide and {*"qk"} <= {*(case.bias or "")} and 1 not in (case.seq_q, case.seq_kv)


def _tree_fields(case: FlashCase | VarlenCase) -> dict[str, bool]:
    """Return the fields of a problem that say what its tree is."""
    left = None if case.window_size is None else case.window_size[0]
    unlimited = left is None or left >= WINDOW_UNLIMITED
    return {"tree": bool(case.tree), "depths": case.depths and not unlimited}


@dataclass(frozen=True)
class BlockSparseCase(FlashCase):
    """One call of `block_sparse_attention`.

    Attributes:
        tile_q, tile_kv: queries and keys of a tile of the mask.
        own_masks: "" for one mask of all; "heads" for one of each head; "all" for one of each
            head of each sequence.
        kept: share of the tiles that are kept, at random.
        segments, tree, depths, relative, terms_in_q_dtype, alibi, bias, dropout_rate, row_max,
            layout: as in `FlashCase`, but always their defaults.
    """

    tile_q: int = 64
    tile_kv: int = 64
    own_masks: str = ""
    kept: float = 0.5

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """Return the shape of the mask."""
        batch = self.batch if self.own_masks == "all" else 1
        tiles = -(-self.seq_q // self.tile_q), -(-self.seq_kv // self.tile_kv)
        return batch, self.heads_q if self.own_masks else 1, *tiles

    @property
    def spec(self) -> BlockSparseSpec:
        """Return the problem with its defaults resolved."""
        same: dict[str, Any] = dict(vars(super().spec))
        mask_batch, mask_heads, *_ = self.mask_shape
        return BlockSparseSpec(
            **same, tile_q=self.tile_q, tile_kv=self.tile_kv, mask_batch=mask_batch,
            mask_heads=mask_heads,
        )  # fmt: skip


@dataclass(frozen=True)
class DilatedCase(FlashCase):
    """One call of `dilated_attention`.

    Attributes:
        segment_lengths, dilation_rates: of each pair.
        seq_kv: as long as `seq_q`.
        window_size, sinks, segments, tree, depths, relative, terms_in_q_dtype, alibi, bias,
            dropout_rate, row_max, layout: as in `FlashCase`, but always their defaults.
    """

    segment_lengths: tuple[int, ...] = (32, 64, 128)
    dilation_rates: tuple[int, ...] = (1, 2, 4)

    @property
    def options(self) -> dict[str, Any]:
        """Return the call's arguments other than tensors."""
        names = (
            "segment_lengths", "dilation_rates", "causal", "scale", "softcap", "deterministic",
            "precision",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def spec(self) -> DilatedSpec:
        """Return the problem with its defaults resolved."""
        same: dict[str, Any] = dict(vars(super().spec))
        return DilatedSpec(
            **same, dilations=tuple(map(Dilation, self.segment_lengths, self.dilation_rates))
        )


@dataclass(frozen=True)
class ContextCase(FlashCase):
    """One call of `context_attention` on every rank.

    Attributes:
        ranks: that share the sequence.
        sharding: the plan's layout.
        documents: lengths of packed documents, behind which there is padding; () for one document.
        exchange: the call's option.
        seq_kv: as long as `seq_q`.
        segments, tree, depths, relative, terms_in_q_dtype, alibi, bias, dropout_rate, row_max,
            layout: as in `FlashCase`, but always their defaults.
    """

    ranks: int = 2
    sharding: str = "zigzag"
    documents: tuple[int, ...] = ()
    exchange: str | None = None

    @cached_property
    def plan(self) -> ContextPlan:
        """Return which rank holds which tokens."""
        offsets = [0, *accumulate(self.documents)] if self.documents else None
        return context_plan(self.seq_q, self.ranks, self.sharding, offsets)

    @property
    def options(self) -> dict[str, Any]:
        """Return the call's arguments other than tensors, the plan and the ranks."""
        names = ("causal", "scale", "window_size", "softcap", "deterministic", "precision")
        return {name: getattr(self, name) for name in (*names, "exchange")}

    @property
    def spec(self) -> AttentionSpec:
        """Return the problem of the whole sequence with its defaults resolved."""
        size = self.plan.size  # a plan that cannot be has no problem
        return replace(super().spec, segmented=bool(self.documents and size))

    @property
    def way(self) -> str:
        """Return how ranks exchange keys."""
        return choose_exchange(self.exchange, self.plan, super().spec.window, self._own_part)[0]

    @property
    def part(self) -> AttentionSpec:
        """Return the problem of a rank's kernels."""
        window = super().spec.window
        options = FlashOptions(window_left=window.left, window_right=window.right)
        return problem_of_rank(self.way, self._own_part, self.plan, options)

    @property
    def _own_part(self) -> PartialSpec:
        """Return the problem of a rank's queries and its own keys."""
        local = self.plan.local_len
        part = PartialSpec(**vars(super().spec))
        return replace(part, seq_q=local, seq_kv=local, window=Window())


@dataclass(frozen=True)
class DecodeCase:
    """One call of `paged_decode`.

    Attributes:
        name: unique, and what `--filter` matches.
        lengths: keys of each sequence, the new tokens counted in.
        tokens: new tokens T of each; None for a q without that dimension.
        heads_q, heads_kv, head_dim, head_dim_v, dtype: of q [B, T, Hq, D] and of the pools.
        page_size, max_pages: of the pools and tables.
        kv_dtype: of the pools; None is q's.
        scale_shape: of the scales of a quantised cache, () or (heads_kv,).
        sinks: give one logit a head.
        tree: "" for none; "drafts" for ends of random trees of the new tokens; "any" for any ends.
        scale, window_size, softcap, num_splits, cascade: the call's options.
        common_pages: up to how many pages sequences begin with that others begin with as well.
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

    @property
    def options(self) -> dict[str, Any]:
        """Return the call's arguments other than tensors."""
        names = ("scale", "window_size", "softcap", "num_splits", "cascade")
        return {name: getattr(self, name) for name in names}

    @property
    def spec(self) -> DecodeSpec:
        """Return the problem with its defaults resolved; its pool has some unused pages."""
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        num_pages = len(self.lengths) * self.max_pages + 3
        return DecodeSpec(
            batch=len(self.lengths),
            tokens=self.tokens or 1,
            heads_q=self.heads_q,
            cache=PagedCache(
                num_pages, self.page_size, self.max_pages, self.heads_kv, self.head_dim,
                head_dim_v, self.kv_dtype or self.dtype,
            ),
            dtype=self.dtype,
            scale=scale_or_default(self.scale, self.head_dim),
            window_left=None if self.window_size is None else self.window_size[0],
            softcap=self.softcap,
            num_splits=self.num_splits,
            has_tree=bool(self.tree),
            cascade=self.cascade,
        )  # fmt: skip


@dataclass(frozen=True)
class PagedCase(DecodeCase):
    """One call of `paged_attention`.

    Attributes:
        lengths: keys of each sequence, the new tokens counted in.
        new_tokens: how many of them each has, one after the other in q [Tq, Hq, D].
        padding: tokens after the last sequence's.
        tokens: None.
        cascade: False.
    """

    new_tokens: tuple[int, ...] = ()
    padding: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Return the call's arguments other than tensors."""
        return {name: x for name, x in super().options.items() if name != "cascade"}

    @property
    def spec(self) -> PagedSpec:
        """Return the problem with its defaults resolved; its pool has some unused pages."""
        same: dict[str, Any] = dict(vars(super().spec))
        same["tokens"] = sum(self.new_tokens) + self.padding
        return PagedSpec(**same)


@dataclass(frozen=True)
class AppendCase:
    """One call of `append_kv`.

    Attributes:
        name: unique, and what `--filter` matches.
        lengths: keys of each sequence, the new tokens counted in.
        tokens: new tokens T of each, in k_new [B, T, Hkv, D]; where they are packed, 0.
        new_tokens: how many each has, packed in k_new [Tq, Hkv, D]; None for T of each.
        padding: tokens after the last sequence's.
        heads_q: query heads that are rotated as well; 0 gives no q.
        heads_kv, head_dim, head_dim_v, dtype: of the new tokens and of the pools.
        page_size, max_pages, kv_dtype, scale_shape: as in `DecodeCase`.
        rotary_dim, positions: of the rotation, 0 for none; rows of its tables.
        rotary_interleaved: the call's option.
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

    @property
    def options(self) -> dict[str, Any]:
        """Return the call's arguments other than tensors."""
        return {"rotary_interleaved": self.rotary_interleaved}

    @property
    def spec(self) -> AppendSpec:
        """Return the problem; its pool has some unused pages."""
        packed = self.new_tokens is not None
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        return AppendSpec(
            batch=len(self.lengths),
            tokens=self.tokens if self.new_tokens is None else sum(self.new_tokens) + self.padding,
            cache=PagedCache(
                len(self.lengths) * self.max_pages + 3, self.page_size, self.max_pages,
                self.heads_kv, self.head_dim, head_dim_v, self.kv_dtype or self.dtype,
            ),
            dtype=self.dtype,
            heads_q=self.heads_q,
            packed=packed,
            rotary_dim=self.rotary_dim,
            interleaved=self.rotary_dim > 0 and self.rotary_interleaved,
        )  # fmt: skip


@dataclass(frozen=True)
class MergeCase:
    """One call of `merge_states`.

    Attributes:
        name: unique, and what `--filter` matches.
        num_states: parts that are merged.
        batch, tokens, heads, head_dim_v, dtype: of outs [N, B, S, H, Dv] and lses [N, B, H, S].
    """

    name: str
    num_states: int = 3
    batch: int = 2
    tokens: int = 5
    heads: int = 4
    head_dim_v: int = 64
    dtype: str = "bfloat16"

    @property
    def options(self) -> dict[str, Any]:
        """Return the call's arguments other than tensors: there are none."""
        return {}

    @property
    def spec(self) -> MergeSpec:
        """Return the problem."""
        return MergeSpec(
            self.num_states, self.batch, self.tokens, self.heads, self.head_dim_v, self.dtype
        )


# Or a BlockSparseCase, DilatedCase or ContextCase, which are FlashCases.
Case = FlashCase | VarlenCase | DecodeCase | PagedCase | AppendCase | MergeCase
Change = tuple[str, dict[str, Any]]  # part of a case's name, and the fields that differ
C = TypeVar("C", bound=Case)
Make = Callable[[], Iterator[C]]


def flash_cases(suite: str = "quick", pattern: str = "") -> list[FlashCase]:
    """Return the cases of a suite whose names contain `pattern`."""
    return _choose(suite, pattern, _quick, _full, _large)


def varlen_cases(suite: str = "quick", pattern: str = "") -> list[VarlenCase]:
    """Return the cases of a suite whose names contain `pattern`."""
    return _choose(suite, pattern, _quick_varlen, _full_varlen, _large_varlen)


def block_sparse_cases(suite: str = "quick", pattern: str = "") -> list[BlockSparseCase]:
    """Return the cases of a suite whose names contain `pattern`."""
    return _choose(suite, pattern, _quick_block_sparse, _full_block_sparse, _large_block_sparse)


def dilated_cases(suite: str = "quick", pattern: str = "") -> list[DilatedCase]:
    """Return the cases of a suite whose names contain `pattern`."""
    return _choose(suite, pattern, _quick_dilated, _full_dilated, _large_dilated)


def context_cases(suite: str = "quick", pattern: str = "") -> list[ContextCase]:
    """Return the cases of a suite whose names contain `pattern`."""
    return _choose(suite, pattern, _quick_context, _full_context, _large_context)


def decode_cases(suite: str = "quick", pattern: str = "") -> list[DecodeCase]:
    """Return the cases of a suite whose names contain `pattern`."""
    return _choose(suite, pattern, _quick_decode, _full_decode, _large_decode)


def paged_cases(suite: str = "quick", pattern: str = "") -> list[PagedCase]:
    """Return the cases of a suite whose names contain `pattern`."""
    return _choose(suite, pattern, _quick_paged, _full_paged, _large_paged)


def append_cases(suite: str = "quick", pattern: str = "") -> list[AppendCase]:
    """Return the cases of a suite whose names contain `pattern`."""
    return _choose(suite, pattern, _quick_append, _full_append, _large_append)


def merge_cases(suite: str = "quick", pattern: str = "") -> list[MergeCase]:
    """Return the cases of a suite whose names contain `pattern`."""
    return _choose(suite, pattern, _quick_merge, _full_merge, _large_merge)


# The cases of each function.
KINDS = (
    flash_cases, varlen_cases, block_sparse_cases, dilated_cases, context_cases, decode_cases,
    paged_cases, append_cases, merge_cases,
)  # fmt: skip


def _choose(suite: str, pattern: str, quick: Make[C], full: Make[C], large: Make[C]) -> list[C]:
    makers = {"quick": [quick], "full": [quick, full], "large": [large]}[suite]
    return [case for make in makers for case in make() if pattern in case.name]


def _quick() -> Iterator[FlashCase]:
    base = FlashCase("", batch=1, seq_q=160, seq_kv=160, heads_q=2, heads_kv=2)
    yield replace(base, name="bf16")
    yield replace(base, name="bf16-causal", causal=True)
    yield replace(base, name="fp16-causal", causal=True, dtype="float16")
    yield replace(base, name="fp32-causal", causal=True, dtype="float32")
    yield replace(base, name="tf32-causal", causal=True, dtype="float32", precision="tf32")
    yield replace(base, name="gqa", heads_q=4, heads_kv=2, causal=True)
    yield replace(base, name="mqa-d128", heads_q=4, heads_kv=1, head_dim=128)
    yield replace(base, name="prime-cross", seq_q=37, seq_kv=131, causal=True)
    yield replace(base, name="more-queries", seq_q=131, seq_kv=37, causal=True)
    yield replace(base, name="window", window_size=(48, 16))
    yield replace(base, name="softcap", softcap=20.0, dtype="float16")
    yield replace(base, name="softcap-far", softcap=2.0, seq_kv=200, causal=True, sinks=True)
    yield replace(base, name="d80-dv48", head_dim=80, head_dim_v=48)
    yield replace(
        base, name="all-options", seq_q=97, heads_q=4, heads_kv=2, head_dim=72, causal=True,
        window_size=(64, None), softcap=30.0, sinks=True, scale=0.2,
    )  # fmt: skip
    # Queries without a key among them.
    yield replace(
        base, name="sinks", seq_q=131, seq_kv=37, heads_q=4, heads_kv=2, causal=True, sinks=True
    )
    # Queries without a key, and sinks that are no scores.
    yield replace(
        base, name="row-max", seq_q=131, seq_kv=37, heads_q=4, heads_kv=2, causal=True, sinks=True,
        scale=-0.3, row_max=True,
    )  # fmt: skip
    yield replace(base, name="row-max-softcap", softcap=3.0, row_max=True, dtype="float16")
    yield replace(base, name="segments", segments="documents", causal=True)
    yield replace(
        base, name="segments-shuffled", segments="shuffled", batch=2, seq_q=70, seq_kv=90,
        heads_kv=1, dtype="float16",
    )  # fmt: skip
    yield replace(
        base, name="segments-all-options", segments="documents", seq_q=97, heads_q=4, head_dim=72,
        head_dim_v=48, causal=True, window_size=(40, None), softcap=30.0, sinks=True, scale=0.2,
        deterministic=True,
    )  # fmt: skip
    yield replace(base, name="tree", tree="nested", causal=True)
    # Ends before their key, behind all keys, and of no tree.
    yield replace(
        base, name="tree-any", tree="any", batch=2, seq_q=70, seq_kv=90, heads_kv=1, causal=True,
        dtype="float16",
    )  # fmt: skip
    yield replace(
        base, name="tree-all-options", tree="nested", depths=True, segments="documents", seq_q=97,
        heads_q=4, head_dim=72, head_dim_v=48, causal=True, window_size=(40, None), softcap=30.0,
        sinks=True, scale=0.2, deterministic=True,
    )  # fmt: skip
    yield replace(base, name="relative", relative=20, causal=True)
    # Distances on both sides, none of them clipped, with rows that have no key.
    yield replace(
        base, name="relative-wide", relative=300, seq_q=131, seq_kv=37, heads_q=4, heads_kv=2,
        dtype="float16", window_size=(60, 9), terms_in_q_dtype=True,
    )  # fmt: skip
    yield replace(base, name="relative-one", relative=0, dtype="float32", head_dim=32)
    yield replace(base, name="alibi", alibi="heads", causal=True)
    # The gradients are stored by the kernel of dq, and summed over sequences, heads, rows and keys.
    yield replace(base, name="bias", bias="bhqk", causal=True, heads_q=4)
    yield replace(base, name="bias-pairs", bias="hqk", seq_kv=97, batch=2, terms_in_q_dtype=True)
    yield replace(
        base, name="bias-keys", bias="bk", seq_q=61, seq_kv=97, dtype="float32", head_dim=32,
        window_size=(40, 9),
    )  # fmt: skip
    yield replace(
        base, name="bias-all-options", bias="qk", relative=20, alibi="heads", batch=2,
        segments="documents", tree="nested", seq_q=97, heads_q=4, head_dim=72, head_dim_v=48,
        causal=True, window_size=(40, None), softcap=30.0, sinks=True, scale=0.2,
        dropout_rate=0.2, dtype="float16",
    )  # fmt: skip
    yield replace(base, name="dropout", dropout_rate=0.2, causal=True, heads_q=4)
    yield replace(
        base, name="dropout-all-options", dropout_rate=0.5, seq_q=61, seq_kv=97, head_dim=72,
        head_dim_v=48, dtype="float16", window_size=(40, 9), relative=20, softcap=30.0, sinks=True,
    )  # fmt: skip
    yield replace(
        base, name="terms-all-options", relative=31, alibi="all", batch=2, segments="documents",
        tree="nested", seq_q=97, heads_q=4, head_dim=72, head_dim_v=48, causal=True,
        window_size=(40, None), softcap=30.0, sinks=True, scale=0.2, deterministic=True,
    )  # fmt: skip
    yield replace(base, name="deterministic", causal=True, deterministic=True)
    yield replace(base, name="strided", layout="strided", causal=True)
    yield replace(base, name="one-token", seq_q=1, seq_kv=1)
    yield replace(base, name="no-keys", seq_q=5, seq_kv=0)
    yield replace(base, name="no-batch", batch=0)


def _full() -> Iterator[FlashCase]:
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")):
        base = FlashCase(f"full-{short}", 2, 333, 333, heads_q=4, heads_kv=2, dtype=dtype)
        for name, changes in _full_changes():
            yield replace(base, name=f"{base.name}-{name}", **changes)
    base = FlashCase("", 2, 333, 333, 4, 2, dtype="float32", precision="tf32")
    for name, changes in _full_tf32_changes():
        yield replace(base, name=f"full-tf32-{name}", **changes)


def _full_tf32_changes() -> Iterator[Change]:
    for d, causal in product((16, 32, 40, 64, 80, 96, 128, 192, 256), (False, True)):
        yield f"d{d}{'-causal' if causal else ''}", {"head_dim": d, "causal": causal}
    yield "d64-dv128", {"head_dim": 64, "head_dim_v": 128, "causal": True}
    for seq_q, seq_kv in ((1, 1), (1, 509), (509, 1), (127, 641), (641, 127), (0, 64), (64, 0)):
        yield f"{seq_q}x{seq_kv}", {"seq_q": seq_q, "seq_kv": seq_kv, "causal": True}
    for d in (32, 64, 128, 256):
        yield f"softcap-d{d}", {"softcap": 5.0, "head_dim": d, "causal": True}
    yield "window", {"window_size": (70, 5)}
    yield "sinks", {"sinks": True, "causal": True}
    yield "segments", {"segments": "documents", "causal": True}
    yield "tree", {"tree": "nested", "causal": True}
    yield "heads8-1", {"heads_q": 8, "heads_kv": 1}
    yield "scale-0.3", {"scale": -0.3}
    yield "strided", {"layout": "strided"}


def _full_changes() -> Iterator[Change]:
    masks = (("", {}), ("-causal", {"causal": True}))
    sizes = (16, 24, 32, 40, 64, 80, 96, 112, 128, 160, 192, 240, 256)
    for d, (mask, causal) in product(sizes, masks):
        yield f"d{d}{mask}", {"head_dim": d, **causal}
    for d, dv in ((16, 256), (256, 16), (64, 128), (192, 128), (104, 72)):
        yield f"d{d}-dv{dv}", {"head_dim": d, "head_dim_v": dv, "causal": True}
    lengths = (
        (1, 1), (1, 509), (509, 1), (127, 641), (641, 127), (512, 512), (129, 255), (0, 64),
        (64, 0),
    )  # fmt: skip
    for (seq_q, seq_kv), (mask, causal) in product(lengths, masks):
        yield f"{seq_q}x{seq_kv}{mask}", {"seq_q": seq_q, "seq_kv": seq_kv, **causal}
    for d, (mask, causal) in product((16, 40, 64, 128), masks):  # dq summed in any order
        yield f"130x2100-d{d}{mask}", {"seq_q": 130, "seq_kv": 2100, "head_dim": d, **causal}
    long = {"seq_q": 130, "seq_kv": 1100, "head_dim": 256}
    yield "130x1100-d256-causal", {**long, "causal": True}  # with fewer keys another row
    yield "130x1100-d256-window-20-5", {**long, "window_size": (20, 5)}
    for window in ((0, 0), (17, 0), (100, 60), (None, 40), (200, None), (0, None), (None, 0)):
        name = f"window-{window[0]}-{window[1]}"
        yield name, {"window_size": window, "seq_q": 401}
        yield f"{name}-causal", {"window_size": window, "causal": True, "seq_kv": 450}
    for cap in (1.0, 30.0):
        yield f"softcap{cap:g}", {"softcap": cap, "causal": True}
        yield f"softcap{cap:g}-window", {"softcap": cap, "window_size": (70, 5), "head_dim": 128}
    for d in (16, 32):
        yield f"softcap-d{d}", {"softcap": 5.0, "head_dim": d}
    sinks = {"sinks": True, "causal": True}
    yield "sinks", sinks
    yield "sinks-641x127", {**sinks, "seq_q": 641, "seq_kv": 127}
    yield "sinks-64x0", {**sinks, "seq_q": 64, "seq_kv": 0}
    yield "sinks-softcap", {**sinks, "softcap": 5.0, "head_dim": 128}
    yield "sinks-window", {"sinks": True, "window_size": (70, 5)}
    for d in (64, 128, 256):
        yield f"row-max-d{d}", {"row_max": True, "head_dim": d, "causal": True}
    yield "row-max-sinks", {**sinks, "row_max": True, "seq_q": 641, "seq_kv": 127}
    yield "row-max-softcap", {"row_max": True, "softcap": 5.0, "window_size": (70, 5)}
    yield "row-max-64x0", {"row_max": True, "seq_q": 64, "seq_kv": 0}
    for d in (16, 32, 64, 128, 256):
        documents = {"segments": "documents", "head_dim": d}
        yield f"segments-d{d}", {**documents, "causal": True}
    yield "segments-shuffled", {"segments": "shuffled", "seq_kv": 401, "sinks": True}
    yield "segments-softcap", {"segments": "documents", "softcap": 5.0, "head_dim": 128}
    yield "segments-window", {"segments": "shuffled", "window_size": (70, 5)}
    for d in (16, 32, 64, 128, 256):
        yield f"tree-d{d}", {"tree": "nested", "head_dim": d, "causal": True}
    tree = {"tree": "nested", "seq_q": 641, "seq_kv": 641, "causal": True}
    yield "tree-641", {**tree, "sinks": True}
    yield "tree-window", {**tree, "window_size": (70, None)}
    for d in (64, 128):
        yield (
            f"tree-depths-d{d}",
            {**tree, "window_size": (70, None), "depths": True, "head_dim": d},
        )
        yield f"tree-any-d{d}", {**tree, "tree": "any", "seq_q": 333, "head_dim": d, "softcap": 5.0}
    yield "tree-any-depths", {**tree, "tree": "any", "window_size": (70, None), "depths": True}
    yield "tree-segments", {**tree, "segments": "documents"}
    for d in (16, 32, 64, 128, 256):
        yield f"relative-d{d}", {"relative": 50, "head_dim": d, "causal": True}
    for radius in (0, 1, 64, 700):
        yield f"relative-{radius}", {"relative": radius, "seq_kv": 450, "alibi": "heads"}
    yield "relative-641x127", {"relative": 30, "seq_q": 641, "seq_kv": 127, "causal": True}
    yield "relative-64x0", {"relative": 30, "seq_q": 64, "seq_kv": 0}
    yield "relative-softcap", {"relative": 128, "softcap": 5.0, "terms_in_q_dtype": True}
    yield "relative-segments", {"relative": 20, "segments": "shuffled", "window_size": (70, 5)}
    yield "relative-tree", {"relative": 20, "tree": "any", "causal": True, "sinks": True}
    for d in (64, 128):
        yield f"alibi-d{d}", {"alibi": "all", "head_dim": d, "causal": True, "row_max": True}
    for d in (16, 32, 64, 128, 256):
        yield f"bias-d{d}", {"bias": "hqk", "head_dim": d}
    for axes in ("", "h", "q", "k", "bq", "hk", "qk", "hqk", "bhqk"):
        yield f"bias-{axes}", {"bias": axes, "seq_kv": 450, "terms_in_q_dtype": True}
    yield "bias-641x127", {"bias": "bhqk", "seq_q": 641, "seq_kv": 127, "causal": True}
    yield "bias-64x0", {"bias": "hqk", "seq_q": 64, "seq_kv": 0}
    yield "bias-1x300", {"bias": "bhqk", "seq_q": 1, "seq_kv": 300}
    yield "bias-softcap", {"bias": "qk", "softcap": 5.0, "heads_q": 8, "heads_kv": 1}
    yield "bias-segments", {"bias": "bhqk", "segments": "shuffled", "window_size": (70, 5)}
    yield "bias-tree", {"bias": "hqk", "tree": "any", "causal": True, "sinks": True, "relative": 9}
    for d in (16, 32, 64, 128, 256):
        yield f"dropout-d{d}", {"dropout_rate": 0.1, "head_dim": d, "causal": True}
    dropout = {"dropout_rate": 0.3}
    yield "dropout-641x127", {**dropout, "seq_q": 641, "seq_kv": 127, "sinks": True}
    yield "dropout-64x0", {**dropout, "seq_q": 64, "seq_kv": 0}
    yield "dropout-softcap", {**dropout, "softcap": 5.0, "window_size": (70, 5), "row_max": True}
    yield "dropout-terms", {**dropout, "relative": 64, "alibi": "all", "segments": "shuffled"}
    yield "dropout-tree", {**dropout, "tree": "any", "causal": True, "seq_q": 333}
    yield "dropout-heads8-1", {"dropout_rate": 0.9, "heads_q": 8, "heads_kv": 1}
    for heads_q, heads_kv in ((8, 8), (8, 1), (6, 2)):
        yield f"heads{heads_q}-{heads_kv}", {"heads_q": heads_q, "heads_kv": heads_kv}
    for mask, causal in masks:  # several tiles for each SM
        many = {"batch": 8, "heads_q": 20, "heads_kv": 10, **causal}
        yield f"many-tiles{mask}", many
        yield f"many-tiles-130x2100{mask}", {**many, "seq_q": 130, "seq_kv": 2100}
        yield f"few-kv-heads{mask}", {"seq_kv": 2100, "heads_q": 8, "heads_kv": 1, **causal}
    for d in (64, 96, 128, 256):  # and each of many steps
        long = {"seq_q": 200, "seq_kv": 8300, "head_dim": d, "causal": True}
        long |= {"batch": 8, "heads_q": 10, "gradients": False}
        yield f"many-long-tiles-d{d}", long
        options = {"window_size": (8250, None), "softcap": 5.0, "sinks": True}
        yield f"many-long-tiles-all-options-d{d}", {**long, **options}
    for d in (120, 128):  # few kv heads
        window = {"window_size": (300, 50), "head_dim": d, "heads_q": 8, "heads_kv": 1}
        yield f"few-kv-heads-window-d{d}", {"seq_kv": 2100, **window}
    for scale in (0.0, -0.3, 1.0):
        yield f"scale{scale:g}", {"scale": scale, "causal": True}
    for d in (136, 192, 256):  # with a kernel each for dq, dk and dv
        options = {"window_size": (70, 5), "softcap": 5.0, "sinks": True}
        yield f"all-options-d{d}", {"head_dim": d, "seq_kv": 450, **options}
        yield f"d{d}-641x127-causal", {"head_dim": d, "seq_q": 641, "seq_kv": 127, "causal": True}
    for d in (64, 96, 128, 256):
        yield f"deterministic-d{d}", {"head_dim": d, "causal": True, "deterministic": True}
    yield "strided", {"layout": "strided"}


def _large() -> Iterator[FlashCase]:
    base = FlashCase("", batch=4, seq_q=4096, seq_kv=4096, heads_q=16, heads_kv=16, head_dim=128)
    d256 = replace(base, batch=1, heads_q=8, heads_kv=2, head_dim=256)
    for causal in (False, True):
        suffix = "-causal" if causal else ""
        heads = {"heads_q": 32, "heads_kv": 32, "head_dim": 64}
        yield replace(base, name="large-d128" + suffix, causal=causal)
        yield replace(base, name="large-d64" + suffix, causal=causal, **heads)
        yield replace(d256, name="large-d256-gqa" + suffix, causal=causal)
    # 2^31 elements are passed by the batch stride, and by the row stride within one sequence.
    base = replace(base, window_size=(64, 0), head_dim=64, heads_q=33, heads_kv=33)
    yield replace(
        base, name="large-2g-elements-batch", batch=520, seq_q=2048, seq_kv=2048, gradients=False
    )
    yield replace(base, name="large-2g-elements-rows", batch=1, seq_q=1 << 20, seq_kv=1 << 20)
    heads = {"heads_q": 33, "heads_kv": 3, "head_dim": 192}
    yield replace(base, name="large-2g-elements-d192", batch=170, seq_q=2048, seq_kv=2048, **heads)


def _quick_varlen() -> Iterator[VarlenCase]:
    base = VarlenCase("")
    yield replace(base, name="varlen-bf16")
    yield replace(base, name="varlen-fp32", dtype="float32", causal=False, head_dim=32)
    # Sequences with more queries than keys, without queries, without keys.
    lengths = ((17, 50), (0, 5), (33, 20), (4, 0))
    yield replace(
        base, name="varlen-all-options", lengths=lengths, heads_q=4, head_dim=72, head_dim_v=48,
        window_size=(24, None), softcap=20.0, sinks=True, scale=0.2, dtype="float16",
    )  # fmt: skip
    yield replace(base, name="varlen-row-max", lengths=lengths, row_max=True, sinks=True)
    yield replace(base, name="varlen-relative", relative=9, causal=False)
    yield replace(
        base, name="varlen-terms", lengths=lengths, relative=30, alibi="all", head_dim=32,
        window_size=(24, None), softcap=20.0, dtype="float16",
    )  # fmt: skip
    yield replace(base, name="varlen-dropout", lengths=lengths, dropout_rate=0.3, head_dim=32)
    yield replace(base, name="varlen-tree", tree="nested")
    yield replace(
        base, name="varlen-tree-any", lengths=lengths, tree="any", depths=True, head_dim=32,
        window_size=(12, None), dtype="float16",
    )  # fmt: skip
    yield replace(base, name="varlen-deterministic", padding=(0, 0), heads_q=4, deterministic=True)
    yield replace(base, name="varlen-all-padding", lengths=())


def _full_varlen() -> Iterator[VarlenCase]:
    lengths = ((333, 333), (1, 1), (0, 0), (127, 400), (400, 127), (64, 0), (0, 64), (256, 256))
    base = VarlenCase("varlen-full", lengths, (70, 40), heads_q=4)
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")):
        for name, changes in _full_varlen_changes():
            yield replace(base, name=f"{base.name}-{short}-{name}", dtype=dtype, **changes)
    base = replace(base, dtype="float32", precision="tf32")
    for d in (32, 64, 128, 256):
        yield replace(base, name=f"{base.name}-tf32-d{d}", head_dim=d)


def _full_varlen_changes() -> Iterator[Change]:
    for d, causal in product((16, 40, 64, 96, 128, 256), (False, True)):
        yield f"d{d}{'-causal' if causal else ''}", {"head_dim": d, "causal": causal}
    yield "d192-dv128", {"head_dim": 192, "head_dim_v": 128}
    yield "window", {"window_size": (70, 5), "causal": False}
    yield "softcap", {"softcap": 5.0, "head_dim": 128}
    yield "sinks", {"sinks": True}
    yield "row-max", {"row_max": True, "sinks": True}
    for d in (64, 128):
        yield f"relative-d{d}", {"relative": 50, "head_dim": d, "alibi": "all"}
    yield "relative-any", {"relative": 300, "causal": False, "softcap": 5.0}
    for d in (64, 128):
        yield f"dropout-d{d}", {"dropout_rate": 0.1, "head_dim": d}
    for d in (64, 128):
        yield f"tree-d{d}", {"tree": "nested", "head_dim": d}
    yield "tree-depths", {"tree": "nested", "depths": True, "window_size": (70, None)}
    yield "tree-any", {"tree": "any", "sinks": True}
    yield "heads8-1", {"heads_q": 8, "heads_kv": 1}
    # More sequences than a step of the search reads offsets of.
    yield "300-sequences", {"lengths": tuple((i % 7, i % 5) for i in range(300))}


def _large_varlen() -> Iterator[VarlenCase]:
    lengths = tuple((n, n) for n in (9000, 1, 500, 0, 6000, 883))
    base = VarlenCase("", lengths, padding=(0, 0), heads_q=16, heads_kv=4)
    for d in (64, 128):
        yield replace(base, name=f"large-varlen-d{d}", head_dim=d)


def _quick_block_sparse() -> Iterator[BlockSparseCase]:
    base = BlockSparseCase("", batch=1, seq_q=130, seq_kv=200, head_dim=16)
    yield replace(base, name="block-sparse-causal", causal=True, own_masks="heads")
    yield replace(base, name="block-sparse-fp32", seq_q=70, heads_q=4, tile_kv=128, dtype="float32")
    yield replace(
        base, name="block-sparse-all-options", batch=2, seq_kv=130, heads_kv=1, own_masks="all",
        tile_q=128, tile_kv=128, head_dim=24, head_dim_v=16, dtype="float16", window_size=(90, 20),
        softcap=20.0, sinks=True, scale=0.2,
    )  # fmt: skip


def _full_block_sparse() -> Iterator[BlockSparseCase]:
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")):
        base = BlockSparseCase(
            f"block-sparse-full-{short}",
            2,
            700,
            700,
            4,
            2,
            dtype=dtype,
            own_masks="heads",
            kept=0.3,
        )
        for name, changes in _full_block_sparse_changes():
            yield replace(base, name=f"{base.name}-{name}", **changes)


def _full_block_sparse_changes() -> Iterator[Change]:
    for d, tile in product((16, 40, 64, 96, 128, 256), (64, 128)):
        sizes = {"head_dim": d, "tile_q": tile, "tile_kv": tile}
        yield f"d{d}-tile{tile}", sizes
        yield f"d{d}-tile{tile}-causal", {**sizes, "causal": True}
    yield "d192-dv128", {"head_dim": 192, "head_dim_v": 128}
    yield "tile64-128", {"tile_kv": 128, "own_masks": "all"}
    yield "tile128-64", {"tile_q": 128, "own_masks": ""}
    large = {"tile_q": 128, "tile_kv": 128}
    for seq_q, seq_kv in ((401, 900), (900, 401)):
        yield f"{seq_q}x{seq_kv}", {**large, "seq_q": seq_q, "seq_kv": seq_kv, "causal": True}
    # One tile of up to 64 rows is a tile of 64.
    for seq_q, seq_kv in ((1, 513), (513, 1), (0, 64), (64, 0)):
        yield f"{seq_q}x{seq_kv}", {"seq_q": seq_q, "seq_kv": seq_kv, "causal": True}
    yield "window", {**large, "window_size": (200, 70)}
    yield "softcap", {"softcap": 5.0, "head_dim": 128}
    yield "sinks", {**large, "sinks": True, "causal": True}
    yield "all-kept", {**large, "kept": 1.0}
    yield "none-kept", {**large, "kept": 0.0}
    yield "heads8-1", {**large, "heads_q": 8, "heads_kv": 1, "own_masks": "all"}


def _large_block_sparse() -> Iterator[BlockSparseCase]:
    # Longer lists than a step of the search reads.
    base = BlockSparseCase("", batch=1, seq_q=32768, seq_kv=32768, heads_q=4, kept=0.1)
    for d in (64, 128):
        heads = {"head_dim": d, "own_masks": "heads"}
        yield replace(base, name=f"large-block-sparse-d{d}", **heads)
        yield replace(base, name=f"large-block-sparse-d{d}-causal", causal=True, **heads)


def _quick_dilated() -> Iterator[DilatedCase]:
    base = DilatedCase("", batch=1, seq_q=96, seq_kv=96, head_dim=16, segment_lengths=(24, 48, 96))
    yield replace(base, name="dilated-causal", causal=True, heads_q=4, heads_kv=4)
    # Two lengths, so two calls, one of them without a copy; rates that do not divide the heads.
    yield replace(
        base, name="dilated-all-options", batch=2, heads_q=6, heads_kv=3, head_dim=24,
        head_dim_v=16, dtype="float16", softcap=20.0, scale=0.2, segment_lengths=(96, 48, 32),
        dilation_rates=(6, 3, 1),
    )  # fmt: skip
    # Some tokens are kept by no head, or by one.
    yield replace(
        base, name="dilated-fp32-one-pair", heads_kv=1, dtype="float32", causal=True,
        segment_lengths=(48,), dilation_rates=(3,),
    )  # fmt: skip


def _full_dilated() -> Iterator[DilatedCase]:
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")):
        base = DilatedCase(
            f"dilated-full-{short}", 2, 768, 768, 4, 4, dtype=dtype,
            segment_lengths=(128, 256, 768), dilation_rates=(1, 2, 6),
        )  # fmt: skip
        for name, changes in _full_dilated_changes():
            yield replace(base, name=f"{base.name}-{name}", **changes)


def _full_dilated_changes() -> Iterator[Change]:
    for d in (16, 64, 128, 256):
        yield f"d{d}", {"head_dim": d}
        yield f"d{d}-causal", {"head_dim": d, "causal": True}
    yield "heads6-2", {"heads_q": 6, "heads_kv": 2, "causal": True}
    yield "heads8-8", {"heads_q": 8, "heads_kv": 8}
    yield "segments", {"segment_lengths": (64,), "dilation_rates": (1,), "causal": True}
    yield "uncovered", {"segment_lengths": (384, 768), "dilation_rates": (8, 16)}
    yield "rate32", {"segment_lengths": (768, 96), "dilation_rates": (32, 1), "causal": True}
    yield "softcap", {"softcap": 5.0}


def _large_dilated() -> Iterator[DilatedCase]:
    base = DilatedCase(
        "", 1, 4096, 4096, 4, 2, segment_lengths=(512, 1024, 2048, 4096),
        dilation_rates=(1, 2, 4, 8),
    )  # fmt: skip
    for d in (64, 128):
        yield replace(base, name=f"large-dilated-d{d}", head_dim=d)
        yield replace(base, name=f"large-dilated-d{d}-causal", head_dim=d, causal=True)


def _quick_context() -> Iterator[ContextCase]:
    base = ContextCase("", batch=1, seq_q=96, seq_kv=96, heads_q=2, head_dim=16, causal=True)
    yield replace(base, name="context-ring", ranks=4, heads_kv=1, exchange="ring")
    yield replace(
        base, name="context-all-options", batch=2, heads_q=4, head_dim_v=24,
        dtype="float16", window_size=(30, None), softcap=4.0, sinks=True, scale=0.3,
        sharding="balanced", documents=(13, 47, 1, 29), exchange="ring",
    )  # fmt: skip
    yield replace(
        base, name="context-gather", ranks=3, sharding="stripe", exchange="gather", causal=False
    )
    yield replace(base, name="context-fp32-heads", dtype="float32", exchange="heads", softcap=9.0)


def _full_context() -> Iterator[ContextCase]:
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")):
        base = ContextCase(
            f"context-full-{short}", 1, 1536, 1536, 4, 4, dtype=dtype, causal=True, ranks=4
        )
        for name, changes in _full_context_changes():
            yield replace(base, name=f"{base.name}-{name}", **changes)


def _full_context_changes() -> Iterator[Change]:
    documents = {"documents": (700, 30, 1, 400, 300), "sharding": "balanced"}
    for exchange in ("ring", "gather"):
        way = {"exchange": exchange}
        for d in (64, 128):
            yield f"{exchange}-d{d}", way | {"head_dim": d}
        yield f"{exchange}-window", way | {"window_size": (100, None), "head_dim": 128}
        yield f"{exchange}-documents", way | documents
    yield "ring-d256", {"exchange": "ring", "head_dim": 256}
    yield "ring-full", {"exchange": "ring", "causal": False, "batch": 2, "heads_kv": 2}
    yield "ring-8-sinks", {"exchange": "ring", "ranks": 8, "sinks": True, "softcap": 20.0}
    yield "ring-deterministic", {"exchange": "ring", "deterministic": True, "head_dim": 128}
    yield "gather-stripe", {"exchange": "gather", "sharding": "stripe", "window_size": (9, None)}
    yield "heads-documents", documents | {"exchange": "heads"}


def _large_context() -> Iterator[ContextCase]:
    base = ContextCase("", 1, 16384, 16384, 4, 2, head_dim=128, causal=True, exchange="ring")
    for ranks in (2, 8):
        yield replace(base, name=f"large-context-{ranks}", ranks=ranks)
    yield replace(base, name="large-context-window", ranks=8, window_size=(1000, None))


def _quick_decode() -> Iterator[DecodeCase]:
    # Lengths around a page's end, none at all, and the table's capacity.
    base = DecodeCase("", lengths=(0, 1, 15, 16, 17, 128))
    yield replace(base, name="decode-bf16")
    yield replace(base, name="decode-fp16-one-split", dtype="float16", num_splits=1)
    # Several tiles, so that they are split.
    several = replace(base, lengths=(0, 1, 15, 16, 17, 304), max_pages=19)
    yield replace(several, name="decode-tokens", tokens=4, num_splits=3)
    yield replace(base, name="decode-mha-d128", heads_q=2, head_dim=128)
    yield replace(base, name="decode-d80-dv72", head_dim=80, head_dim_v=72, heads_kv=1)
    yield replace(base, name="decode-page-7", page_size=7, max_pages=19, lengths=(0, 6, 7, 8, 133))
    yield replace(base, name="decode-int8", kv_dtype="int8", dtype="float16")
    yield replace(base, name="decode-fp8", kv_dtype="float8_e4m3fn", scale_shape=(2,))
    yield replace(
        several, name="decode-all-options", tokens=5, sinks=True, window_size=(150, 0),
        softcap=25.0, scale=0.2, num_splits=4,
    )  # fmt: skip
    yield replace(several, name="decode-tree", tokens=9, tree="drafts", sinks=True, num_splits=2)
    yield replace(
        base, name="decode-cascade", lengths=(140, 0, 128, 17, 144), max_pages=9, sinks=True,
        cascade=True, common_pages=8,
    )  # fmt: skip
    yield replace(base, name="decode-no-sequence", lengths=())


def _full_decode() -> Iterator[DecodeCase]:
    base = DecodeCase("decode-full", (0, 1, 63, 64, 65, 511, 700), page_size=64, max_pages=11)
    # So few keys that they are not split.
    few = replace(base, lengths=(0, 1, 63, 64, 65, 128, 129, 255, 256), max_pages=4)
    # As many sequences and kv heads as an H200 works on at once, and a few times as many.
    many = replace(base, heads_q=16, heads_kv=8)
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16")):
        for name, changes in _full_decode_changes():
            yield replace(base, name=f"{base.name}-{short}-{name}", dtype=dtype, **changes)
    for d in (128, 256):
        sizes = {"heads_q": 10, "heads_kv": 2, "tokens": 8, "head_dim": d}
        yield replace(base, name=f"{base.name}-40-rows-d{d}", **sizes)
    for kv_dtype, d in product(("int8", "float8_e4m3fn"), (16, 32, 256)):
        name = f"{base.name}-{kv_dtype}-d{d}"
        yield replace(base, name=name, kv_dtype=kv_dtype, head_dim=d)
    for kv_dtype, d in product((None, "int8", "float8_e4m3fn"), (64, 128, 256)):
        name = f"{base.name}-short-{kv_dtype or few.dtype}-d{d}"
        yield replace(few, name=name, kv_dtype=kv_dtype, head_dim=d)
    crowds = ((None, 56), ("int8", 96), ("float8_e4m3fn", 96))
    for (kv_dtype, sequences), d in product(crowds, (128, 256)):
        name = f"{base.name}-crowded-{kv_dtype or many.dtype}-d{d}"
        lengths = tuple(11 * i % 700 for i in range(sequences))
        yield replace(many, name=name, kv_dtype=kv_dtype, head_dim=d, lengths=lengths)


def _full_decode_changes() -> Iterator[Change]:
    for d in (16, 32, 64, 72, 96, 128, 192, 256):
        yield f"d{d}", {"head_dim": d}
    for size in (1, 3, 16, 48, 128, 256):
        yield f"page{size}", {"page_size": size, "max_pages": -(-701 // size)}
    for tokens in (1, 2, 3, 8, 16, 64):
        yield f"tokens{tokens}", {"tokens": tokens}
    for tree, tokens in product(("drafts", "any"), (1, 9, 64)):
        yield f"tree-{tree}-{tokens}", {"tree": tree, "tokens": tokens}
    for heads_q, heads_kv in ((1, 1), (8, 8), (8, 1), (6, 2), (32, 2)):
        heads = {"heads_q": heads_q, "heads_kv": heads_kv}
        yield f"heads{heads_q}-{heads_kv}", {**heads, "tokens": 3}
    for splits in (1, 2, 7, 64):
        yield f"splits{splits}", {"num_splits": splits}
    for left in (0, 1, 63, 200, 5000):
        yield f"window{left}", {"window_size": (left, 0), "tokens": 3}
    options = {
        "tokens": 4, "sinks": True, "window_size": (300, None), "softcap": 20.0, "head_dim": 128,
    }  # fmt: skip
    scales = (("tensor", ()), ("heads", (2,)))
    for kv_dtype, (kind, shape) in product(("int8", "float8_e4m3fn"), scales):
        cache = {"kv_dtype": kv_dtype, "scale_shape": shape}
        yield f"{kv_dtype}-{kind}", cache
        yield f"{kv_dtype}-{kind}-all-options", {**cache, **options}
        tree = {"tree": "drafts", "tokens": 40, "sinks": True, "softcap": 20.0}
        yield f"{kv_dtype}-{kind}-tree", {**cache, **tree}
    cascade = {"cascade": True, "lengths": (700, 0, 64, 699, 512, 1, 700, 640, 300)}
    for common in (0, 1, 8):
        yield f"cascade-{common}", {**cascade, "common_pages": common}
    for size, tokens in ((7, 1), (48, 3), (128, 8)):
        pages = {"page_size": size, "max_pages": -(-700 // size), "common_pages": 600 // size}
        yield f"cascade-page{size}", {**cascade, **pages, "tokens": tokens, "softcap": 20.0}
    for kv_dtype, d in (("int8", 64), ("float8_e4m3fn", 128), (None, 256)):
        cache = {"kv_dtype": kv_dtype, "head_dim": d, "common_pages": 9, "sinks": True}
        yield f"cascade-{kv_dtype or 'wide'}", {**cascade, **cache}
    tree = {"tree": "drafts", "tokens": 9, "common_pages": 9, "heads_q": 6}
    yield "cascade-tree", {**cascade, **tree}
    yield "sinks", {"sinks": True}
    yield "softcap", {"softcap": 5.0}
    yield "no-pages", {"max_pages": 0}


def _large_decode() -> Iterator[DecodeCase]:
    base = DecodeCase("", heads_q=32, heads_kv=8, head_dim=128, max_pages=512)
    yield replace(base, name="large-decode-batch", lengths=(8192,) * 32)
    yield replace(base, name="large-decode-ragged", lengths=tuple(range(1, 8192, 257)))
    # 2^31 elements of a pool are passed by page id times page size.
    yield replace(base, name="large-decode-2g-elements", lengths=(8192,) * 260, heads_kv=8)


def _quick_paged() -> Iterator[PagedCase]:
    # A chunk in the middle of its prompt, a whole prompt, decodes.
    yield PagedCase("paged-mixed", (170, 41, 90, 1), new_tokens=(37, 41, 1, 1), max_pages=11)
    yield PagedCase(
        "paged-all-options", (150, 9, 70), new_tokens=(20, 9, 2), padding=3, page_size=32,
        dtype="float16", kv_dtype="int8", scale_shape=(2,), window_size=(40, 0), softcap=20.0,
        sinks=True, scale=0.2, num_splits=2,
    )  # fmt: skip
    # Sequences without new tokens, without keys, and with more tokens than keys.
    yield PagedCase(
        "paged-page-7", (60, 33, 0, 4), new_tokens=(20, 0, 3, 7), padding=9, page_size=7,
        max_pages=19, heads_q=6, head_dim=72, head_dim_v=48,
    )  # fmt: skip

    yield PagedCase(
        "paged-tree", (150, 41, 33, 5, 0), new_tokens=(64, 1, 33, 7, 2), padding=3, tree="drafts",
        heads_q=6, max_pages=11,
    )  # fmt: skip
    # Keys that are not split, so that explicit kernels have them.
    yield PagedCase(
        "paged-chunks", (200, 70), new_tokens=(70, 5), padding=3, heads_q=8, page_size=32,
        max_pages=7, window_size=(90, 0), sinks=True, num_splits=1,
    )  # fmt: skip


def _full_paged() -> Iterator[PagedCase]:
    base = PagedCase(
        "paged-full", (700, 333, 1, 0, 511, 64), new_tokens=(333, 333, 1, 0, 65, 64), padding=40,
        heads_q=8, page_size=64, max_pages=11,
    )  # fmt: skip
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16")):
        for name, changes in _full_paged_changes():
            yield replace(base, name=f"{base.name}-{short}-{name}", dtype=dtype, **changes)


def _full_paged_changes() -> Iterator[Change]:
    for kv_dtype, d in product((None, "int8", "float8_e4m3fn"), (16, 64, 128, 256)):
        yield (
            f"d{d}{'' if kv_dtype is None else '-' + kv_dtype}",
            {"head_dim": d, "kv_dtype": kv_dtype},
        )
    for d in (32, 128, 256):
        yield f"softcap-d{d}", {"head_dim": d, "softcap": 5.0}
    yield "d192-dv128", {"head_dim": 192, "head_dim_v": 128}
    for kv_dtype, (d, dv) in product(("int8", "float8_e4m3fn"), ((128, 64), (64, 16), (32, 256))):
        sizes = {"head_dim": d, "head_dim_v": dv, "kv_dtype": kv_dtype}
        yield f"d{d}-dv{dv}-{kv_dtype}", sizes
    for size in (1, 48, 256):
        yield f"page{size}", {"page_size": size, "max_pages": -(-701 // size)}
    for heads_q, heads_kv in ((4, 4), (6, 2), (32, 1)):
        yield f"heads{heads_q}-{heads_kv}", {"heads_q": heads_q, "heads_kv": heads_kv}
    for splits in (1, 2, 7):
        yield f"splits{splits}", {"num_splits": splits}
    for d in (80, 128, 256):
        yield f"one-part-d{d}", {"head_dim": d, "num_splits": 1}
    for heads_q, size in ((2, 16), (16, 128), (64, 256)):
        yield (
            f"one-part-heads{heads_q}-page{size}",
            {
                "heads_q": heads_q, "page_size": size, "max_pages": -(-701 // size),
                "softcap": 5.0, "num_splits": 1,
            },
        )  # fmt: skip
    for left in (0, 63, 5000):
        yield f"window{left}", {"window_size": (left, 0)}
    yield "sinks", {"sinks": True, "num_splits": 3}
    for tree, d in product(("drafts", "any"), (64, 128, 256)):
        yield f"tree-{tree}-d{d}", {"tree": tree, "head_dim": d}
    options = {"sinks": True, "softcap": 5.0, "num_splits": 1}
    for kv_dtype in ("int8", "float8_e4m3fn"):
        yield f"tree-{kv_dtype}", {"tree": "drafts", "kv_dtype": kv_dtype, **options}
    one_each = {"new_tokens": (1,) * 6, "padding": 0, "tree": "any"}
    yield "tree-one-each", one_each
    # One token each, and more sequences than a step of the search reads offsets of.
    yield "one-each", {"new_tokens": (1,) * 6, "padding": 0, "num_splits": 2}
    many = tuple(i % 5 for i in range(300))
    lengths = tuple(i % 60 for i in range(300))
    yield "300-sequences", {"lengths": lengths, "new_tokens": many, "max_pages": 1}


def _large_paged() -> Iterator[PagedCase]:
    base = PagedCase("", heads_q=32, heads_kv=8, head_dim=128, max_pages=512)
    chunks, decodes = (4096, 8192, 1000), tuple(range(1, 8192, 512))
    yield replace(
        base, name="large-paged-mixed", lengths=(*chunks, *decodes),
        new_tokens=(512, 512, 1000, *(1 for _ in decodes)),
    )  # fmt: skip


def _quick_append() -> Iterator[AppendCase]:
    # Tokens before the first position and past the capacity; sequences without tokens; padding.
    yield AppendCase(
        "append-packed", (20, 2, 38, 9), new_tokens=(17, 4, 4, 0), padding=2, page_size=7,
        max_pages=5, head_dim_v=48, kv_dtype="int8", scale_shape=(2,),
    )  # fmt: skip
    yield AppendCase(
        "append-rotary", (30, 3, 40), new_tokens=(4, 3, 1), padding=2, heads_q=4, rotary_dim=64
    )
    yield AppendCase(
        "append-rotary-interleaved", (30, 40), tokens=3, heads_q=6, head_dim=72, rotary_dim=40,
        kv_dtype="float8_e4m3fn", rotary_interleaved=True, dtype="float16",
    )  # fmt: skip


def _full_append() -> Iterator[AppendCase]:
    lengths, new = (300, 2, 512, 9, 128), (300, 1, 17, 0, 64)
    base = AppendCase(
        "append-full", lengths, new_tokens=new, padding=9, heads_q=8, page_size=64, positions=512
    )
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16")):
        for name, changes in _full_append_changes():
            yield replace(base, name=f"{base.name}-{short}-{name}", dtype=dtype, **changes)
    for d, rotary in ((16, 2), (80, 48), (128, 126)):
        yield replace(base, name=f"{base.name}-d{d}-r{rotary}", head_dim=d, rotary_dim=rotary)
    for tokens in (1, 3, 16, 64):
        lengths = 300, max(20, tokens), 512
        dense = {"new_tokens": None, "tokens": tokens, "lengths": lengths, "padding": 0}
        yield replace(base, name=f"{base.name}-tokens{tokens}", rotary_dim=64, **dense)
    # More sequences than a step of the search reads offsets of.
    many = {"lengths": tuple(i % 60 for i in range(300)), "max_pages": 1}
    many["new_tokens"] = tuple(i % 5 for i in range(300))
    yield replace(base, name=f"{base.name}-300-sequences", rotary_dim=64, **many)


def _full_append_changes() -> Iterator[Change]:
    for kv_dtype, d in product((None, "int8", "float8_e4m3fn"), (16, 64, 128, 256)):
        name = f"d{d}{'' if kv_dtype is None else '-' + kv_dtype}"
        sizes = {"head_dim": d, "kv_dtype": kv_dtype, "rotary_dim": d}
        yield name, sizes
        yield f"{name}-interleaved", {**sizes, "rotary_interleaved": True}


def _large_append() -> Iterator[AppendCase]:
    # 2^31 elements of a pool are passed by page id times page size.
    yield AppendCase(
        "large-append-2g-elements", (8192,) * 260, new_tokens=(64,) * 260, heads_q=32, heads_kv=8,
        head_dim=128, max_pages=512, rotary_dim=128, positions=8192,
    )  # fmt: skip


def _quick_merge() -> Iterator[MergeCase]:
    yield MergeCase("merge-bf16")
    yield MergeCase("merge-fp32-dv24", dtype="float32", head_dim_v=24)
    yield MergeCase("merge-no-state", num_states=0)


def _full_merge() -> Iterator[MergeCase]:
    for dtype, states in product(("bfloat16", "float16", "float32"), (1, 2, 33)):
        yield MergeCase(f"merge-full-{dtype}-{states}", states, tokens=130, dtype=dtype)


def _large_merge() -> Iterator[MergeCase]:
    yield MergeCase("large-merge", 8, 4, 8192, 16, 128)
