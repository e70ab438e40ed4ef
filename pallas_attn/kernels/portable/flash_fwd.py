"""Flash attention, forward.

``out = softmax(mask(softcap(scale · q kᵀ))) v`` and ``lse = log Σ exp``, one pass over the keys.
Dao 2023, FlashAttention-2, algorithm 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_attn.kernels.library.block_mask import list_arguments
from pallas_attn.kernels.library.dropout import dropout_weights
from pallas_attn.kernels.library.intervals import in_interval, load_intervals
from pallas_attn.kernels.library.mask import find_visits, mask_of_keys
from pallas_attn.kernels.library.schedule import order_programs
from pallas_attn.kernels.library.scores import dot, round_operand, visible_scores
from pallas_attn.kernels.library.segments import STAYS, VISITED, load_segments
from pallas_attn.kernels.library.sequences import (
    count_sequence_tiles,
    locate_tile,
    with_batch,
    without_batch,
)
from pallas_attn.kernels.library.softmax import (
    LN2,
    LOG2E,
    add_sink,
    online_softmax_update,
    rest_of_lse,
    row_statistics,
)
from pallas_attn.kernels.library.terms import added_scores, adds_terms, terms_of
from pallas_attn.kernels.library.tiles import (
    arange,
    load_rows,
    load_tile,
    rows_from,
    store_rows,
    store_tile,
)
from pallas_attn.kernels.library.tree import find_runs, in_branch
from pallas_attn.launch import flash_arguments, launch, of_head, of_mask, of_terms
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
    tile_q,
    tile_kv,
    block_q,
    block_kv,
):
    """One program computes block_q rows of one query head.

    Operands, of this program's batch and head: q [Sq, D], k [Skv, D], v [Skv, Dv], the head's sink
    [] float32 or None, out [Sq, Dv], lse [Sq] (float32, natural log); then, as lse, `rest_of_lse`
    if there are terms, and each row's largest score if it is asked for. Query i stands at key
    position i + Skv - Sq; rule:
    `twin_attention.contract.spec.ScoreRule`. Grid: (query tiles · heads · batch), in the order of
    `longest_first`; place: returns a program's tile, head and batch element, from its number. Loop
    invariant: `online_softmax_update`. Accumulation: float32, exponents in base 2, p cast to v's
    dtype for p·v. A row that sees no key gives 0, and -inf or its sink. block_q and block_kv are
    powers of two, at least 16.

    Terms that are added to the scores, of this program's head: `Terms`. dropout: `DropoutRule` or
    None.

    carry: out in float32 and lse of a result over other keys, to which these keys are added; or
    None.

    Packed sequences: `Offsets`. Sq and Skv count all tokens, and the grid has
    `count_sequence_tiles` of queries. Segment ids, of this program's batch: `Segments`, with the
    ranges of the keys' ids. Block mask, of this program's batch and head: the `lists_of_keys`,
    counts [1, tiles] and tiles [1, tiles, width], and a tile of tile_q by tile_kv, multiples of
    block_q and block_kv. Ends of keys, of this batch element: `Tree` and `Depths`. Operands that a
    problem lacks are None.
    """
    offsets, segments, lists, tree, depths, intervals = mask
    added_to = adds_terms(terms)
    row_max_ref = more[-1] if len(more) > added_to else None
    # Locate the tile of queries.
    tile, head, batch = place(pl.program_id(0))
    # Queries are counted from the first of all sequences, keys from the sequence's first.
    sequence, first_q, start_q, seq_q, first_kv, seq_kv = locate_tile(
        *offsets, tile, seq_q, seq_kv, block_q
    )
    element = batch if offsets.cu_seqlens_q is None else sequence
    diagonal = seq_kv - seq_q
    k_ref, v_ref = rows_from(k_ref, first_kv), rows_from(v_ref, first_kv)

    # Load the queries; they stay.
    segment_q, is_query = load_segments(segments.q_ids, start_q, seq_q, block_q, STAYS)
    q = load_tile(q_ref, start_q, seq_q, block_q, head_dim, True, is_query)
    q = round_operand(q, rule.precision)
    rows = start_q + arange(block_q)
    position = rows + diagonal
    begins, ends = load_intervals(intervals, start_q, seq_q, block_q)
    m_i = jnp.full((block_q,), float("-inf"), jnp.float32)
    l_i = jnp.zeros((block_q,), jnp.float32)
    if sink_ref is not None and row_max_ref is None:
        # Include the sink in the maximum from the start, so that acc is not rescaled for it at the
        # end.
        m_i = jnp.maximum(m_i, sink_ref[...] * (1.0 if added_to else LOG2E))
    acc = jnp.zeros((block_q, padded_head_dim(head_dim_v)), jnp.float32)
    if carry is not None:
        m_carry = load_rows(carry.lse, start_q, seq_q, block_q, float("-inf")) * LOG2E
        m_i = jnp.maximum(m_i, m_carry)
        l_i = jnp.where(m_carry == float("-inf"), 0.0, 1.0)
        acc = load_tile(carry.out, start_q, seq_q, block_q, head_dim_v, True)

    # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
    visits = find_visits(
        start_q, seq_q, seq_kv, diagonal, window.left, window.right, block_q, block_kv, segment_q,
        segments, begins, ends,
    )  # fmt: skip
    if lists.tiles is not None:
        visits = visits.keep(lists, 0, start_q // tile_q, tile_kv)
    runs = find_runs(
        tree, depths, 0, start_q, seq_q, first_kv, seq_kv, diagonal, visits.visible, block_q,
        block_kv,
    )  # fmt: skip
    visits = visits._replace(runs=runs)
    for masked in (False, True):

        def visit(index, carry, masked=masked):
            start_kv = visits.start(index, masked)
            m_i, l_i, acc = carry
            # s = scale · q kᵀ
            segment_kv, is_key = load_segments(segments.kv_ids, start_kv, seq_kv, block_kv, VISITED)
            k = load_tile(k_ref, start_kv, seq_kv, block_kv, head_dim, masked, is_key)
            k = round_operand(k, rule.precision)
            key = start_kv + arange(block_kv)
            seen = in_branch(
                tree, depths, 0, rows[:, None], seq_q, first_kv, key[None, :], seq_kv,
                position[:, None],
            )  # fmt: skip
            if begins is not None:
                seen = in_interval(begins, ends, key)
            offset = start_kv - start_q - diagonal
            added = added_scores(
                terms, sequence, offset, start_q, start_kv, seq_q, seq_kv, block_q, block_kv, masked
            )
            s, _ = visible_scores(
                q, k, position[:, None], key[None, :], seq_kv, rule, window, masked,
                segment_q, segment_kv, seen, added,
            )  # fmt: skip
            # p = exp(s - max), and rescale what was accumulated
            p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, rule.exp2_scale, added_to)
            acc = acc * alpha[:, None]
            kept = dropout_weights(
                terms, dropout, element, head, start_q - first_q, start_kv, block_q, block_kv
            )
            if kept is not None:
                p = p * kept
            # acc += p v
            v = load_tile(v_ref, start_kv, seq_kv, block_kv, head_dim_v, masked, is_key)
            v = round_operand(v, rule.precision)
            p = round_operand(p.astype(v.dtype), rule.precision)
            acc = acc + dot(p, v, rule.precision)
            return m_i, l_i, acc

        m_i, l_i, acc = visits.walk(masked, visit, (m_i, l_i, acc))

    # Normalise and store.
    if row_max_ref is not None:
        store_rows(row_max_ref, m_i * (1.0 if added_to else LN2), start_q, seq_q, block_q)
    if sink_ref is not None:
        alpha, m_i, l_i = add_sink(sink_ref[...], m_i, l_i, not added_to)
        if row_max_ref is not None:
            acc = acc * alpha[:, None]
    l_safe, lse = row_statistics(m_i, l_i, not added_to)
    if added_to:
        store_rows(more[0], rest_of_lse(lse, m_i, l_safe), start_q, seq_q, block_q)
    out = acc / l_safe[:, None]
    store_tile(out_ref, out, start_q, seq_q, block_q, head_dim_v)
    store_rows(lse_ref, lse, start_q, seq_q, block_q)


def flash_fwd(
    operands: AttentionOperands[Array], spec: AttentionSpec, backend: Backend
) -> tuple[Array, ...]:
    """Call `flash_fwd_kernel`.

    Returns:
        out [B, Sq, Hq, Dv] in q's dtype and lse [B, Hq, Sq] float32; then, shaped as lse,
        `rest_of_lse` if there are terms, and each row's largest score if the problem asks for it;
        without B for packed sequences.
    """
    return without_batch(spec, *launch_forward(operands, None, spec, backend))


def launch_forward(
    operands: AttentionOperands[Array],
    carry: Result | None,
    spec: AttentionSpec,
    backend: Backend,
) -> tuple[Array, ...]:
    """Call `flash_fwd_kernel`; its results have a batch axis.

    With a carry, out and lse reuse its memory, and out is float32.
    """
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
        flash_arguments(spec, backend.interpreted)
        | list_arguments(spec)
        | {"dropout": spec.dropout},
        spec,
        backend,
        aliases=None if carry is None else {first: 0, first + 1: 1},
        order=order_programs(spec, backend, "block_q", spec.head_dim_v),
    )
