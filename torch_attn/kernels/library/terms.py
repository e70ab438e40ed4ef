"""Terms: what is added to scaled scores, before the softcap and the masks, and dropout.

With d the distance of a key from a query, its position less the query's: ``relative_bias[h, clip(d,
-R, R) + R]`` (Raffel et al. 2020, T5), ``-alibi_slopes[h] * |d|`` (Press et al. 2022, ALiBi).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torch_attn.launch import KernelCall
from twin_attention.contract.operands import AttentionOperands, FlashOperands, VarlenOperands
from twin_attention.contract.spec import AttentionSpec, VarlenSpec


class Terms(NamedTuple):
    """Operands that are added to scores, and those of dropout; None for what a problem lacks.

    Kernels look at the attributes alone: Triton 3.6 does not compare a tuple that holds None.

    Attributes:
        relative: [Hq, 2R + 1], contiguous.
        slopes: [Hq] or [B, Hq] float32, contiguous; of packed sequences [Hq] or [N, Hq].
        seed: of dropout, [2] int32 or uint32.
        radius: R.
        of_batch: distance of two batch elements' slopes, 0 where they share them.
        count: batch elements with slopes.
        dropout: `twin_attention.contract.dropout.DropoutRule`.
    """

    relative: Any = None
    slopes: Any = None
    seed: Any = None
    radius: Any = None
    of_batch: Any = None
    count: Any = None
    dropout: Any = None


@triton.jit
def added_scores(
    terms,
    element,
    head,
    offset,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
):
    """Return what is added to the scores of a tile, [BLOCK_Q, BLOCK_KV] float32; None for nothing.

    Args:
        terms: `Terms`.
        element: of the batch, or the packed sequence, which may be that of padding.
        head: the query head.
        offset: distance of the tile's first key from its first query.
        TRANSPOSED: the tile has keys down and queries across.
    """
    query, key = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_KV)
    if TRANSPOSED:
        distance = offset + key[:, None] - query[None, :]
    else:
        distance = offset + key[None, :] - query[:, None]
    added = None
    if terms.relative is not None:
        row = terms.relative + head.to(tl.int64) * (2 * terms.radius + 1)
        added = _relative_scores(row, terms.radius, offset, distance, BLOCK_Q, BLOCK_KV)
    if terms.slopes is not None:
        place = element * terms.of_batch + head
        slope = tl.load(terms.slopes + place, mask=element < terms.count, other=0.0)
        falling = -slope * tl.abs(distance).to(tl.float32)
        if terms.relative is not None:
            added += falling
        else:
            added = falling
    return added


@triton.jit
def _relative_scores(row, radius, offset, distance, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Return what a head's row of a table has for some distances."""
    added = tl.zeros(distance.shape, tl.float32)
    # Most tiles are so far off that all of their distances share an entry.
    if (offset - BLOCK_Q + 1 >= radius) | (offset + BLOCK_KV - 1 <= -radius):
        one = tl.minimum(tl.maximum(offset, -radius), radius) + radius
        added += tl.load(row + one).to(tl.float32)
    else:
        place = tl.minimum(tl.maximum(distance, -radius), radius) + radius
        added += tl.load(row + place).to(tl.float32)
    return added


def terms_of(operands: AttentionOperands[Tensor], spec: AttentionSpec) -> Terms:
    """Return the terms of a problem, without their numbers."""
    if not isinstance(operands, FlashOperands | VarlenOperands):
        return Terms()
    given = operands.relative_bias, operands.alibi_slopes
    seed = None if spec.dropout is None else operands.dropout_seed
    return Terms(*(None if x is None else x.contiguous() for x in given), seed)


def terms_argument(call: KernelCall) -> dict[str, Any]:
    """Return the terms, which stand before the mask, the last operand, with their numbers."""
    terms, spec = call.layouts[-2], call.spec
    radius = of_batch = count = None
    if terms.relative is not None:
        radius = terms.relative.shape[1] // 2
    if terms.slopes is not None:
        is_own = len(terms.slopes.shape) == 2
        of_batch = spec.heads_q if is_own else 0
        batch = spec.num_sequences if isinstance(spec, VarlenSpec) else spec.batch
        # The sequence of padding has no slopes.
        count = batch if is_own else batch + 1
    numbers = {"radius": radius, "of_batch": of_batch, "count": count, "dropout": spec.dropout}
    return {"terms": terms._replace(**numbers)}
