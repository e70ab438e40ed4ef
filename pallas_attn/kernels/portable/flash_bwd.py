"""Flash attention, backward: a preprocess of rows, then dq, then dk and dv.

With p recomputed from lse, ``dp = dout vᵀ`` and ``delta = rowsum(dout ∘ out) - dlse``:
``ds = p ∘ (dp - delta) ∘ dcap``, where dcap is the softcap's derivative, ``dq = scale · ds k``,
``dk = scale · dsᵀ q``, ``dv = pᵀ dout``. A sink is a score without a value, so its dp is 0. With
dropout, dp and the p of dv are multiplied by `dropout_weights`.
Dao 2023, FlashAttention-2, algorithm 2, with a separate kernel for dq instead of atomic additions:
the result has the same bits every time.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_attn.kernels.gradients import make_flash_bwd
from pallas_attn.kernels.library.block_mask import list_arguments, num_lists_of_group
from pallas_attn.kernels.library.dropout import dropout_weights
from pallas_attn.kernels.library.intervals import in_interval, load_intervals
from pallas_attn.kernels.library.mask import find_visits
from pallas_attn.kernels.library.schedule import order_programs
from pallas_attn.kernels.library.scores import (
    add_product,
    as_multiplied,
    dot,
    round_operand,
    visible_scores,
)
from pallas_attn.kernels.library.segments import STAYS, VISITED, load_segments
from pallas_attn.kernels.library.sequences import count_sequence_tiles, first_tile, locate_tile
from pallas_attn.kernels.library.softmax import LOG2E, lse_to_subtract, probabilities
from pallas_attn.kernels.library.terms import NO_TERMS, added_scores, shares_values, store_pairs
from pallas_attn.kernels.library.tiles import (
    ROW_PADDING,
    arange,
    load_padded_rows,
    load_rows,
    load_tile,
    rows_from,
    split_step,
    store_tile,
)
from pallas_attn.kernels.library.tree import ending_tiles, find_runs, in_branch
from pallas_attn.kernels.portable.flash_bwd_bias import bias_gradient
from pallas_attn.kernels.portable.flash_bwd_terms import relative_gradient
from pallas_attn.launch import (
    flash_arguments,
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
    """Prepare the rows for the other kernels; one program takes block_q rows of a head.

    ``delta = rowsum(dout ∘ out) - dlse``, and lse2 is lse in base 2, or +inf where a row saw no key
    or does not exist, so that ``exp2(s - lse2)`` is 0 there. Where terms were added, lse2 is lse
    itself (`softmax.probabilities`), and rest2 is rest (`softmax.rest_of_lse`) in base 2. dlse
    counts as 0 in a row that saw no key. dout is rounded as products of the precision take it, so
    that ds cancels in a row that sees one key. Operands, of this program's batch and head: dout and
    out [Sq, Dv], lse, dlse and rest [Sq] (dlse is None for zero, rest without terms); lse2, delta
    and rest2 [Sq rounded up to ROW_PADDING], all float32. Grid: (query tiles, heads, batch).

    Packed sequences, as in `flash_fwd_kernel`: lse2 and delta have `count_sequence_tiles` of
    ROW_PADDING rows, so that each sequence begins a tile. dout counts as 0 in padding, including
    the padding of segment ids q_segment_ids [Sq] int32, or None.
    """
    # Locate the rows.
    padded = pl.program_id(0) * block_q
    start_q, seq_dout = padded, seq_q
    if cu_seqlens_q_ref is not None:
        # The other axis is the queries as well, where the padding's sequence is empty.
        _sequence, _first_q, start_q, seq_q, first_dout, size_dout = locate_tile(
            cu_seqlens_q_ref, cu_seqlens_q_ref, padded // ROW_PADDING, seq_q, seq_q, ROW_PADDING
        )
        start_q = start_q + padded % ROW_PADDING
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
    tile_q,
    tile_kv,
    block_q,
    block_kv,
):
    """One program computes block_q rows of dq of one query head.

    Operands, of this program's batch and head: q and dq [Sq, D], k [Skv, D], v [Skv, Dv], dout [Sq,
    Dv], lse2 and delta of `flash_bwd_preprocess_kernel`. Grid, place, rule: as in
    `flash_fwd_kernel`. Loop invariant: dq is Σ ds k over the keys so far. Accumulation: float32,
    exponents in base 2, ds cast to k's dtype for ds·k. A row that sees no key gives 0. Packed
    sequences, segment ids, block mask, tree, terms: as in `flash_fwd_kernel`; lse2 and delta as in
    `flash_bwd_preprocess_kernel`. carry [Sq, D] float32: the gradient through other keys, to which
    the gradient through these keys is added; or None. dbias [Sq, Skv]: the gradient of a bias that
    no two pairs share, which is ds. It is 0 at first, in the memory of the result, or None.
    """
    offsets, segments, lists, tree, depths, intervals = mask
    # Locate the tile of queries.
    tile, head, batch = place(pl.program_id(0))
    sequence, first_q, start_q, seq_q, first_kv, seq_kv = locate_tile(
        *offsets, tile, seq_q, seq_kv, block_q
    )
    element = batch if offsets.cu_seqlens_q is None else sequence
    diagonal = seq_kv - seq_q
    k_ref, v_ref = rows_from(k_ref, first_kv), rows_from(v_ref, first_kv)
    moved = first_tile(first_q, sequence, ROW_PADDING) * ROW_PADDING - first_q
    lse2_ref, delta_ref = rows_from(lse2_ref, moved), rows_from(delta_ref, moved)

    # Load the queries and their per-row values; they stay.
    segment_q, is_query = load_segments(segments.q_ids, start_q, seq_q, block_q, STAYS)
    q = load_tile(q_ref, start_q, seq_q, block_q, head_dim, True, is_query)
    do = load_tile(dout_ref, start_q, seq_q, block_q, head_dim_v, True, is_query)
    q, do = round_operand(q, rule.precision), round_operand(do, rule.precision)
    rows = start_q + arange(block_q)
    position = rows + diagonal
    lse2 = load_padded_rows(lse2_ref, start_q, block_q)
    delta = load_padded_rows(delta_ref, start_q, block_q)
    rest2 = None
    if terms.rest2 is not None:
        rest2 = load_padded_rows(rows_from(terms.rest2, moved), start_q, block_q)[:, None]
    begins, ends = load_intervals(intervals, start_q, seq_q, block_q)
    dq = jnp.zeros((block_q, padded_head_dim(head_dim)), jnp.float32)

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

        def visit(index, dq, masked=masked):
            start_kv = visits.start(index, masked)
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
            s, dcap = visible_scores(
                q, k, position[:, None], key[None, :], seq_kv, rule, window, masked,
                segment_q, segment_kv, seen, added,
            )  # fmt: skip
            # p = exp(s - lse)
            p = probabilities(s, lse2[:, None], rest2, rule.exp2_scale)
            # dp = dout vᵀ
            v = load_tile(v_ref, start_kv, seq_kv, block_kv, head_dim_v, masked, is_key)
            v = round_operand(v, rule.precision)
            dp = dot(do, v.T, rule.precision)
            kept = dropout_weights(
                terms, dropout, element, head, start_q - first_q, start_kv, block_q, block_kv
            )
            if kept is not None:
                dp = dp * kept
            # ds = p ∘ (dp - delta) ∘ dcap
            ds = p * (dp - delta[:, None]) * dcap
            for ref in stored:
                store_pairs(ref, ds, start_q, start_kv, seq_q, seq_kv, block_q, block_kv)
            # dq += ds k
            ds = round_operand(ds.astype(k.dtype), rule.precision)
            return dq + dot(ds, k, rule.precision)

        dq = visits.walk(masked, visit, dq)

    # Scale and store.
    dq = dq * rule.scale
    if carry_ref is not None:
        dq = dq + load_tile(carry_ref, start_q, seq_q, block_q, head_dim, True)
    store_tile(dq_ref, dq, start_q, seq_q, block_q, head_dim)


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
    group_lists,
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
    """One program computes block_kv rows of dk and dv of one kv head, summed over its query heads.

    Operands, of this program's batch and kv head: q [Sq, group, D], k and dk [Skv, D], v and dv
    [Skv, Dv], dout [Sq, group, Dv], lse2 and delta [group, padded Sq]. Grid: (key tiles · kv heads
    · batch), and place, as in `flash_fwd_kernel`. Tiles of s, p, dp, ds are transposed (keys down,
    queries across), so that they can be left operands directly. Loop invariant: dk is Σ dsᵀ q and
    dv is Σ pᵀ dout over the query heads and queries so far. Accumulation: float32, exponents in
    base 2, p and ds cast to the inputs' dtype for their products. A key that no query sees gives 0.
    Packed sequences, segment ids, tree: as in `flash_bwd_dq_kernel`, with tiles of keys, and the
    ranges of the queries' ids. Terms: likewise, of all heads of the group. Block mask: likewise,
    with the `lists_of_queries`, counts [group_lists, tiles] and tiles [group_lists, tiles, width];
    group_lists is how many lists the query heads of a kv head have, group_size or 1.
    """
    offsets, segments, lists, tree, depths, intervals = mask
    # Locate the tile of keys.
    tile, head_kv, batch = place(pl.program_id(0))
    # The first keys are seen by most queries.
    tile = count_sequence_tiles(seq_kv, offsets.num_sequences, block_kv) - 1 - tile
    sequence, first_kv, start_kv, seq_kv, first_q, seq_q = locate_tile(
        *reversed(offsets), tile, seq_kv, seq_q, block_kv
    )
    element = batch if offsets.cu_seqlens_q is None else sequence
    diagonal = seq_kv - seq_q
    first_position = diagonal - first_kv  # of query 0
    q_ref, dout_ref = rows_from(q_ref, first_q), rows_from(dout_ref, first_q)
    first_row = first_tile(first_q, sequence, ROW_PADDING) * ROW_PADDING
    lse2_ref, delta_ref = rows_from(lse2_ref, first_row), rows_from(delta_ref, first_row)

    # Load the keys and values; they stay.
    segment_kv, is_key = load_segments(segments.kv_ids, start_kv, seq_kv, block_kv, STAYS)
    k = load_tile(k_ref, start_kv, seq_kv, block_kv, head_dim, True, is_key)
    v = load_tile(v_ref, start_kv, seq_kv, block_kv, head_dim_v, True, is_key)
    k, v = round_operand(k, rule.precision), round_operand(v, rule.precision)
    key = start_kv + arange(block_kv) - diagonal  # counted as queries are
    begins, ends = load_intervals(intervals, start_kv, seq_kv, block_kv)
    dk = jnp.zeros((block_kv, padded_head_dim(head_dim)), jnp.float32)
    dv = jnp.zeros((block_kv, padded_head_dim(head_dim_v)), jnp.float32)

    # Visit the tiles of queries that see these keys; only tiles at the edges are masked.
    of_all_lists = find_visits(
        start_kv, seq_kv, seq_q, -diagonal, window.right, window.left, block_kv, block_q,
        segment_kv, segments, begins, ends,
    )  # fmt: skip
    ending = ending_tiles(
        tree, depths, first_kv, key + first_position, seq_kv - first_kv, first_position,
        of_all_lists.visible, block_q,
    )  # fmt: skip
    of_all_lists = of_all_lists._replace(visible=ending)

    def walk(first_member, carry):
        first_member = jnp.int32(first_member)
        visits = of_all_lists
        if lists.tiles is not None:
            visits = visits.keep(lists, first_member, start_kv // tile_kv, tile_q)
        for masked in (False, True):
            count = visits.count(masked)

            def visit(step, carry, masked=masked, count=count):
                dk, dv = carry
                member, index = split_step(step, count, group_size // group_lists)
                start_q = visits.start(index, masked)
                if lists.tiles is not None:
                    member = member + first_member
                # sᵀ = scale · k qᵀ
                segment_q, is_query = load_segments(
                    segments.q_ids, start_q, seq_q, block_q, VISITED
                )
                q = load_tile(q_ref, start_q, seq_q, block_q, head_dim, masked, is_query, member)
                q = round_operand(q, rule.precision)
                rows = start_q + arange(block_q)
                seen = in_branch(
                    tree, depths, first_q, rows[None, :], seq_q, first_kv,
                    key[:, None] + first_position, seq_kv - first_kv,
                    rows[None, :] + first_position,
                )  # fmt: skip
                if begins is not None:
                    seen = in_interval(begins, ends, rows)
                offset = start_kv - diagonal - start_q
                added = added_scores(
                    terms, sequence, offset, start_q, start_kv, seq_q, seq_kv, block_q, block_kv,
                    True, member, True,
                )  # fmt: skip
                s, dcap = visible_scores(
                    k, q, rows[None, :], key[:, None], None, rule, window, masked,
                    segment_kv, segment_q, seen, added,
                )  # fmt: skip
                # pᵀ = exp(sᵀ - lse)
                lse2 = load_padded_rows(lse2_ref, start_q, block_q, member)
                rest2 = None
                if terms.rest2 is not None:
                    of_rows = rows_from(terms.rest2, first_row)
                    rest2 = load_padded_rows(of_rows, start_q, block_q, member)[None, :]
                p = probabilities(s, lse2[None, :], rest2, rule.exp2_scale)
                # dpᵀ = v doutᵀ
                do = load_tile(
                    dout_ref, start_q, seq_q, block_q, head_dim_v, masked, is_query, member
                )
                do = round_operand(do, rule.precision)
                dp = dot(v, do.T, rule.precision)
                kept_p = p
                kept = dropout_weights(
                    terms, dropout, element, head_kv * group_size + member, start_q,
                    start_kv - first_kv, block_q, block_kv, True,
                )  # fmt: skip
                if kept is not None:
                    kept_p, dp = p * kept, dp * kept
                # dv += pᵀ dout
                rounded = round_operand(kept_p.astype(do.dtype), rule.precision)
                dv = add_product(dv, rounded, do, rule.precision)
                # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
                delta = load_padded_rows(delta_ref, start_q, block_q, member)
                ds = p * (dp - delta[None, :]) * dcap
                # dk += dsᵀ q
                ds = round_operand(ds.astype(q.dtype), rule.precision)
                dk = add_product(dk, ds, q, rule.precision)
                return dk, dv

            carry = lax.fori_loop(0, count * (group_size // group_lists), visit, carry)
        return carry

    # If each head has lists, visit one head after the other, otherwise the whole group together.
    if group_lists == 1:
        dk, dv = walk(0, (dk, dv))
    else:
        dk, dv = lax.fori_loop(0, group_lists, walk, (dk, dv))

    # Scale and store.
    store_tile(dk_ref, dk * rule.scale, start_kv, seq_kv, block_kv, head_dim)
    store_tile(dv_ref, dv, start_kv, seq_kv, block_kv, head_dim_v)


def launch_preprocess(sources, spec, backend, mask):
    """Call `flash_bwd_preprocess_kernel`; returns lse2, delta, and rest2 where there are terms."""
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
    """Call `flash_bwd_dq_kernel`.

    Returns:
        dq, in the memory and dtype of a `carry`; and the gradient of a bias that no two pairs
        share, unless it is frozen.
    """
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
        flash_arguments(spec, backend.interpreted)
        | list_arguments(spec)
        | {"dropout": spec.dropout},
        spec,
        backend,
        aliases=aliases,
        order=order_programs(spec, backend, "block_q", spec.head_dim),
    )
    return found[0] if dbias is None else tuple(found)


def launch_dkdv(inputs, spec, backend, mask, dtype=None, terms=NO_TERMS):
    """Call `flash_bwd_dkdv_kernel`; returns dk and dv, in `dtype` if one is given."""
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
        flash_arguments(spec, backend.interpreted)
        | list_arguments(spec)
        | {"group_size": group, "group_lists": num_lists, "dropout": spec.dropout},
        spec,
        backend,
        order=order_programs(spec, backend, "block_kv", spec.head_dim, spec.head_dim_v),
    )


flash_bwd = make_flash_bwd(
    launch_preprocess, launch_dq, launch_dkdv, terms_gradients=(bias_gradient, relative_gradient)
)
