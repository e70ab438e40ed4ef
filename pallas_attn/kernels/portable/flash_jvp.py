"""Flash attention, forward mode: the tangents of out and lse, as in `torch_attn`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_attn.kernels.library.dropout import kept_pairs
from pallas_attn.kernels.library.mask import mask_of_keys, pair_arguments
from pallas_attn.kernels.library.pairs.rows import load_forward_lse, load_own, own_queries
from pallas_attn.kernels.library.pairs.scores import pair_scores, pair_tangents
from pallas_attn.kernels.library.pairs.visits import load_keys, load_values, tiles_of_keys
from pallas_attn.kernels.library.schedule import order_programs
from pallas_attn.kernels.library.scores import dot, round_operand
from pallas_attn.kernels.library.sequences import count_sequence_tiles, with_batch, without_batch
from pallas_attn.kernels.library.softmax import LOG2E, probabilities
from pallas_attn.kernels.library.terms import terms_of
from pallas_attn.kernels.library.tiles import load_tile, store_rows, store_tile
from pallas_attn.launch import launch, of_head, of_mask, of_terms
from twin_attention.contract.operands import FlashOperands, VarlenOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.config import padded_head_dim
from twin_attention.targets.family import Backend


class Tangents(NamedTuple):
    """The tangents of a kernel's operands, shaped as these, or None."""

    q: Any
    k: Any
    v: Any
    sinks: Any


def flash_jvp_kernel(
    q_ref,
    k_ref,
    v_ref,
    sink_ref,
    out_ref,
    lse_ref,
    tangents,
    dterms,
    terms,
    mask,
    dout_ref,
    dlse_ref,
    *,
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
    """One program computes block_q rows of dout and dlse of one query head.

    Operands and grid: as in `flash_fwd_kernel`, whose results are out and lse; `Tangents`, and
    `dterms`, the `Terms` of the terms' tangents; dout [Sq, Dv], dlse [Sq] float32. Loop invariant:
    over the keys so far, acc is Σ p (ds - center) v + Σ p dv, dlse is Σ p (ds - center), and weight
    is Σ p. Accumulation: float32, exponents in base 2, factors of v and dv cast to v's dtype. A row
    that sees no key gives 0, and 0 or its sink's tangent.
    """
    # Locate the tile of queries.
    rows = own_queries(mask, place(pl.program_id(0)), seq_q, seq_kv, block_q)
    start, end = rows.start, rows.end

    # Load the queries and their rows' data; they stay.
    q, dq = load_own(q_ref, rows, rule, head_dim), None
    if tangents.q is not None:
        dq = load_own(tangents.q, rows, rule, head_dim)
    lse2, rest2 = load_forward_lse(lse_ref, terms.rest2, rows)
    acc = jnp.zeros((block_q, padded_head_dim(head_dim_v)), jnp.float32)
    dlse = jnp.zeros((block_q,), jnp.float32)

    # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
    def visit(start_kv, sums, masked):
        dlse, weight, center, acc = sums
        # s = scale · q kᵀ
        k, keys = load_keys(k_ref, mask, rows, start_kv, rule, block_kv, head_dim, masked)
        s, dcap = pair_scores(q, k, mask, terms, rule, rows, keys, window, masked)
        # p = exp(s - lse)
        p = probabilities(s, lse2, rest2, rule.exp2_scale)
        # ds = (scale · (dq kᵀ + q dkᵀ) + dbias) ∘ dcap
        dk = None
        if tangents.k is not None:
            dk = load_values(tangents.k, rows, keys, rule, head_dim, masked)
        ds = pair_tangents(q, k, dq, dk, dterms, rule, rows, keys, masked) * dcap
        # dlse += Σ p ds, without the center
        ds, weight, center = _centered(p, ds, weight, center)
        dlse = dlse + jnp.sum(p * ds, 1)
        # acc += (p ∘ ds) v + p dv
        p = p * kept_pairs(terms, dropout, rows, keys)
        v = load_values(v_ref, rows, keys, rule, head_dim_v, masked)
        dp = round_operand((p * ds).astype(v.dtype), rule.precision)
        acc = acc + dot(dp, v, rule.precision)
        if tangents.v is not None:
            dv = load_values(tangents.v, rows, keys, rule, head_dim_v, masked)
            p = round_operand(p.astype(v.dtype), rule.precision)
            acc = acc + dot(p, dv, rule.precision)
        return dlse, weight, center, acc

    visits = tiles_of_keys(mask, rows, window, block_kv, list_tile)
    dlse, _, center, acc = visits.walk(visit, (dlse, dlse, dlse, acc))

    # Add the sink, and store.
    if sink_ref is not None:
        sink = jnp.full((block_q, 1), sink_ref[...])
        dsink = 0.0 if tangents.sinks is None else tangents.sinks[...]
        p_sink = jnp.sum(probabilities(sink, lse2, rest2, LOG2E), 1)
        dlse = dlse + p_sink * (dsink - center)
    out = load_tile(out_ref, start, end, block_q, head_dim_v, True)
    acc = acc - dlse[:, None] * out.astype(jnp.float32)
    store_tile(dout_ref, acc, start, end, block_q, head_dim_v)
    store_rows(dlse_ref, dlse + center, start, end, block_q)


def _centered(p, ds, weight, center):
    """Return ds without the center, which is the mean over the first tile with a visible key."""
    ds = jnp.where(p == 0.0, 0.0, ds)  # what is added to a hidden pair may be NaN
    total = jnp.sum(p, 1)
    mean = jnp.sum(p * ds, 1) / jnp.where(total == 0.0, 1.0, total)
    center = jnp.where(weight == 0.0, mean, center)
    return ds - center[:, None], weight + total, center


def flash_jvp(
    tangents: FlashOperands[Array | None] | VarlenOperands[Array | None],
    operands: FlashOperands[Array] | VarlenOperands[Array],
    out: Array,
    lse: Array,
    rest: Array | None,
    spec: AttentionSpec,
    backend: Backend,
) -> tuple[Array, ...]:
    """Return dout [B, Sq, Hq, Dv] in q's dtype and dlse [B, Hq, Sq] float32.

    `out`, `lse` and `rest` are the forward's. Packed sequences have no batch axis.
    """
    dq, dk, dv, q, k, v, out, lse, rest = with_batch(
        spec, *tangents[:3], *operands[:3], out, lse, rest
    )
    mask, group = mask_of_keys(operands, spec), spec.group_size
    dterms, terms = terms_of(tangents, spec), terms_of(operands, spec)._replace(rest2=rest)
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, lse))

    def grid(config):
        tiles = count_sequence_tiles(spec.seq_q, mask.offsets.num_sequences, config.block_q)
        return tiles, spec.heads_q, spec.batch

    found = launch(
        "flash_jvp",
        flash_jvp_kernel,
        grid,
        (
            *(q, k, v, operands.sinks, out, lse),
            *(Tangents(dq, dk, dv, tangents.sinks), dterms, terms, mask),
        ),
        (
            of_head(q),
            of_head(k, group),
            of_head(v, group),
            *map(of_head, (operands.sinks, out, lse)),
            Tangents(of_head(dq), of_head(dk, group), of_head(dv, group), of_head(tangents.sinks)),
            of_terms(dterms),
            of_terms(terms),
            of_mask(mask),
        ),
        results,
        tuple(map(of_head, results)),
        pair_arguments(spec, backend.interpreted),
        spec,
        backend,
        order=order_programs(spec, backend, "block_q", spec.head_dim_v),
    )
    return without_batch(spec, *found)
