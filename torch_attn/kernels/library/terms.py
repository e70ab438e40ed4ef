"""Terms: what is added to the scaled scores before the softcap and the masks; and dropout.

With d the key's position less the query's: ``relative_bias[h, clip(d, -R, R) + R]`` (Raffel et al.
2020, T5), ``-alibi_slopes[h] * |d|`` (Press et al. 2022, ALiBi).
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_attn.launch import KernelCall
from twin_attention.contract.operands import AttentionOperands, FlashOperands, VarlenOperands
from twin_attention.contract.spec import AttentionSpec, VarlenSpec, Window

# The most batch elements whose gradients of a bias are added in its 16 bits: one rounding. More
# would be too coarse where large parts cancel.
MOST_SHARING = 2
# Slopes above the first are rounded; all are at most the second.
STEEP = tl.constexpr(16.0)
STEEPEST = tl.constexpr(2.0**100)


class Bias(NamedTuple):
    """A bias of query-key pairs, or its gradient; entries is None if there is none.

    Attributes:
        entries: [B, Hq, Sq, Skv], or 1 in place of any.
        batch, head, row: strides in elements, 0 for an axis of 1.
        align: divides the strides: how wide a load may be.
        of_rows, of_keys: it has more than one row, more than one key.
        boxes: TMA descriptor of the entries.
        adds: batch elements share the gradient, and a kernel adds each one's part.
    """

    entries: Any = None
    batch: Any = None
    head: Any = None
    row: Any = None
    align: Any = None
    of_rows: Any = None
    of_keys: Any = None
    boxes: Any = None
    adds: Any = None


class Terms(NamedTuple):
    """Hold what is added to scores, and dropout's operands; None for what a problem lacks.

    Kernels compare single attributes: Triton 3.6 cannot compare a tuple that holds None.

    Attributes:
        relative: [Hq, 2R + 1], with radius R.
        slopes: [Hq] or [B, Hq] float32; for packed sequences [Hq] or [N, Hq].
        seed: of dropout, as `twin_attention.contract.dropout.dropout_weights` has it.
        dbias: the bias's gradient, if a kernel stores it.
        drelative: [Hq, 2R + 1] float32, the table's gradient, if a kernel adds to it.
        rest: `softmax.rest_of_lse` of a forward, shaped as lse.
        rest2: the same in base 2, for a backward, shaped as lse2.
        of_batch: from one batch element's slopes to the next's, or 0.
        count: batch elements with slopes.
        falling: no query sees a key after it.
        of_part: the seed has the first batch element and head.
    """

    relative: Any = None
    slopes: Any = None
    seed: Any = None
    bias: Bias = Bias()
    dbias: Bias = Bias()
    drelative: Any = None
    rest: Any = None
    rest2: Any = None
    radius: Any = None
    of_batch: Any = None
    count: Any = None
    dropout: Any = None
    falling: Any = None
    of_part: Any = None


class DecodeTerms(NamedTuple):
    """Numbers of the query heads of a decode, each None if a problem lacks it.

    Attributes:
        sinks: [Hq] float32.
        slopes: [Hq] or [B, Hq] float32.
        of_batch: from one sequence's slopes to the next's, or 0.
    """

    sinks: Any = None
    slopes: Any = None
    of_batch: Any = None


@triton.jit
def load_slopes(terms, batch, head, is_row):
    """Return the slope of each row of a sequence; None without slopes."""
    slope = None
    if terms.slopes is not None:
        slope = tl.load(terms.slopes + batch * terms.of_batch + head, mask=is_row, other=0.0)
        slope = round_steep(slope)
    return slope


@triton.jit
def penalties(slope, position, key):
    """Return what is added to a decode's scores, as `added_scores` does."""
    added = None
    if slope is not None:
        distance = tl.abs(key[None, :] - position[:, None]).to(tl.float32)
        added = (-slope[:, None] * distance,)
    return added


@triton.jit
def added_scores(terms, rows, others, MASKED: tl.constexpr, OF_KEYS: tl.constexpr):
    """Return what is added to a tile's scores, in turn, each [BLOCK, BLOCK_OTHER] float32.

    Every kernel adds in this order: another one rounds otherwise beside -1e9. MASKED: the tile has
    nonexistent keys.
    """
    BLOCK: tl.constexpr = rows.rows.shape[0]
    BLOCK_OTHER: tl.constexpr = others.rows.shape[0]
    BLOCK_Q: tl.constexpr = BLOCK_OTHER if OF_KEYS else BLOCK
    BLOCK_KV: tl.constexpr = BLOCK if OF_KEYS else BLOCK_OTHER
    query, key = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_KV)
    if OF_KEYS:
        start_q, start_kv, seq_q, seq_kv = others.start, rows.start, rows.size_other, rows.end
        offset = start_kv + rows.diagonal - start_q
        distance = offset + key[:, None] - query[None, :]
    else:
        start_q, start_kv, seq_q, seq_kv = rows.start, others.start, rows.end, rows.size_other
        offset = start_kv - start_q - rows.diagonal
        distance = offset + key[None, :] - query[:, None]
    element, head = rows.element, others.head
    added = ()
    if terms.slopes is not None:
        place = element * terms.of_batch + head
        slope = tl.load(terms.slopes + place, mask=element < terms.count, other=0.0)
        slope = round_steep(slope)
        added = added + (-slope * tl.abs(distance).to(tl.float32),)  # noqa: RUF005
    if terms.relative is not None:
        row = terms.relative + head.to(tl.int64) * (2 * terms.radius + 1)
        near = _relative_scores(row, terms.radius, offset, distance, BLOCK_Q, BLOCK_KV)
        added = added + (near,)  # noqa: RUF005
    if terms.bias.entries is not None:
        tile = bias_tile(
            terms.bias, element, head, start_q, start_kv, seq_q, BLOCK_Q, BLOCK_KV, OF_KEYS
        )
        if MASKED and terms.bias.of_keys:
            exists = (start_kv + key >= 0) & (start_kv + key < seq_kv)
            exists = exists[:, None] if OF_KEYS else exists[None, :]
            values = tl.load(tile, mask=exists, other=0.0).to(tl.float32)
        else:
            values = tl.load(tile).to(tl.float32)
        values = tl.zeros(distance.shape, tl.float32) + values
        added = added + (values,)  # noqa: RUF005
    return added


@triton.jit
def round_steep(slope):
    """Return a slope; one above STEEP is rounded to 16 bits of mantissa.

    Penalties of up to 256 positions, and sums of two, are then exact. A query then sees only its
    nearest key, and lse stays within its budget.
    """
    rounded = ((slope.to(tl.int32, bitcast=True) + 128) & -256).to(tl.float32, bitcast=True)
    rounded = tl.minimum(tl.maximum(rounded, -STEEPEST), STEEPEST)
    return tl.where(tl.abs(slope) > STEEP, rounded, slope)


@triton.jit
def bias_tile(
    bias, element, head, start_q, start_kv, seq_q, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """Return pointers to a tile of a bias; missing queries get the last's, missing keys past it."""
    query = tl.minimum(start_q + tl.arange(0, BLOCK_Q), seq_q - 1).to(tl.int64)
    key = start_kv + tl.arange(0, BLOCK_KV)
    if TRANSPOSED:
        query, key = query[None, :], key[:, None]
    else:
        query, key = query[:, None], key[None, :]
    first = tl.cast(element, tl.int64) * bias.batch + tl.cast(head, tl.int64) * bias.head
    pointers = bias.entries + tl.multiple_of(first, bias.align)
    if bias.of_rows:
        pointers += query * tl.multiple_of(tl.cast(bias.row, tl.int64), bias.align)
    if bias.of_keys:
        pointers += key
    return pointers


@triton.jit
def store_bias_tile(
    dbias, x, element, head, start_q, start_kv, seq_q, seq_kv, BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):  # fmt: skip
    tile = bias_tile(dbias, element, head, start_q, start_kv, seq_q, BLOCK_Q, BLOCK_KV)
    x = x.to(dbias.entries.dtype.element_ty)
    # Stores without a mask are wide.
    if (start_q + BLOCK_Q <= seq_q) & (start_kv + BLOCK_KV <= seq_kv):
        tl.store(tile, x)
    else:
        query, key = start_q + tl.arange(0, BLOCK_Q), start_kv + tl.arange(0, BLOCK_KV)
        tl.store(tile, x, mask=(query < seq_q)[:, None] & (key < seq_kv)[None, :])


@triton.jit
def _relative_scores(row, radius, offset, distance, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    added = tl.zeros(distance.shape, tl.float32)
    # Far off the diagonal, all distances share an entry.
    if (offset - BLOCK_Q + 1 >= radius) | (offset + BLOCK_KV - 1 <= -radius):
        one = tl.minimum(tl.maximum(offset, -radius), radius) + radius
        added += tl.load(row + one).to(tl.float32)
    else:
        place = tl.minimum(tl.maximum(distance, -radius), radius) + radius
        added += tl.load(row + place).to(tl.float32)
    return added


def terms_of(operands: AttentionOperands[Tensor], spec: AttentionSpec) -> Terms:
    if not isinstance(operands, FlashOperands | VarlenOperands):
        return Terms()
    given = operands.relative_bias, operands.alibi_slopes
    seed = None if spec.dropout is None else operands.dropout_seed
    bias = operands.bias if isinstance(operands, FlashOperands) else None
    return Terms(*(None if x is None else x.contiguous() for x in given), seed, Bias(bias))


def added_gradient(terms: Terms, spec: AttentionSpec) -> Tensor | None:
    """Return zeros for a table's gradient, or None."""
    if terms.relative is None or "relative_bias" in spec.frozen:
        return None
    return terms.relative.new_zeros(terms.relative.shape, dtype=torch.float32)


def stored_gradient(bias: Bias, spec: AttentionSpec) -> Bias:
    """Return an empty bias gradient to store; none if several pairs share a value."""
    if bias.entries is None or "bias" in spec.frozen or shares_values(bias.entries.shape, spec):
        return Bias()
    values = bias.entries.new_empty(bias.entries.shape)
    hides = spec.window != Window() or spec.segmented or spec.tree
    return Bias(values.zero_() if hides else values)


def shared_gradient(bias: Bias, q: Tensor, spec: AttentionSpec) -> Bias:
    """Return a zero bias gradient, to which TMA adds, or none."""
    own = (1, spec.heads_q, spec.seq_q, spec.seq_kv)
    if bias.entries is None or "bias" in spec.frozen:
        return Bias()
    if tuple(bias.entries.shape) != own or 1 in own[2:]:
        return Bias()
    if not 1 < spec.batch <= MOST_SHARING or not is_multiplied(bias, q):
        return Bias()
    return Bias(bias.entries.new_empty(own).zero_())


def is_multiplied(dbias: Bias, q: Tensor) -> bool:
    """Return True if a bias' gradient, if any, has q's dtype, and rows that TMA stores."""
    values = dbias.entries
    if values is None:
        return True
    return values.dtype == q.dtype and values.shape[3] * values.itemsize % 16 == 0


def shares_values(shape: tuple[int, ...], spec: AttentionSpec) -> bool:
    """Return True if pairs share a value of a bias, or there is only one query or key."""
    whole = spec.batch, spec.heads_q, spec.seq_q, spec.seq_kv
    return tuple(shape) != whole or 1 in whole[2:]


def with_stride(terms: DecodeTerms) -> DecodeTerms:
    slopes = terms.slopes
    of_batch = slopes.strides[0] if slopes is not None and len(slopes.shape) == 2 else 0
    return terms._replace(of_batch=None if slopes is None else of_batch)


def terms_argument(call: KernelCall) -> dict[str, Any]:
    terms, spec = call.layouts[-2], call.spec
    radius = of_batch = count = None
    if terms.relative is not None:
        radius = terms.relative.shape[1] // 2
    if terms.slopes is not None:
        is_own = len(terms.slopes.shape) == 2
        # Triton 3.6 loses inner tuples' constants if the outer tuple has none: this is one.
        of_batch = tl.constexpr(spec.heads_q if is_own else 0)
        batch = spec.num_sequences if isinstance(spec, VarlenSpec) else spec.batch
        # The padding's sequence has no slopes.
        count = batch if is_own else batch + 1
    terms = terms._replace(bias=with_strides(terms.bias), dbias=with_strides(terms.dbias))
    numbers = {"radius": radius, "of_batch": of_batch, "count": count, "dropout": spec.dropout}
    falling = tl.constexpr(spec.bounded_window.right == 0 and not spec.ranges)
    of_part = tl.constexpr(terms.seed is not None and terms.seed.shape[0] == 4)
    return {"terms": terms._replace(**numbers, falling=falling, of_part=of_part)}


def with_strides(bias: Bias) -> Bias:
    if bias.entries is None:
        return bias
    sizes = zip(bias.entries.shape, bias.entries.strides, strict=True)
    *strides, _ = (stride if size > 1 else 0 for size, stride in sizes)
    _, _, rows, keys = bias.entries.shape
    align = tl.constexpr(math.gcd(16, *strides))
    flags = tl.constexpr(rows > 1), tl.constexpr(keys > 1)
    return Bias(bias.entries, *strides, align, *flags)
