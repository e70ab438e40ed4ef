"""Terms: what is added to scaled scores, before the softcap and the masks.

With d the distance of a key from a query, its position less the query's: ``relative_bias[h, clip(d,
-R, R) + R]`` (Raffel et al. 2020, T5), ``-alibi_slopes[h] * |d|`` (Press et al. 2022, ALiBi).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torch_attn.launch import KernelCall
from twin_attention.contract.operands import AttentionOperands, FlashOperands, VarlenOperands
from twin_attention.contract.spec import VarlenSpec


class Terms(NamedTuple):
    """Operands that are added to scores; None for those that a problem does not have.

    Attributes:
        relative: [Hq, 2R + 1], contiguous.
        slopes: [Hq] or [B, Hq] float32, contiguous; of packed sequences [Hq] or [N, Hq].
        radius: R.
        of_batch: distance of two batch elements' slopes, 0 where they share them.
        count: batch elements with slopes.
    """

    relative: Any
    slopes: Any
    radius: Any = None
    of_batch: Any = None
    count: Any = None


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
    """Return what is added to the scores of a tile, [BLOCK_Q, BLOCK_KV] float32.

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
    added = tl.zeros(distance.shape, tl.float32)
    if terms.relative is not None:
        radius = terms.radius
        row = terms.relative + head.to(tl.int64) * (2 * radius + 1)
        # Most tiles are so far off that all of their distances share an entry.
        if (offset - BLOCK_Q + 1 >= radius) | (offset + BLOCK_KV - 1 <= -radius):
            added += tl.load(row + tl.where(offset > 0, 2 * radius, 0)).to(tl.float32)
        else:
            place = tl.minimum(tl.maximum(distance, -radius), radius) + radius
            added += tl.load(row + place).to(tl.float32)
    if terms.slopes is not None:
        place = element * terms.of_batch + head
        slope = tl.load(terms.slopes + place, mask=element < terms.count, other=0.0)
        added -= slope * tl.abs(distance).to(tl.float32)
    return added


def terms_of(operands: AttentionOperands[Tensor]) -> Terms | None:
    """Return the terms of a problem, without their numbers; None where there are none."""
    if not isinstance(operands, FlashOperands | VarlenOperands):
        return None
    given = operands.relative_bias, operands.alibi_slopes
    if given == (None, None):
        return None
    return Terms(*(None if x is None else x.contiguous() for x in given))


def terms_argument(call: KernelCall) -> dict[str, Any]:
    """Return the terms, which stand before the mask, the last operand, with their numbers."""
    terms, spec = call.layouts[-2], call.spec
    if terms is None:
        return {}
    radius = of_batch = count = 0
    if terms.relative is not None:
        radius = terms.relative.shape[1] // 2
    if terms.slopes is not None:
        is_own = len(terms.slopes.shape) == 2
        of_batch = spec.heads_q if is_own else 0
        batch = spec.num_sequences if isinstance(spec, VarlenSpec) else spec.batch
        # The sequence of padding has no slopes.
        count = batch if is_own else batch + 1
    return {"terms": terms._replace(radius=radius, of_batch=of_batch, count=count)}
