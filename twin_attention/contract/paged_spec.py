"""Problems over a paged cache: decode, chunks of prompts, and appends."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

from twin_attention.contract.operands import AppendOperands, DecodeOperands, PagedOperands
from twin_attention.contract.spec import (
    BITS,
    MergeSpec,
    ScoreRule,
    Traits,
    Window,
    scale_or_default,
)

DECODE_DTYPES = ("float16", "bfloat16")
QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")
PAGE_SIZE_MAX, TOKENS_MAX, SPLITS_MAX = 256, 64, 256
LATENT_DIM_MAX = 576  # of keys that hold their values


class DecodeOptions(NamedTuple):
    scale: float | None
    window_left: int | None
    softcap: float | None
    num_splits: int | None
    cascade: bool = False
    value_dim: int | None = None
    batch_invariant: bool = False


@dataclass(frozen=True)
class PagedCache:
    """A pool of pages and the tables that give each sequence its pages.

    Key ``j`` of sequence ``b`` lies in slot ``j % page_size`` of page
    ``block_tables[b, j // page_size]``.

    Attributes:
        num_pages: in the pool, shared by all sequences.
        dtype: of the pool, one of `DECODE_DTYPES` or `QUANTIZED_DTYPES`.
        latent: values are the first `head_dim_v` columns of keys (0 for an append, which reads
            none).
    """

    num_pages: int
    page_size: int
    max_pages: int
    heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    latent: bool = False

    @classmethod
    def of(
        cls,
        operands: DecodeOperands | PagedOperands | AppendOperands,
        dtype: str,
        value_dim: int | None = None,
    ) -> PagedCache:
        v_pages = operands.v_pages
        num_pages, page_size, heads, head_dim = operands.k_pages.shape
        return cls(
            num_pages=num_pages,
            page_size=page_size,
            max_pages=operands.block_tables.shape[1],
            heads=heads,
            head_dim=head_dim,
            head_dim_v=(value_dim or 0) if v_pages is None else v_pages.shape[3],
            dtype=dtype,
            latent=v_pages is None,
        )

    @property
    def capacity(self) -> int:
        """The most keys that a sequence can have."""
        return self.max_pages * self.page_size

    @property
    def columns(self) -> int:
        """Numbers of a key and its value in the pool."""
        return self.head_dim + (0 if self.latent else self.head_dim_v)

    @property
    def is_empty(self) -> bool:
        """True without a slot for a key."""
        return 0 in (self.num_pages, self.capacity)

    @property
    def is_quantized(self) -> bool:
        """True for keys and values stored divided by a scale, in 8 bits."""
        return self.dtype in QUANTIZED_DTYPES

    @property
    def dtype_bits(self) -> int:
        return BITS[self.dtype]


@dataclass(frozen=True)
class AppendSpec(Traits):
    """One append of new tokens to a paged cache.

    Token ``t`` of a sequence of length ``n`` goes to position ``n - tokens + t``.

    Attributes:
        tokens: new tokens of each sequence, or if `packed` of all of them.
        heads_q: query heads that are rotated as well.
        packed: how many tokens each sequence has is data on the device.
        rotary_dim: leading dimensions of a key and of a query that are rotated; 0 is none.
        interleaved: a rotated pair is dimensions 2i and 2i + 1, not i and i + rotary_dim / 2.
    """

    batch: int
    tokens: int
    cache: PagedCache
    dtype: str
    heads_q: int = 0
    packed: bool = False
    rotary_dim: int = 0
    interleaved: bool = False

    @classmethod
    def of(
        cls, operands: AppendOperands, dtype: str, kv_dtype: str, interleaved: bool
    ) -> AppendSpec:
        q, cos, offsets = operands.q, operands.rotary_cos, operands.cu_seqlens_q
        packed = offsets is not None
        tokens = operands.k_new.shape[:-2]
        return cls(
            batch=offsets.shape[0] - 1 if packed else tokens[0],
            tokens=1 if len(tokens) == 1 and not packed else tokens[-1],
            cache=PagedCache.of(operands, kv_dtype),
            dtype=dtype,
            heads_q=0 if q is None else q.shape[-2],
            packed=packed,
            rotary_dim=0 if cos is None else 2 * cos.shape[1],
            interleaved=cos is not None and interleaved,
        )

    @property
    def head_dim(self) -> int:
        return self.cache.head_dim

    @property
    def head_dim_v(self) -> int:
        return self.cache.head_dim_v

    @property
    def dtype_bits(self) -> int:
        return self.cache.dtype_bits

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to write to the cache."""
        return 0 in (self.batch, self.tokens, self.cache.heads) or self.cache.is_empty


@dataclass(frozen=True)
class DecodeSpec(Traits):
    """One paged decode: shapes, dtypes and semantics, with every default resolved.

    Token ``t`` of a sequence of length ``n`` stands at position ``p = n - tokens + t`` and sees
    keys ``p - window_left .. p``.

    Attributes:
        tokens: new ones of each sequence.
        dtype: of queries and output.
        num_splits: parts that each sequence's keys are divided into; None leaves it to the side.
        has_tree: the new tokens are a tree.
        ranges: how many each new token has.
        cascade: pages that several sequences begin with are read once.
        batch_invariant, rows_aligned: as in `AttentionSpec`.
    """

    batch: int
    tokens: int
    heads_q: int
    cache: PagedCache
    dtype: str
    scale: float
    window_left: int | None = None
    softcap: float | None = None
    num_splits: int | None = None
    has_tree: bool = False
    ranges: int = 0
    cascade: bool = False
    alibi: bool = False
    batch_invariant: bool = False
    rows_aligned: bool = True

    @classmethod
    def of(
        cls,
        operands: DecodeOperands | PagedOperands,
        dtype: str,
        kv_dtype: str,
        options: DecodeOptions,
    ) -> Self:
        batch, *tokens, heads_q, head_dim = operands.q.shape
        return cls(
            batch=batch,
            tokens=tokens[0] if tokens else 1,
            heads_q=heads_q,
            cache=PagedCache.of(operands, kv_dtype, options.value_dim),
            dtype=dtype,
            scale=scale_or_default(options.scale, head_dim),
            window_left=options.window_left,
            softcap=options.softcap,
            num_splits=options.num_splits,
            has_tree=operands.tree_ends is not None,
            cascade=options.cascade and not options.batch_invariant,
            alibi=operands.alibi_slopes is not None,
            batch_invariant=options.batch_invariant,
        )

    @property
    def heads_kv(self) -> int:
        return self.cache.heads

    @property
    def head_dim(self) -> int:
        return self.cache.head_dim

    @property
    def head_dim_v(self) -> int:
        return self.cache.head_dim_v

    @property
    def dtype_bits(self) -> int:
        return self.cache.dtype_bits

    @property
    def group_size(self) -> int:
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def rows(self) -> int:
        """Query rows that read the keys of one kv head of a sequence: tokens × query heads."""
        return self.tokens * self.group_size

    @property
    def reach(self) -> int:
        """The most keys that the tokens of a sequence see, by the shapes."""
        if self.window_left is None or self.ranges:
            return self.cache.capacity
        return min(self.cache.capacity, self.window_left + self.tokens)

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to write, or no key to read in any sequence."""
        return 0 in (self.batch, self.tokens, self.heads_q) or self.cache.is_empty

    @property
    def scores(self) -> ScoreRule:
        """The way from q·k to the exponent; a quantised cache's scale varies by head."""
        scale_first = self.cache.is_quantized or self.alibi
        return ScoreRule.of(self.scale, self.softcap, scale_first)

    @property
    def bounded_window(self) -> Window:
        """The window, no wider than a sequence: a position plus it fits 32 bits."""
        return Window(self.window_left, 0).bounded(self.cache.capacity)

    def merge(self, num_splits: int) -> MergeSpec:
        """Return the problem of merging the results of its splits."""
        return MergeSpec(
            num_splits, self.batch, self.tokens, self.heads_q, self.head_dim_v, self.dtype
        )

    def visible_keys(self, token: int, length: int) -> range:
        """Return the keys that a new token of a sequence of `length` keys sees without a tree."""
        position = min(max(length, 0), self.cache.capacity) - self.tokens + token
        begin = 0 if self.window_left is None else max(0, position - self.window_left)
        return range(begin, max(begin, position + 1))


@dataclass(frozen=True)
class PagedSpec(DecodeSpec):
    """A paged decode of any number of new tokens per sequence; the numbers are data on the device.

    `tokens` counts the packed new tokens of all sequences.
    """

    @classmethod
    def of(cls, operands: PagedOperands, dtype: str, kv_dtype: str, options: DecodeOptions) -> Self:
        spec = super().of(operands, dtype, kv_dtype, options)  # of a token per sequence
        batch, tokens = operands.cu_seqlens_q.shape[0] - 1, operands.q.shape[0]
        ranges = 0 if operands.q_ranges is None else operands.q_ranges.shape[1]
        return replace(spec, batch=batch, tokens=tokens, ranges=ranges)

    @property
    def rows(self) -> int:
        """Mean query rows per kv head and sequence, rounded up."""
        return -(-self.tokens // max(1, self.batch)) * self.group_size

    def merge(self, num_splits: int) -> MergeSpec:
        """Return the problem of merging its splits: one batch of all tokens."""
        return MergeSpec(num_splits, 1, self.tokens, self.heads_q, self.head_dim_v, self.dtype)

    def sequence(self, tokens: int) -> DecodeSpec:
        """Return the problem of one of its sequences, with `tokens` new tokens."""
        same: dict[str, Any] = {x.name: getattr(self, x.name) for x in fields(DecodeSpec)}
        same["batch"], same["tokens"] = 1, tokens
        return DecodeSpec(**same)
