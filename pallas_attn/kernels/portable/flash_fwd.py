"""Flash attention, forward."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_attn.kernels.library.dropout import kept_pairs
from pallas_attn.kernels.library.mask import mask_of_keys, pair_arguments
from pallas_attn.kernels.library.pairs.rows import load_own, own_queries
from pallas_attn.kernels.library.pairs.scores import pair_scores
from pallas_attn.kernels.library.pairs.visits import load_keys, load_values, tiles_of_keys
from pallas_attn.kernels.library.schedule import order_programs
from pallas_attn.kernels.library.scores import dot, round_operand
from pallas_attn.kernels.library.sequences import count_sequence_tiles, with_batch, without_batch
from pallas_attn.kernels.library.softmax import (
    LN2,
    LOG2E,
    add_sink,
    online_softmax_update,
    rest_of_lse,
    row_statistics,
)
from pallas_attn.kernels.library.terms import adds_terms, terms_of
from pallas_attn.kernels.library.tiles import load_rows, load_tile, store_rows, store_tile
from pallas_attn.launch import launch, of_head, of_mask, of_terms
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.config import padded_head_dim
from twin_attention.targets.family import Backend


class Result(NamedTuple):
    """A result over some of the keys: out [B, Sq, Hq, Dv] and lse [B, Hq, Sq], float32."""

    out: Any
    lse: Any


def flash_fwd_kernel(
    q_ref,
    k_ref,
    v_ref,
    sink_ref,
    terms,
    mask,
    carry,
    out_ref,
    lse_ref,
    *more,
    place,
    seq_q,
    seq_kv,
    rule,
    window,
    dropout,
    head_dim,
    head_dim_v,
    list_tile,
    block_q,
    block_kv,
):
    """One program computes block_q rows of one query head.

    Operands, of this program's batch and head: q [Sq, D], k [Skv, D], v [Skv, Dv], the head's sink
    [] float32 or None, out [Sq, Dv], lse [Sq] (float32, natural log); then, as lse, `rest_of_lse`
    if there are terms, and each row's largest score if it is asked for. Grid: (query tiles · heads
    · batch), or `count_sequence_tiles` of queries.

    Args:
        carry: out in float32 and lse of a result over other keys; or None.
        place: returns a program's tile, head and batch element, from its number.
        list_tile: queries and keys of a block mask's tile, multiples of block_q and block_kv; or
            None.
    """
    added_to = adds_terms(terms)
    row_max_ref = more[-1] if len(more) > added_to else None
    # Locate the tile of queries.
    rows = own_queries(mask, place(pl.program_id(0)), seq_q, seq_kv, block_q)
    start, end = rows.start, rows.end

    # Load the queries; they stay.
    q = load_own(q_ref, rows, rule, head_dim)
    m_i = jnp.full((block_q,), float("-inf"), jnp.float32)
    l_i = jnp.zeros((block_q,), jnp.float32)
    if sink_ref is not None and row_max_ref is None:
        # Include the sink in the maximum from the start, so that acc is not rescaled for it at the
        # end.
        m_i = jnp.maximum(m_i, sink_ref[...] * (1.0 if added_to else LOG2E))
    acc = jnp.zeros((block_q, padded_head_dim(head_dim_v)), jnp.float32)
    if carry is not None:
        m_carry = load_rows(carry.lse, start, end, block_q, float("-inf")) * LOG2E
        m_i = jnp.maximum(m_i, m_carry)
        l_i = jnp.where(m_carry == float("-inf"), 0.0, 1.0)
        acc = load_tile(carry.out, start, end, block_q, head_dim_v, True)

    # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
    def visit(start_kv, softmax, masked):
        m_i, l_i, acc = softmax
        # s = scale · q kᵀ
        k, keys = load_keys(k_ref, mask, rows, start_kv, rule, block_kv, head_dim, masked)
        s, _ = pair_scores(q, k, mask, terms, rule, rows, keys, window, masked)
        # p = exp(s - max), and rescale what was accumulated
        p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, rule.exp2_scale, added_to)
        acc = acc * alpha[:, None]
        p = p * kept_pairs(terms, dropout, rows, keys)
        # acc += p v
        v = load_values(v_ref, rows, keys, rule, head_dim_v, masked)
        p = round_operand(p.astype(v.dtype), rule.precision)
        acc = acc + dot(p, v, rule.precision)
        return m_i, l_i, acc

    visits = tiles_of_keys(mask, rows, window, block_kv, list_tile)
    m_i, l_i, acc = visits.walk(visit, (m_i, l_i, acc))

    # Normalise and store.
    if row_max_ref is not None:
        store_rows(row_max_ref, m_i * (1.0 if added_to else LN2), start, end, block_q)
    if sink_ref is not None:
        alpha, m_i, l_i = add_sink(sink_ref[...], m_i, l_i, not added_to)
        if row_max_ref is not None:
            acc = acc * alpha[:, None]
    l_safe, lse = row_statistics(m_i, l_i, not added_to)
    if added_to:
        store_rows(more[0], rest_of_lse(lse, m_i, l_safe), start, end, block_q)
    store_tile(out_ref, acc / l_safe[:, None], start, end, block_q, head_dim_v)
    store_rows(lse_ref, lse, start, end, block_q)


def flash_fwd(
    operands: AttentionOperands[Array], spec: AttentionSpec, backend: Backend
) -> tuple[Array, ...]:
    """Return out, lse, then `rest_of_lse` with terms, and the largest scores if asked for."""
    return without_batch(spec, *launch_forward(operands, None, spec, backend))


def launch_forward(
    operands: AttentionOperands[Array], carry: Result | None, spec: AttentionSpec, backend: Backend
) -> tuple[Array, ...]:
    """Call `flash_fwd_kernel` with a batch axis; out, float32, and lse reuse a carry's memory."""
    q, k, v = with_batch(spec, operands.q, operands.k, operands.v)
    sinks, group = operands.sinks, spec.group_size
    mask = mask_of_keys(operands, spec)
    dtype = q.dtype if carry is None else jnp.float32
    out = jax.ShapeDtypeStruct((*q.shape[:3], spec.head_dim_v), dtype)
    lse = jax.ShapeDtypeStruct((spec.batch, spec.heads_q, spec.seq_q), jnp.float32)
    results = (out, lse, *[lse] * (bool(spec.terms) + spec.row_max))
    terms = terms_of(operands, spec)
    before = (q, k, v, sinks, terms, mask)
    first = len(jax.tree.leaves(before))

    def grid(config):
        tiles = count_sequence_tiles(spec.seq_q, mask.offsets.num_sequences, config.block_q)
        return tiles, spec.heads_q, spec.batch

    return launch(
        "flash_fwd",
        flash_fwd_kernel,
        grid,
        (*before, carry),
        (
            of_head(q),
            of_head(k, group),
            of_head(v, group),
            of_head(sinks),
            of_terms(terms),
            of_mask(mask),
            None if carry is None else Result(*map(of_head, carry)),
        ),
        results,
        tuple(map(of_head, results)),
        pair_arguments(spec, backend.interpreted),
        spec,
        backend,
        aliases=None if carry is None else {first: 0, first + 1: 1},
        order=order_programs(spec, backend, "block_q", spec.head_dim_v),
    )
