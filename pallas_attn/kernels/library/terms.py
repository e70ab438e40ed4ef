"""Terms: what is added to scaled scores, before the softcap and the masks, and dropout.

With d the distance of a key from a query, its position less the query's: ``relative_bias[h, clip(d,
-R, R) + R]`` (Raffel et al. 2020, T5), ``-alibi_slopes[h] * |d|`` (Press et al. 2022, ALiBi).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_attn.kernels.library.tiles import arange
from twin_attention.contract.operands import AttentionOperands, FlashOperands, VarlenOperands
from twin_attention.contract.spec import AttentionSpec


class Terms(NamedTuple):
    """Operands that are added to scores, and those of dropout; None for what a problem lacks.

    Attributes:
        relative: [Hq, 2R + 1].
        slopes: [Hq] or [B, Hq] float32; of packed sequences [Hq] or [N, Hq].
        seed: of dropout, [2] int32 or uint32.
    """

    relative: Any = None
    slopes: Any = None
    seed: Any = None


NO_TERMS = Terms()


def added_scores(terms, element, offset, block_q, block_kv, member=None, transposed=False):
    """Return what is added to the scores of a tile, [block_q, block_kv] float32; None for nothing.

    Args:
        terms: `Terms` of a head, relative [2R + 1] and slopes [] or, of packed sequences, [N]; or
            of all heads of a group, which come first.
        element: the packed sequence, which may be that of padding; any number of a dense batch.
        offset: distance of the tile's first key from its first query.
        block_q, block_kv: sizes of the tile.
        member: the head of a group; None for terms of one head.
        transposed: the tile has keys down and queries across.
    """
    if terms.relative is None and terms.slopes is None:
        return None
    query, key = arange(block_q), arange(block_kv)
    if transposed:
        distance = offset + key[:, None] - query[None, :]
    else:
        distance = offset + key[None, :] - query[:, None]
    added = jnp.zeros(distance.shape, jnp.float32)
    head = () if member is None else (member,)
    if terms.relative is not None:
        radius = terms.relative.shape[-1] // 2

        def load_one():
            # No `jnp.where` of two literals: jax 0.11.2 makes them booleans on a GPU.
            place = jnp.minimum(jnp.maximum(offset, -radius), radius) + radius
            value = terms.relative[(*head, place)]
            return added + value.astype(jnp.float32)

        def load_all():
            place = jnp.minimum(jnp.maximum(distance, -radius), radius) + radius
            heads = tuple(jnp.broadcast_to(x, place.shape) for x in head)
            return plt.load(terms.relative.at[(*heads, place)]).astype(jnp.float32)

        # Most tiles are so far off that all of their distances share an entry.
        is_far = (offset - block_q + 1 >= radius) | (offset + block_kv - 1 <= -radius)
        added = lax.cond(is_far, load_one, load_all)
    if terms.slopes is not None:
        place = head
        if len(terms.slopes.shape) > len(head):  # one of each sequence
            place = (*head, jnp.where(element < terms.slopes.shape[-1], element, 0))
        slope = terms.slopes[place if place else ...]
        added = added - slope * jnp.abs(distance).astype(jnp.float32)
    return added


def terms_of(operands: AttentionOperands[Any], spec: AttentionSpec) -> Terms:
    """Return the terms of a problem."""
    if not isinstance(operands, FlashOperands | VarlenOperands):
        return NO_TERMS
    slopes = operands.alibi_slopes
    if isinstance(operands, VarlenOperands) and slopes is not None and slopes.ndim == 2:
        slopes = slopes.T[None]  # as rows of a batch of one, [1, Hq, N]
    seed = None if spec.dropout is None else operands.dropout_seed
    return Terms(operands.relative_bias, slopes, seed)
