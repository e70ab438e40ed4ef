"""Terms: what is added to the scaled scores before the softcap and the masks; and dropout."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_attn.kernels.library.tiles import arange
from twin_attention.contract.operands import AttentionOperands, FlashOperands, VarlenOperands
from twin_attention.contract.spec import AttentionSpec

# Slopes above the first are rounded, and all are at most the second.
STEEP, STEEPEST = 16.0, 2.0**100


class Terms(NamedTuple):
    """Operands that are added to scores, and dropout's; None for what a problem lacks.

    Attributes:
        slopes: [Hq] or [B, Hq] float32; for packed sequences [Hq] or [N, Hq].
        seed: seed of dropout, as `twin_attention.contract.dropout.dropout_weights` has it.
        bias: [B, Hq, Sq, Skv], or 1 in place of any.
        rest2: as lse2, `softmax.rest_of_lse` in base 2, for a backward.
    """

    relative: Any = None
    slopes: Any = None
    seed: Any = None
    bias: Any = None
    rest2: Any = None


NO_TERMS = Terms()


class DecodeTerms(NamedTuple):
    """Numbers of the query heads: sinks [Hq], slopes [Hq] or [B, Hq], float32, or None."""

    sinks: Any = None
    slopes: Any = None


def load_slopes(terms, head, sequence=None):
    slopes = terms.slopes
    if slopes is None:
        return None
    if len(slopes.shape) == 2:
        head = (jnp.full_like(head, jnp.minimum(sequence, slopes.shape[0] - 1)), head)
    return round_steep(plt.load(slopes.at[head]))


def penalties(slope, position, key):
    if slope is None:
        return []
    distance = jnp.abs(key[None, :] - position[:, None]).astype(jnp.float32)
    return [-slope[:, None] * distance]


def adds_terms(terms: Terms) -> bool:
    return not (terms.relative is None and terms.slopes is None and terms.bias is None)


def added_scores(terms, rows, others, masked, of_keys):
    """Return what is added to a tile's scores, in turn, each [block, block_other] float32.

    terms have relative [2R + 1], slopes [] or, if packed, [N], and bias [Sq or 1, Skv or 1]. For
    several heads these have the heads, or 1, as first axis; a bias of all batch elements has their
    axis before that.
    """
    if not adds_terms(terms):
        return []
    own, other = arange(rows.rows.shape[0])[:, None], arange(others.rows.shape[0])[None, :]
    # Distances of the first key from the first query, and of each key from each query.
    if of_keys:
        member = others.member
        offset = rows.start + rows.diagonal - others.start
        distance = offset + own - other
        block_q, block_kv = other.shape[1], own.shape[0]
    else:
        member = rows.member
        offset = others.start - rows.start - rows.diagonal
        distance = offset + other - own
        block_q, block_kv = own.shape[0], other.shape[1]
    element = rows.element
    added, head = [], () if member is None else (member,)
    if terms.slopes is not None:
        place = head
        if len(terms.slopes.shape) > len(head):  # one of each sequence
            place = (*head, jnp.where(element < terms.slopes.shape[-1], element, 0))
        slope = round_steep(terms.slopes[place if place else ...])
        added.append(-slope * jnp.abs(distance).astype(jnp.float32))
    if terms.relative is not None:
        radius = terms.relative.shape[-1] // 2

        def load_one():
            # No `jnp.where` of two literals: jax 0.11.2 makes them booleans on a GPU.
            place = jnp.minimum(jnp.maximum(offset, -radius), radius) + radius
            value = terms.relative[(*head, place)]
            return jnp.broadcast_to(value.astype(jnp.float32), distance.shape)

        def load_all():
            place = jnp.minimum(jnp.maximum(distance, -radius), radius) + radius
            heads = tuple(jnp.broadcast_to(x, place.shape) for x in head)
            return plt.load(terms.relative.at[(*heads, place)]).astype(jnp.float32)

        # Most tiles are so far off the diagonal that all their distances share an entry.
        is_far = (offset - block_q + 1 >= radius) | (offset + block_kv - 1 <= -radius)
        added.append(lax.cond(is_far, load_one, load_all))
    if terms.bias is not None:
        added.append(_bias_scores(terms.bias, rows, others, member, masked, of_keys))
    return added


def round_steep(slope):
    bits = lax.bitcast_convert_type(slope, jnp.int32)
    rounded = lax.bitcast_convert_type((bits + jnp.int32(128)) & jnp.int32(-256), jnp.float32)
    rounded = jnp.minimum(jnp.maximum(rounded, -STEEPEST), STEEPEST)
    return jnp.where(jnp.abs(slope) > STEEP, rounded, slope)


def _bias_scores(bias, rows, others, member, masked, of_keys):
    *axes, size_q, size_kv = bias.shape
    of_axes = (member,) if member is not None else (rows.element,)
    of_axes = (rows.element, member) if len(axes) == 2 else of_axes
    query = rows.start - rows.first + arange(rows.rows.shape[0])
    key = others.start + arange(others.rows.shape[0])
    seq_q, seq_kv = rows.end - rows.first, rows.size_other
    if of_keys:
        query, key, seq_q, seq_kv = key, query, seq_kv, seq_q
    query, exists = jnp.minimum(query, seq_q - 1), (key >= 0) & (key < seq_kv)
    if masked:
        key = jnp.where(exists, key, 0)
    query, key, exists = (
        x[None, :] if is_across else x[:, None]
        for x, is_across in ((query, of_keys), (key, not of_keys), (exists, not of_keys))
    )
    shape = (rows.rows.shape[0], others.rows.shape[0])
    place = [x if size > 1 else 0 for x, size in zip(of_axes, axes, strict=False)]
    place += [query if size_q > 1 else 0, key if size_kv > 1 else 0]
    place = tuple(jnp.broadcast_to(jnp.int32(x), shape) for x in place)
    if masked and size_kv > 1:
        mask = jnp.broadcast_to(exists, shape)
        return plt.load(bias.at[place], mask=mask, other=0.0).astype(jnp.float32)
    return plt.load(bias.at[place]).astype(jnp.float32)


def store_pairs(ref, x, start_q, start_kv, seq_q, seq_kv):
    block_q, block_kv = x.shape
    query, key = start_q + arange(block_q), start_kv + arange(block_kv)
    exists = (query < seq_q)[:, None] & (key < seq_kv)[None, :]
    place = ref.at[pl.ds(start_q, block_q), pl.ds(start_kv, block_kv)]
    plt.store(place, x.astype(ref.dtype), mask=exists)


def shares_values(shape: tuple[int, ...], spec: AttentionSpec) -> bool:
    whole = spec.batch, spec.heads_q, spec.seq_q, spec.seq_kv
    return tuple(shape) != whole or 1 in whole[2:]


def terms_of(operands: AttentionOperands[Any], spec: AttentionSpec) -> Terms:
    if not isinstance(operands, FlashOperands | VarlenOperands):
        return NO_TERMS
    slopes = operands.alibi_slopes
    if isinstance(operands, VarlenOperands) and slopes is not None and slopes.ndim == 2:
        slopes = slopes.T[None]  # as rows of a batch of one, [1, Hq, N]
    seed = None if spec.dropout is None else operands.dropout_seed
    bias = operands.bias if isinstance(operands, FlashOperands) else None
    return Terms(operands.relative_bias, slopes, seed, bias)
