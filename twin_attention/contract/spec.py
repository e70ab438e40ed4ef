"""Problem descriptions and the semantic rules that both implementations follow.

Positions are bottom-right aligned: query ``i`` stands at key position
``p = i + seq_kv - seq_q`` and sees key ``j`` when ``p - left <= j <= p + right``.
Causal attention is the rule ``right <= 0``, so a window is all that a kernel needs to know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from twin_attention.contract.dropout import DropoutRule
from twin_attention.contract.operands import (
    TERMS,
    BlockSparseOperands,
    FlashOperands,
    PartialOperands,
    VarlenOperands,
)

DTYPES = ("float16", "bfloat16", "float32")
Precision = Literal["ieee", "tf32"]  # of products of float32 operands
PRECISIONS = get_args(Precision)
HEAD_DIM_MIN, HEAD_DIM_MAX, HEAD_DIM_STEP = 16, 512, 8
TILE_SIZES = (64, 128)  # of a block mask, queries and keys
WINDOW_UNLIMITED = 2**31 - 1  # no length is greater: positions have 32 bits
RANGES_MAX = 2  # of a query
DEPTH_MAX = 2**30 - 1  # of queries and keys; a window of depths is no wider
# Bits of an element, including a pool's.
BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "float8_e4m3fn": 8}


def scale_or_default(scale: float | None, head_dim: int) -> float:
    """Return the factor of the scores: ``head_dim ** -0.5`` unless another is given."""
    return head_dim**-0.5 if scale is None else scale


@dataclass(frozen=True)
class Window:
    """Keys seen to the left and right of the own position; None is unlimited."""

    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, causal: bool, window_size: tuple[int | None, int | None] | None) -> Window:
        """Fold `causal` and `window_size` into one rule."""
        left, right = window_size if window_size is not None else (None, None)
        return cls(left, 0 if causal else right)

    def bounded(self, reach: int) -> Window:
        """Return the window with neither side wider than `reach`, or 2^30 if that is symbolic."""
        reach = reach if isinstance(reach, int) else 1 << 30
        return Window(
            *(None if side is None else min(side, reach) for side in (self.left, self.right))
        )


class FlashOptions(NamedTuple):
    scale: float | None = None
    window_left: int | None = None
    window_right: int | None = None
    softcap: float | None = None
    deterministic: bool | None = None
    precision: Precision = "ieee"
    row_max: bool = False
    dropout_rate: float = 0  # torch.compile takes an int as fixed, and follows a float
    batch_invariant: bool = False

    @property
    def window(self) -> Window:
        return Window(self.window_left, self.window_right)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return them as the arguments that all flash attention functions take."""
        names = ("scale", "softcap", "deterministic", "precision")
        return {"window_size": (self.window_left, self.window_right)} | {
            name: getattr(self, name) for name in names
        }


# Exponentials of scores up to this, and their sums, are far below float32's limit: 2 to the power
# of 79.
SMALL_CAP = 55.0
_MAX_CAP_SCALE = 2.0**120


class ScoreRule(NamedTuple):
    """The way from q·k to the softmax's exponent, the same in every kernel.

    Attributes:
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
        scale_first: multiply q·k by the scale before anything else, as when something is added to
            the score. Otherwise `exp2_scale` contains the scale, which then costs no instruction.
        exp2_scale: factor that takes a score to base 2: ``exp(score) = exp2(exp2_scale * score)``.
        precision: how float32 operands multiply, a `Precision`, in every product.
        cap_scale: factor of q·k in the softcap's tanh, ``scale / softcap``; None without a softcap.
        small_cap: there is a softcap of at most `SMALL_CAP`, so exponentials of scores need no
            maximum subtracted.
    """

    scale: float
    softcap: float | None
    scale_first: bool
    exp2_scale: float
    precision: Precision = "ieee"
    cap_scale: float | None = None
    small_cap: bool = False

    @classmethod
    def of(
        cls,
        scale: float,
        softcap: float | None,
        scale_first: bool = False,
        precision: Precision = "ieee",
    ) -> ScoreRule:
        """Return the rule of a problem.

        The scale is folded into the exponent only without a softcap in between, and only if it is
        positive, because the running maximum is of unscaled scores. Its product with log2(e) must
        also be a normal
        float32: a masked score is -inf, and -inf times a product that vanished would be NaN.
        """
        scale_first = scale_first or softcap is not None or not 2.0**-126 <= scale < 2.0**127
        exp2_scale = math.log2(math.e) * (1.0 if scale_first else scale)
        if softcap is None:
            return cls(scale, softcap, scale_first, exp2_scale, precision)
        # Products with it are finite, and tanh is 1 long before that.
        cap_scale = max(-_MAX_CAP_SCALE, min(scale / softcap, _MAX_CAP_SCALE))
        small_cap = softcap <= SMALL_CAP
        return cls(scale, softcap, scale_first, exp2_scale, precision, cap_scale, small_cap)


class Traits:
    """Hold what kernels ask of any problem.

    is_packed: it is a flash attention of packed sequences.
    is_part: it is an attention over some of the keys.
    has_lists: it is an attention over the tiles that a block mask lists.
    """

    is_packed: ClassVar[bool] = False
    is_part: ClassVar[bool] = False
    has_lists: ClassVar[bool] = False


@dataclass(frozen=True)
class AttentionSpec(Traits):
    """One attention problem: shapes, dtype and semantics, with every default resolved.

    Attributes:
        dtype: one of `DTYPES`.
        window: visibility rule, `causal` included.
        deterministic: a backward gives the same bits every time; False allows sums in any order.
        precision: "ieee" in 16 bits.
        rows_aligned: every row in memory begins at a multiple of 16 bytes, as TMA needs. No result
            depends on it.
        segmented: there are segment ids.
        tree: keys have ends.
        depths: the window's left side counts depths in place of positions.
        ranges: how many each query has.
        terms: names, from `TERMS`, of the operands that are added to the scores.
        wide_bias: there is a float32 bias with rows and keys.
        batch_invariant: a row's bits follow from what the query sees; see docs/semantics.md.
        frozen: names, from `FREEZABLE`, of the operands whose gradient a backward leaves out.
        function: the public function's name, for messages.
    """

    function: ClassVar[str] = "flash_attention"
    batch: int
    seq_q: int
    seq_kv: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    scale: float
    window: Window = Window()
    softcap: float | None = None
    deterministic: bool = False
    precision: Precision = "ieee"
    rows_aligned: bool = True
    segmented: bool = False
    tree: bool = False
    depths: bool = False
    ranges: int = 0
    terms: tuple[str, ...] = ()
    wide_bias: bool = False
    row_max: bool = False
    dropout_rate: float = 0  # torch.compile takes an int as fixed, and follows a float
    batch_invariant: bool = False
    frozen: tuple[str, ...] = ()

    @classmethod
    def of(cls, operands: FlashOperands, dtype: str, options: FlashOptions) -> AttentionSpec:
        return cls(
            batch=operands.q.shape[0],
            segmented=operands.q_segment_ids is not None,
            wide_bias=_has_wide_bias(operands),
            **_fields_of(operands, dtype, options),
        )

    @property
    def group_size(self) -> int:
        """Query heads per kv head (GQA): query head h reads kv head h // group_size."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def hides_by_data(self) -> bool:
        """True when segments, ends or ranges, which the device has, say which pairs are seen."""
        return self.segmented or self.tree or self.ranges > 0

    @property
    def dtype_bits(self) -> int:
        return BITS[self.dtype]

    @property
    def diagonal(self) -> int:
        """Key position of query 0."""
        return self.seq_kv - self.seq_q

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to read or nothing to write."""
        return 0 in (self.batch, self.seq_q, self.seq_kv, self.heads_q)

    @property
    def scores(self) -> ScoreRule:
        """The way from q·k to the exponent. Terms are added to scaled scores."""
        return ScoreRule.of(self.scale, self.softcap, bool(self.terms), self.precision)

    @property
    def dropout(self) -> DropoutRule | None:
        """Return how probabilities are dropped; None if none is."""
        return DropoutRule.of(self.dropout_rate)

    @property
    def position_window(self) -> Window:
        """Return the window of positions: one without a left side that counts depths."""
        return Window(None, self.window.right) if self.depths else self.window

    @property
    def bounded_window(self) -> Window:
        """Return the window of positions, no wider than the problem, so that sums fit 32 bits."""
        return self.position_window.bounded(self.seq_q + self.seq_kv)

    @property
    def depth_window(self) -> int | None:
        """Return how much deeper a query may be than a key that it sees; None is unlimited."""
        return self.window.left if self.depths else None

    def visible_keys(self, query: int) -> range:
        """Return the keys that one query sees by position, in all segments and branches."""
        position, window = query + self.diagonal, self.position_window
        begin, end = 0, self.seq_kv
        if window.left is not None:
            begin = max(begin, position - window.left)
        if window.right is not None:
            end = min(end, position + window.right + 1)
        return range(begin, max(begin, end))


def _fields_of(
    operands: FlashOperands | VarlenOperands, dtype: str, options: FlashOptions
) -> dict[str, Any]:
    seq_q, heads_q, head_dim = operands.q.shape[-3:]
    seq_kv, heads_kv, head_dim_v = operands.v.shape[-3:]
    return {
        "seq_q": seq_q,
        "seq_kv": seq_kv,
        "heads_q": heads_q,
        "heads_kv": heads_kv,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "dtype": dtype,
        "scale": scale_or_default(options.scale, head_dim),
        "window": options.window,
        "softcap": options.softcap,
        "deterministic": bool(options.deterministic),
        "precision": options.precision if dtype == "float32" else "ieee",
        "tree": operands.kv_ends is not None,
        "depths": operands.q_depths is not None and options.window_left is not None,
        "ranges": 0 if operands.q_ranges is None else operands.q_ranges.shape[-2],
        "terms": tuple(name for name in TERMS if getattr(operands, name, None) is not None),
        "row_max": options.row_max,
        "dropout_rate": options.dropout_rate,
        "batch_invariant": options.batch_invariant,
    }


def _has_wide_bias(operands: FlashOperands) -> bool:
    """Return True for a float32 bias with rows and keys."""
    bias = getattr(operands, "bias", None)
    return bias is not None and bias.dtype == "float32" and 1 not in bias.shape[2:]


@dataclass(frozen=True)
class VarlenSpec(AttentionSpec):
    """A batch of packed sequences, whose lengths are data on the device.

    It is described as one sequence: a batch of 1 with `seq_q` and `seq_kv` tokens in all.
    """

    function: ClassVar[str] = "flash_attention_varlen"
    is_packed: ClassVar[bool] = True
    num_sequences: int = field(kw_only=True)

    @classmethod
    def of(cls, operands: VarlenOperands, dtype: str, options: FlashOptions) -> VarlenSpec:
        num_sequences = operands.cu_seqlens_q.shape[0] - 1
        shared = _fields_of(operands, dtype, options)
        return cls(batch=1, num_sequences=num_sequences, **shared)

    def sequence(self, seq_q: int, seq_kv: int) -> AttentionSpec:
        """Return the problem of one of its sequences."""
        same: dict[str, Any] = {x.name: getattr(self, x.name) for x in fields(AttentionSpec)}
        same["seq_q"], same["seq_kv"] = seq_q, seq_kv
        return AttentionSpec(**same)


def tile_size(length: int, tiles: int) -> int | None:
    """Return a block mask's tile size from a length and the number of tiles; None if none fits."""
    return next((size for size in TILE_SIZES if tiles == -(-length // size)), None)


@dataclass(frozen=True)
class BlockSparseSpec(AttentionSpec):
    """An attention over the tiles that a block mask keeps, which are data on the device.

    tile_q, tile_kv: queries and keys of a tile, each one of `TILE_SIZES`.
    mask_batch, mask_heads: sequences and heads with their own mask: all of them, or 1 for a shared
        one.
    """

    function: ClassVar[str] = "block_sparse_attention"
    has_lists: ClassVar[bool] = True
    tile_q: int = field(kw_only=True)
    tile_kv: int = field(kw_only=True)
    mask_batch: int = field(kw_only=True)
    mask_heads: int = field(kw_only=True)

    @classmethod
    def of(
        cls, operands: BlockSparseOperands, dtype: str, options: FlashOptions
    ) -> BlockSparseSpec:
        dense = FlashOperands(operands.q, operands.k, operands.v)
        same = AttentionSpec.of(dense, dtype, options)
        mask_batch, mask_heads, tiles_q = operands.kv_counts.shape
        return cls(
            **vars(same),
            tile_q=tile_size(same.seq_q, tiles_q) or 0,
            tile_kv=tile_size(same.seq_kv, operands.q_counts.shape[2]) or 0,
            mask_batch=mask_batch,
            mask_heads=mask_heads,
        )


@dataclass(frozen=True)
class PartialSpec(AttentionSpec):
    """An attention over some of the keys, merged with a result over others.

    Which keys a query sees is data on the device, so the spec has no window.

    first: there is no result over other keys yet, and none is read.
    last: the result is over all keys, and is rounded to q's dtype.
    """

    function: ClassVar[str] = "context_attention"
    is_part: ClassVar[bool] = True
    first: bool = False
    last: bool = False

    @classmethod
    def of(cls, operands: PartialOperands, dtype: str, options: FlashOptions) -> PartialSpec:
        """Describe matching operands, without the window of the options."""
        dense = FlashOperands(operands.q, operands.k, operands.v)
        options = options._replace(window_left=None, window_right=None)
        return cls(**vars(AttentionSpec.of(dense, dtype, options)))


class Dilation(NamedTuple):
    """One pair of dilated attention: segments of a sequence, and which of their tokens are kept.

    Kv head h, with its query heads, keeps the positions p with ``p % rate == h % rate``.
    """

    segment_length: int
    rate: int

    @property
    def kept(self) -> int:
        """Tokens of a segment that a head keeps."""
        return self.segment_length // self.rate


def dilated_calls(dilations: tuple[Dilation, ...]) -> tuple[tuple[Dilation, ...], ...]:
    """Group pairs that keep the same number of tokens per segment, for one kernel call each."""
    dilations = tuple(sorted(dilations))
    lengths = dict.fromkeys(x.kept for x in dilations)
    return tuple(tuple(x for x in dilations if x.kept == kept) for kept in lengths)


@dataclass(frozen=True)
class DilatedSpec(AttentionSpec):
    """A dilated attention: a merge of attentions within segments, over some of their tokens."""

    dilations: tuple[Dilation, ...] = field(kw_only=True)

    @classmethod
    def of(
        cls,
        operands: FlashOperands,
        dtype: str,
        options: FlashOptions,
        *,
        dilations: tuple[Dilation, ...],
    ) -> DilatedSpec:
        same = AttentionSpec.of(operands, dtype, options)
        return cls(**vars(same), dilations=dilations)

    @property
    def longest_call(self) -> AttentionSpec:
        """The problem of the `dilated_calls` whose segments keep the most tokens."""
        call = max(dilated_calls(self.dilations), key=lambda call: call[0].kept)
        same: dict[str, Any] = {x.name: getattr(self, x.name) for x in fields(AttentionSpec)}
        same["batch"] *= sum(self.seq_q // x.segment_length for x in call)
        same["seq_q"] = same["seq_kv"] = call[0].kept
        return AttentionSpec(**same)


@dataclass(frozen=True)
class MergeSpec(Traits):
    """A merge of partial results over disjoint keys; dtype: of the merged output."""

    num_states: int
    batch: int
    tokens: int
    heads: int
    head_dim_v: int
    dtype: str

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to write, or nothing to merge."""
        return 0 in (self.num_states, self.batch, self.tokens, self.heads)
