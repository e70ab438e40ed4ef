"""Flash attention, backward of the terms added to the scores: sums of ds, recomputed by tile."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_attn.integers import quotient
from pallas_attn.kernels.library.block_mask import Lists
from pallas_attn.kernels.library.dropout import kept_pairs
from pallas_attn.kernels.library.intervals import RowIntervals
from pallas_attn.kernels.library.mask import Mask
from pallas_attn.kernels.library.pairs.rows import load_own, load_prepared, rows_at
from pallas_attn.kernels.library.pairs.scores import pair_scores
from pallas_attn.kernels.library.pairs.visits import keys_from_anywhere, load_from_anywhere
from pallas_attn.kernels.library.query_ranges import QueryRanges
from pallas_attn.kernels.library.scores import dot
from pallas_attn.kernels.library.sequences import (
    TileRows,
    first_tile,
    num_sequences_of,
    rows_of_sequence,
)
from pallas_attn.kernels.library.softmax import probabilities
from pallas_attn.kernels.library.terms import Terms
from pallas_attn.kernels.library.tiles import ROW_PADDING, cdiv, maximum, minimum
from pallas_attn.launch import (
    ALL,
    block_spec,
    config_of,
    flash_arguments,
    launch,
    of_all,
    of_head,
    of_terms,
)
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.bands import Bands, bands_of
from twin_attention.targets.family import Backend


def score_gradients(
    refs,
    terms,
    mask,
    rows,
    prepared,
    start_kv,
    rule,
    window,
    dropout,
    head_dim,
    head_dim_v,
    block_kv,
    group_size=1,
):
    """Compute ds [block_q, block_kv] of one tile, in float32: the gradient of scaled scores.

    refs are q, k, v, dout, lse2 and delta of a head, or of all if rows.member is one; the rows of
    all sequences lie one after the other. start_kv may be negative: keys before the first do not
    exist.
    """
    q_ref, k_ref, v_ref, dout_ref, lse2_ref, delta_ref = refs
    head_kv = None if rows.member is None else quotient(rows.member, group_size)
    keys = keys_from_anywhere(mask, rows, head_kv, start_kv, block_kv)
    # s = scale · q kᵀ
    q = load_own(q_ref, rows, rule, head_dim)
    k = load_from_anywhere(k_ref, rows, keys, rule, head_dim)
    s, dcap = pair_scores(q, k, mask, terms, rule, rows, keys, window, True)
    # p = exp(s - lse)
    lse2, rest2 = (load_prepared(ref, *prepared) for ref in (lse2_ref, terms.rest2))
    p = probabilities(s, lse2, rest2, rule.exp2_scale)
    # dp = dout vᵀ
    do = load_own(dout_ref, rows, rule, head_dim_v)
    v = load_from_anywhere(v_ref, rows, keys, rule, head_dim_v)
    dp = dot(do, v.T, rule.precision)
    dp = dp * kept_pairs(terms, dropout, rows, keys, any_start=True)
    # ds = p ∘ (dp - delta) ∘ dcap
    return p * (dp - load_prepared(delta_ref, *prepared)) * dcap


def flash_bwd_relative_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    terms,
    mask,
    tiles_ref,
    sums_ref,
    *,
    bands,
    elements,
    seq_q,
    seq_kv,
    rule,
    window,
    dropout,
    head_dim,
    head_dim_v,
    block_q,
    block_kv,
):
    """One program adds up ds over the tiles of one band of one query head.

    Operands, of this program's head: q [B · Sq, D], k [B · Skv, D], v [B · Skv, Dv], dout [B · Sq,
    Dv], lse2 and delta [B, padded Sq]; tiles [near, block_q, block_kv] float32; sums [bands]
    float32; terms with slopes [], or [elements]; mask: `flat_mask`. Grid: (bands, heads, 1). seq_q
    and seq_kv are lengths of one element, or of all packed sequences.
    """
    band, head = pl.program_id(0), pl.program_id(1)
    # How far after its queries' positions a band's keys start.
    offset = (bands.first + band) * block_kv
    is_visible = band >= 0
    shows_more = mask.q_ranges.bounds is not None
    if window.left is not None and not shows_more:
        is_visible = is_visible & (offset + block_kv > -window.left)
    if window.right is not None and not shows_more:
        is_visible = is_visible & (offset - block_q < window.right)
    refs = q_ref, k_ref, v_ref, dout_ref, lse2_ref, delta_ref

    def add_element(element, acc):
        element = lax.convert_element_type(element, jnp.int32)
        first_q, size_q, first_kv, size_kv = element * seq_q, seq_q, element * seq_kv, seq_kv
        row, first_row = element, 0
        if mask.offsets.num_sequences is not None:
            first_q, size_q = rows_of_sequence(mask.offsets.cu_seqlens_q, element, seq_q, seq_q)
            first_kv, size_kv = rows_of_sequence(mask.offsets.cu_seqlens_kv, element, seq_kv, 0)
            row, first_row = 0, first_tile(first_q, element, ROW_PADDING) * ROW_PADDING
        # Visit tiles of queries, from the first to the last whose keys in the band exist.
        before = offset + size_kv - size_q
        begin = maximum(-(before + block_kv - 1), 0) // block_q
        end = minimum(cdiv(maximum(size_kv - before, 0), block_q), cdiv(size_q, block_q))
        count = jnp.where(is_visible, maximum(end - begin, 0), 0)

        def add_tile(step, acc):
            start_q = (begin + lax.convert_element_type(step, jnp.int32)) * block_q
            end_q = first_q + size_q
            found = TileRows(element, first_q, first_q + start_q, end_q, first_kv, size_kv)
            rows = rows_at(mask, mask.segments.q_ids, element, head, found, None, block_q)
            prepared = first_row, start_q, block_q, row
            return acc + score_gradients(
                refs, terms, mask, rows, prepared, start_q + before, rule, window, dropout,
                head_dim, head_dim_v, block_kv,
            )  # fmt: skip

        return lax.fori_loop(jnp.int32(0), count, add_tile, acc)

    acc = jnp.zeros((block_q, block_kv), jnp.float32)
    acc = lax.fori_loop(0, elements, add_element, acc)

    # Store the band: its tile if its distances have entries of their own, otherwise its sum.
    near = band - bands.near
    is_near = (near >= 0) & (near < bands.num_near)
    shape = (block_q, block_kv)
    at = jnp.where(is_near, near, 0)
    tile = tiles_ref.at[at, *(pl.ds(np.int32(0), size) for size in shape)]
    plt.store(tile, acc, mask=jnp.broadcast_to(is_near, shape))
    sums_ref[band] = jnp.where(is_near, 0.0, jnp.sum(acc))


def relative_gradient(
    inputs: Any, terms: Terms, mask: Mask, spec: AttentionSpec, backend: Backend
) -> dict[str, Array]:
    if terms.relative is None or "relative_bias" in spec.frozen:
        return {}
    config = config_of("flash_bwd_dq", spec, backend)
    bands = bands_of(spec, terms.relative.shape[1] // 2, config.block_q, config.block_kv)
    shape = (spec.heads_q, bands.num_near, config.block_q, config.block_kv)
    tiles = jax.ShapeDtypeStruct(shape, jnp.float32)
    sums = jax.ShapeDtypeStruct((spec.heads_q, bands.count), jnp.float32)
    q, k, v, dout = (x.reshape(1, -1, *x.shape[2:]) for x in inputs[:4])
    of_rows = inputs[4:]
    slopes = terms.slopes
    if slopes is not None and slopes.ndim == 2:
        slopes = slopes.T[None]
    terms = terms._replace(slopes=slopes)
    mask = flat_mask(mask)
    num_sequences = num_sequences_of(spec)

    def of_all_batches(x):
        return block_spec(x, lambda _band, head, _: {"head": head}, ALL, "head", ALL)

    def of_one_head(x):
        return block_spec(x, lambda _band, head, _: {"head": head}, "head", ALL, ALL, ALL)

    def of_all_pairs(x):
        own = "head" if x is not None and x.shape[1] > 1 else "first"
        return block_spec(x, lambda _band, head, _: {"head": head}, ALL, own, ALL, ALL)

    found = launch(
        "flash_bwd_dq",
        flash_bwd_relative_kernel,
        lambda config: (bands.count, spec.heads_q, 1),
        (q, k, v, dout, *of_rows, terms, mask),
        (
            of_head(q),
            *(of_head(x, spec.group_size) for x in (k, v)),
            of_head(dout),
            *map(of_all_batches, of_rows),
            of_terms(terms)._replace(
                bias=of_all_pairs(terms.bias), rest2=of_all_batches(terms.rest2)
            ),
            jax.tree.map(of_all, mask),
        ),
        (tiles, sums),
        (of_one_head(tiles), of_one_head(sums)),
        flash_arguments(spec, backend.interpreted)
        | {
            "bands": bands,
            "elements": spec.batch if num_sequences is None else num_sequences,
            "dropout": spec.dropout,
        },
        spec,
        backend,
        numbers=compiler_numbers(spec),
    )
    return {"relative_bias": sums_of_distances(*found, bands).astype(terms.relative.dtype)}


def flat_mask(mask: Mask) -> Mask:
    """Return a mask whose segment ids, trees and ranges have all elements one after the other."""
    segments, tree, depths = (
        type(x)(*(None if ids is None else ids.reshape(-1) for ids in x[:2]))
        for x in (mask.segments, mask.tree, mask.depths)
    )
    bounds = mask.q_ranges.bounds
    ranges = QueryRanges(None if bounds is None else bounds.reshape(-1, *bounds.shape[2:]))
    return Mask(mask.offsets, segments, Lists(), tree, depths, ranges, RowIntervals())


def compiler_numbers(spec: AttentionSpec) -> dict[str, int]:
    size = max(spec.head_dim, spec.head_dim_v)
    return {"num_warps": 8, "num_stages": 2 if spec.dtype_bits == 16 and 64 < size <= 128 else 1}


def sums_of_distances(tiles: Array, sums: Array, bands: Bands) -> Array:
    heads, near, block_q, block_kv = tiles.shape
    # Row i of a tile, counted from the last query, moves i columns to the right.
    skewed = jnp.pad(tiles[:, :, ::-1], ((0, 0), (0, 0), (0, 0), (0, block_q)))
    skewed = skewed.reshape(heads, near, -1)[..., :-block_q]
    width = block_q + block_kv - 1
    of_bands = skewed.reshape(heads, near, block_q, width).sum(2)
    # A band begins block_kv distances after the previous one: bands `every` apart do not overlap.
    every = -(-width // block_kv)
    found = jnp.zeros((heads, (near + every) * block_kv), jnp.float32)
    for n in range(every):
        apart = jnp.pad(of_bands[:, n::every], ((0, 0), (0, 0), (0, every * block_kv - width)))
        apart = apart.reshape(heads, -1)
        behind = found.shape[1] - n * block_kv - apart.shape[1]
        found = found + jnp.pad(apart, ((0, 0), (n * block_kv, behind)))
    if bands.radius == 0:
        return (sums.sum(1) + found.sum(1))[:, None]
    # `found` begins with this distance.
    first = (bands.first + bands.near) * block_kv - block_q + 1
    begin, end = 1 - bands.reach - first, bands.reach - first
    before = sums[:, : bands.near].sum(1) + found[:, :begin].sum(1)
    behind = sums[:, bands.near + near :].sum(1) + found[:, end:].sum(1)
    unused = jnp.zeros((heads, bands.radius - bands.reach), jnp.float32)
    both = before[:, None], unused, found[:, begin:end], unused, behind[:, None]
    return jnp.concatenate(both, 1)
