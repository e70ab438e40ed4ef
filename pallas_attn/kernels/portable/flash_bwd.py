"""Flash attention, backward: a preprocess of rows, then dq, then dk and dv."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_attn.integers import quotient, remainder
from pallas_attn.kernels.gradients import make_flash_bwd
from pallas_attn.kernels.library.block_mask import num_lists_of_group
from pallas_attn.kernels.library.dropout import kept_pairs
from pallas_attn.kernels.library.mask import pair_arguments
from pallas_attn.kernels.library.pairs.rows import load_own, load_prepared, own_keys, own_queries
from pallas_attn.kernels.library.pairs.scores import pair_scores
from pallas_attn.kernels.library.pairs.visits import (
    load_keys,
    load_queries,
    load_values,
    tiles_of_keys,
    tiles_of_queries,
)
from pallas_attn.kernels.library.schedule import order_programs
from pallas_attn.kernels.library.scores import add_product, as_multiplied, dot, round_operand
from pallas_attn.kernels.library.segments import STAYS, load_segments
from pallas_attn.kernels.library.sequences import count_sequence_tiles, locate_tile
from pallas_attn.kernels.library.softmax import LOG2E, lse_to_subtract, probabilities
from pallas_attn.kernels.library.terms import NO_TERMS, shares_values, store_pairs
from pallas_attn.kernels.library.tiles import ROW_PADDING, load_rows, load_tile, store_tile
from pallas_attn.kernels.portable.flash_bwd_bias import bias_gradient
from pallas_attn.kernels.portable.flash_bwd_terms import relative_gradient
from pallas_attn.launch import (
    launch,
    of_all,
    of_batch,
    of_group,
    of_head,
    of_mask,
    of_pairs,
    of_terms,
)
from twin_attention.targets.config import padded_head_dim


def flash_bwd_preprocess_kernel(
    dout_ref,
    out_ref,
    lse_ref,
    dlse_ref,
    rest_ref,
    cu_seqlens_q_ref,
    q_segment_ids_ref,
    lse2_ref,
    delta_ref,
    rest2_ref=None,
    *,
    seq_q,
    head_dim_v,
    precision,
    block_q,
):
    """Prepare the rows for the other kernels, as `torch_attn.kernels.preprocess` describes.

    Operands, of this program's batch and head: dout and out [Sq, Dv], lse, dlse and rest [Sq] (dlse
    is None for zero, rest without terms); lse2, delta and rest2 [Sq rounded up to ROW_PADDING], all
    float32; q_segment_ids [Sq] int32 or None. Grid: (query tiles, heads, batch).
    """
    # Locate the rows.
    padded = pl.program_id(0) * block_q
    padded_tile = quotient(padded, ROW_PADDING)
    start_q, seq_dout = padded, seq_q
    if cu_seqlens_q_ref is not None:
        # The other axis is the queries as well, where the padding's sequence is empty.
        _sequence, _first_q, start_q, seq_q, first_dout, size_dout = locate_tile(
            cu_seqlens_q_ref, cu_seqlens_q_ref, padded_tile, seq_q, seq_q, ROW_PADDING
        )
        start_q = start_q + remainder(padded, ROW_PADDING)
        seq_dout = first_dout + size_dout

    # delta = rowsum(dout ∘ out) - dlse
    _segment_q, is_query = load_segments(q_segment_ids_ref, start_q, seq_q, block_q, STAYS)
    do = load_tile(dout_ref, start_q, seq_dout, block_q, head_dim_v, True, is_query)
    out = load_tile(out_ref, start_q, seq_q, block_q, head_dim_v, True)
    do = as_multiplied(do, precision)
    delta = jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), 1)
    lse = load_rows(lse_ref, start_q, seq_q, block_q, float("inf"))
    lse2 = lse_to_subtract(lse, in_base_2=rest_ref is None)
    if dlse_ref is not None:
        dlse = load_rows(dlse_ref, start_q, seq_q, block_q, 0.0)
        delta = delta - jnp.where(lse == float("-inf"), 0.0, dlse)

    # Store.
    lse2_ref[pl.ds(padded, block_q)] = lse2
    delta_ref[pl.ds(padded, block_q)] = delta
    if rest_ref is not None:
        rest = load_rows(rest_ref, start_q, seq_q, block_q, 0.0)
        rest2_ref[pl.ds(padded, block_q)] = rest * LOG2E


def flash_bwd_dq_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    terms,
    mask,
    carry_ref,
    dbias_ref,
    dq_ref,
    *stored,
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
    """One program computes block_q rows of dq of one query head.

    Operands, of this program's batch and head: q and dq [Sq, D], k [Skv, D], v [Skv, Dv], dout [Sq,
    Dv], lse2 and delta of `flash_bwd_preprocess_kernel`; the rest as in `flash_fwd_kernel`. carry
    [Sq, D] float32, or None: the gradient through other keys. dbias [Sq, Skv]: the gradient of a
    bias that no two pairs share, which is ds; or None. It is 0 at first, in the memory of the
    result.
    """
    # Locate the tile of queries.
    rows = own_queries(mask, place(pl.program_id(0)), seq_q, seq_kv, block_q)
    start, end = rows.start, rows.end

    # Load the queries and their rows' data; they stay.
    q, do = load_own(q_ref, rows, rule, head_dim), load_own(dout_ref, rows, rule, head_dim_v)
    lse2, rest2, delta = (
        load_prepared(ref, rows.padded, start, block_q)
        for ref in (lse2_ref, terms.rest2, delta_ref)
    )
    dq = jnp.zeros((block_q, padded_head_dim(head_dim)), jnp.float32)

    # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
    def visit(start_kv, dq, masked):
        # s = scale · q kᵀ
        k, keys = load_keys(k_ref, mask, rows, start_kv, rule, block_kv, head_dim, masked)
        s, dcap = pair_scores(q, k, mask, terms, rule, rows, keys, window, masked)
        # p = exp(s - lse)
        p = probabilities(s, lse2, rest2, rule.exp2_scale)
        # dp = dout vᵀ
        v = load_values(v_ref, rows, keys, rule, head_dim_v, masked)
        dp = dot(do, v.T, rule.precision)
        dp = dp * kept_pairs(terms, dropout, rows, keys)
        # ds = p ∘ (dp - delta) ∘ dcap
        ds = p * (dp - delta) * dcap
        for ref in stored:
            store_pairs(ref, ds, start, start_kv, end, rows.size_other)
        # dq += ds k
        ds = round_operand(ds.astype(k.dtype), rule.precision)
        return dq + dot(ds, k, rule.precision)

    visits = tiles_of_keys(mask, rows, window, block_kv, list_tile)
    dq = visits.walk(visit, dq)

    # Scale and store.
    dq = dq * rule.scale
    if carry_ref is not None:
        dq = dq + load_tile(carry_ref, start, end, block_q, head_dim, True)
    store_tile(dq_ref, dq, start, end, block_q, head_dim)


def flash_bwd_dkdv_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    terms,
    mask,
    dk_ref,
    dv_ref,
    *,
    place,
    group_size,
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
    """One program computes block_kv rows of dk and dv of one kv head, summed over its query heads.

    Operands, of this program's batch and kv head: q [Sq, group, D], k and dk [Skv, D], v and dv
    [Skv, Dv], dout [Sq, group, Dv], lse2 and delta [group, padded Sq]; terms of the group's heads.
    Grid: (key tiles · kv heads · batch), `count_sequence_tiles` of keys in packed sequences.
    """
    # Locate the tile of keys.
    rows = own_keys(mask, place(pl.program_id(0)), group_size, seq_q, seq_kv, block_kv)

    # Load the keys and values; they stay.
    k, v = load_own(k_ref, rows, rule, head_dim), load_own(v_ref, rows, rule, head_dim_v)
    dk = jnp.zeros((block_kv, padded_head_dim(head_dim)), jnp.float32)
    dv = jnp.zeros((block_kv, padded_head_dim(head_dim_v)), jnp.float32)

    # Visit the tiles of queries that see these keys; only tiles at the edges are masked.
    def visit(member, start_q, sums, masked):
        dk, dv = sums
        # sᵀ = scale · k qᵀ
        q, queries = load_queries(
            q_ref, mask, rows, member, start_q, rule, block_q, head_dim, masked
        )
        s, dcap = pair_scores(k, q, mask, terms, rule, rows, queries, window, masked, True)
        # pᵀ = exp(sᵀ - lse)
        own = rows.padded, start_q, block_q, member, True
        lse2, rest2 = (load_prepared(ref, *own) for ref in (lse2_ref, terms.rest2))
        p = probabilities(s, lse2, rest2, rule.exp2_scale)
        # dpᵀ = v doutᵀ
        do = load_values(dout_ref, rows, queries, rule, head_dim_v, masked)
        dp = dot(v, do.T, rule.precision)
        kept = kept_pairs(terms, dropout, rows, queries, True)
        # dv += pᵀ dout
        kept_p = round_operand((p * kept).astype(do.dtype), rule.precision)
        dv = add_product(dv, kept_p, do, rule.precision)
        # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
        ds = p * (dp * kept - load_prepared(delta_ref, *own)) * dcap
        # dk += dsᵀ q
        ds = round_operand(ds.astype(q.dtype), rule.precision)
        dk = add_product(dk, ds, q, rule.precision)
        return dk, dv

    visits = tiles_of_queries(mask, rows, window, block_q, list_tile, group_size)
    dk, dv = visits.walk(visit, (dk, dv))

    # Scale and store.
    store_tile(dk_ref, dk * rule.scale, rows.start, rows.end, block_kv, head_dim)
    store_tile(dv_ref, dv, rows.start, rows.end, block_kv, head_dim_v)


def launch_preprocess(sources, spec, backend, mask):
    *_, dout, out, lse, dlse, rest = sources
    offsets, segments = mask.offsets, mask.segments
    num_rows = count_sequence_tiles(spec.seq_q, offsets.num_sequences, ROW_PADDING) * ROW_PADDING
    rows = jax.ShapeDtypeStruct((*lse.shape[:2], num_rows), jnp.float32)
    operands = (dout, out, lse, dlse, rest)
    results = [rows] * (2 if rest is None else 3)
    return launch(
        "flash_bwd_preprocess",
        flash_bwd_preprocess_kernel,
        lambda config: (num_rows // config.block_q, spec.heads_q, spec.batch),
        (*operands, offsets.cu_seqlens_q, segments.q_ids),
        (*map(of_head, operands), of_all(offsets.cu_seqlens_q), of_batch(segments.q_ids)),
        tuple(results),
        tuple(map(of_head, results)),
        {
            "seq_q": spec.seq_q,
            "head_dim_v": spec.head_dim_v,
            # The interpreter's products are in IEEE float32.
            "precision": "ieee" if backend.interpreted else spec.precision,
        },
        spec,
        backend,
    )


def launch_dq(inputs, spec, backend, mask, carry=None, terms=NO_TERMS):
    """Return dq, in the memory and dtype of a `carry`, and the bias' gradient if it is stored."""
    q, k, v, *of_rows = inputs
    before = (*inputs, terms, mask)
    dbias = None
    bias = None if "bias" in spec.frozen else terms.bias
    if bias is not None and not shares_values(bias.shape, spec):
        dbias = jnp.zeros(bias.shape, bias.dtype)
    dtype = q.dtype if carry is None else carry.dtype
    results = [(jax.ShapeDtypeStruct(q.shape, dtype), of_head(q))]
    aliases = {} if carry is None else {len(jax.tree.leaves(before)): 0}
    if dbias is not None:
        aliases[len(jax.tree.leaves((*before, carry)))] = 1
        results.append((jax.ShapeDtypeStruct(dbias.shape, dbias.dtype), of_pairs(dbias)))
    out_shape, out_specs = zip(*results, strict=True)

    def grid(config):
        tiles = count_sequence_tiles(spec.seq_q, mask.offsets.num_sequences, config.block_q)
        return tiles, spec.heads_q, spec.batch

    found = launch(
        "flash_bwd_dq",
        flash_bwd_dq_kernel,
        grid,
        (*before, carry, dbias),
        (
            of_head(q),
            *(of_head(x, spec.group_size) for x in (k, v)),
            *map(of_head, of_rows),
            of_terms(terms),
            of_mask(mask),
            of_head(carry),
            of_pairs(dbias),
        ),
        out_shape,
        out_specs,
        pair_arguments(spec, backend.interpreted),
        spec,
        backend,
        aliases=aliases,
        order=order_programs(spec, backend, "block_q", spec.head_dim),
    )
    return found[0] if dbias is None else tuple(found)


def launch_dkdv(inputs, spec, backend, mask, dtype=None, terms=NO_TERMS):
    (q, k, v, *of_rows), group = inputs, spec.group_size
    num_lists = num_lists_of_group(spec)

    def grid(config):
        tiles = count_sequence_tiles(spec.seq_kv, mask.offsets.num_sequences, config.block_kv)
        return tiles, spec.heads_kv, spec.batch

    return launch(
        "flash_bwd_dkdv",
        flash_bwd_dkdv_kernel,
        grid,
        (*inputs, terms, mask),
        (
            of_group(q, group),
            of_head(k),
            of_head(v),
            *(of_group(x, group) for x in of_rows),
            of_terms(terms, group),
            of_mask(mask, num_lists),
        ),
        tuple(jax.ShapeDtypeStruct(x.shape, dtype or x.dtype) for x in (k, v)),
        (of_head(k), of_head(v)),
        pair_arguments(spec, backend.interpreted) | {"group_size": group},
        spec,
        backend,
        order=order_programs(spec, backend, "block_kv", spec.head_dim, spec.head_dim_v),
    )


flash_bwd = make_flash_bwd(
    launch_preprocess, launch_dq, launch_dkdv, terms_gradients=(bias_gradient, relative_gradient)
)
