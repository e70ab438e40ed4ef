"""Flash attention, backward of the terms added to the scores: sums of ds, recomputed by tile.

The gradient of `relative_bias` is a sum of ds over all pairs of a distance. Tiles of queries and of
keys that start equally far apart have the same distances in the same places: they form a band. A
program adds up the tiles of one band, so that only its sum has to be split by distances. The result
has the same bits every time, and no memory grows with the square of a length.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_attn.kernels.library.dropout import dropout_weights
from pallas_attn.kernels.library.mask import Mask
from pallas_attn.kernels.library.scores import dot, round_operand, visible_scores
from pallas_attn.kernels.library.segments import STAYS, VISITED, load_segments
from pallas_attn.kernels.library.sequences import first_tile, num_sequences_of, rows_of_sequence
from pallas_attn.kernels.library.softmax import probabilities
from pallas_attn.kernels.library.terms import Terms, added_scores
from pallas_attn.kernels.library.tiles import (
    ROW_PADDING,
    arange,
    cdiv,
    load_padded_rows,
    load_tile,
    maximum,
    minimum,
    rows_from,
)
from pallas_attn.kernels.library.tree import in_branch
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
from twin_attention.targets.config import padded_head_dim
from twin_attention.targets.family import Backend


def score_gradients(
    refs,
    terms,
    segments,
    tree,
    depths,
    first_q,
    seq_q,
    first_kv,
    seq_kv,
    first_row,
    element,
    head,
    row,
    start_q,
    start_kv,
    diagonal,
    rule,
    window,
    dropout,
    head_dim,
    head_dim_v,
    block_q,
    block_kv,
    group_size=None,
):
    """Compute ds [block_q, block_kv] of one tile, in float32: the gradient of scaled scores.

    Args:
        refs: q, k, v, dout, lse2 and delta of the head. The first four have the rows of all
            sequences one after the other; lse2 and delta are [rows, padded].
        terms, segments, tree, depths, rule, window: as in `flash_bwd_dq_kernel`, of all sequences.
        first_q, seq_q, first_kv, seq_kv: the first row and the number of the sequence's queries,
            and of its keys.
        first_row, row: where the sequence begins in lse2 and delta, and in which of their rows.
        element, head: the batch element, or the packed sequence; and the query head.
        start_q, start_kv: first rows of the tile in the sequence. start_kv may be negative: keys
            before the first do not exist.
        diagonal: position of query 0.
        group_size: query heads of a kv head, if refs and terms have all heads (the axis before the
            last of q, k, v and dout); None if they have one.
    """
    q_ref, k_ref, v_ref, dout_ref, lse2_ref, delta_ref = refs
    member = None if group_size is None else head
    rows, key = start_q + arange(block_q), start_kv + arange(block_kv)
    is_key = (key >= 0) & (key < seq_kv)
    segment_q, is_query = None, None
    segment_kv, own_key = None, jnp.where(is_key, key, 0)
    seen = jnp.broadcast_to(is_key[None, :], (block_q, block_kv))
    if segments.q_ids is not None:
        segment_q, is_query = load_segments(
            rows_from(segments.q_ids, first_q), start_q, seq_q, block_q, STAYS
        )
        ids = segments.kv_ids.at[first_kv + own_key]
        segment_kv = plt.load(ids, mask=is_key, other=VISITED)
        segment_kv = jnp.where(segment_kv < 0, VISITED, segment_kv)
        is_key = is_key & (segment_kv >= 0)

    def load_queries(ref, size):
        x = load_tile(
            rows_from(ref, first_q), start_q, seq_q, block_q, size, True, is_query, member
        )
        return round_operand(x, rule.precision)

    def load_keys(ref, size):
        shape = (block_kv, padded_head_dim(size))
        row = jnp.broadcast_to((first_kv + own_key)[:, None], shape)
        col = jnp.broadcast_to(arange(shape[1])[None, :], shape)
        place = (row, col)
        if member is not None:
            place = row, jnp.broadcast_to(member // group_size, shape), col
        x = plt.load(ref.at[place], mask=is_key[:, None] & (col < size), other=0.0)
        return round_operand(x, rule.precision)

    # s = scale · q kᵀ
    q, k = load_queries(q_ref, head_dim), load_keys(k_ref, head_dim)
    position = rows + diagonal
    on_branch = in_branch(
        tree, depths, first_q, rows[:, None], seq_q, first_kv, own_key[None, :], seq_kv,
        position[:, None],
    )  # fmt: skip
    if on_branch is not None:
        seen = seen & on_branch
    offset = start_kv - start_q - diagonal
    added = added_scores(
        terms, element, offset, start_q, start_kv, seq_q, seq_kv, block_q, block_kv, True, member
    )
    s, dcap = visible_scores(
        q, k, position[:, None], key[None, :], None, rule, window, True, segment_q, segment_kv,
        seen, added,
    )  # fmt: skip
    # p = exp(s - lse)
    lse2 = load_padded_rows(lse2_ref, first_row + start_q, block_q, row)
    rest2 = load_padded_rows(terms.rest2, first_row + start_q, block_q, row)
    p = probabilities(s, lse2[:, None], rest2[:, None], rule.exp2_scale)
    # dp = dout vᵀ
    do, v = load_queries(dout_ref, head_dim_v), load_keys(v_ref, head_dim_v)
    dp = dot(do, v.T, rule.precision)
    kept = dropout_weights(
        terms, dropout, element, head, start_q, start_kv, block_q, block_kv, any_start=True
    )
    if kept is not None:
        dp = dp * kept
    # ds = p ∘ (dp - delta) ∘ dcap
    delta = load_padded_rows(delta_ref, first_row + start_q, block_q, row)
    return p * (dp - delta[:, None]) * dcap


def flash_bwd_relative_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    terms,
    offsets,
    segments,
    tree,
    depths,
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
    Dv], lse2 and delta of `flash_bwd_preprocess_kernel`, [B, padded Sq]; tiles [near, block_q,
    block_kv] float32, the sums of the near bands; sums [bands] float32, the sums over all pairs of
    the other bands. Grid: (bands, heads, 1). bands: `twin_attention.targets.bands.Bands`; elements:
    how many batch elements, or packed sequences; seq_q and seq_kv are lengths of one element, or of
    all packed sequences. Terms: slopes [], or [elements]. Offsets, segment ids and trees have all
    elements one after the other. Loop invariant: acc is Σ ds over the tiles so far. Accumulation:
    float32.
    """
    band, head = pl.program_id(0), pl.program_id(1)
    # How far after its queries' positions a band's keys start.
    offset = (bands.first + band) * block_kv
    is_visible = band >= 0
    if window.left is not None:
        is_visible = is_visible & (offset + block_kv > -window.left)
    if window.right is not None:
        is_visible = is_visible & (offset - block_q < window.right)
    refs = q_ref, k_ref, v_ref, dout_ref, lse2_ref, delta_ref

    def add_element(element, acc):
        element = lax.convert_element_type(element, jnp.int32)
        first_q, size_q, first_kv, size_kv = element * seq_q, seq_q, element * seq_kv, seq_kv
        row, first_row = element, 0
        if offsets.cu_seqlens_q is not None:
            first_q, size_q = rows_of_sequence(offsets.cu_seqlens_q, element, seq_q, seq_q)
            first_kv, size_kv = rows_of_sequence(offsets.cu_seqlens_kv, element, seq_kv, 0)
            row, first_row = 0, first_tile(first_q, element, ROW_PADDING) * ROW_PADDING
        diagonal = size_kv - size_q
        # Visit tiles of queries, from the first to the last whose keys in the band exist.
        before = offset + diagonal
        begin = maximum(-(before + block_kv - 1), 0) // block_q
        end = minimum(cdiv(maximum(size_kv - before, 0), block_q), cdiv(size_q, block_q))
        count = jnp.where(is_visible, maximum(end - begin, 0), 0)

        def add_tile(step, acc):
            start_q = (begin + lax.convert_element_type(step, jnp.int32)) * block_q
            return acc + score_gradients(
                refs, terms, segments, tree, depths, first_q, size_q, first_kv, size_kv, first_row,
                element, head, row, start_q, start_q + before, diagonal, rule, window, dropout,
                head_dim, head_dim_v, block_q, block_kv,
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
    inputs: Any,
    terms: Terms,
    mask: Mask,
    spec: AttentionSpec,
    backend: Backend,
) -> dict[str, Array]:
    """Compute the gradient of `relative_bias`, by name; empty without it, or if frozen.

    Args:
        inputs: `pallas_attn.kernels.gradients.Inputs`.
        terms: of the call, as the kernel of dq takes them.
        mask: as the kernel of dq takes it.
        spec, backend: the problem, and what runs.
    """
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
    segments, tree, depths = (
        type(x)(*(None if ids is None else ids.reshape(-1) for ids in x[:2]))
        for x in (mask.segments, mask.tree, mask.depths)
    )
    num_sequences = num_sequences_of(spec)

    def of_all_batches(x):
        return block_spec(x, lambda _band, head, _: {"head": head}, ALL, "head", ALL)

    def of_one_head(x):
        return block_spec(x, lambda _band, head, _: {"head": head}, "head", ALL, ALL, ALL)

    def of_all_pairs(x):
        own = "head" if x is not None and x.shape[1] > 1 else "first"
        return block_spec(x, lambda _band, head, _: {"head": head}, ALL, own, ALL, ALL)

    small = (mask.offsets, segments, tree, depths)
    found = launch(
        "flash_bwd_dq",
        flash_bwd_relative_kernel,
        lambda config: (bands.count, spec.heads_q, 1),
        (q, k, v, dout, *of_rows, terms, *small),
        (
            of_head(q),
            *(of_head(x, spec.group_size) for x in (k, v)),
            of_head(dout),
            *map(of_all_batches, of_rows),
            of_terms(terms)._replace(
                bias=of_all_pairs(terms.bias), rest2=of_all_batches(terms.rest2)
            ),
            *(x._make(map(of_all, x)) for x in small),
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


def compiler_numbers(spec: AttentionSpec) -> dict[str, int]:
    """Return the warps and stages that replace those of the dq kernel.

    Four tiles are loaded in each step, and no accumulator is as wide as a head.
    """
    size = max(spec.head_dim, spec.head_dim_v)
    return {"num_warps": 8, "num_stages": 2 if spec.dtype_bits == 16 and 64 < size <= 128 else 1}


def sums_of_distances(tiles: Array, sums: Array, bands: Bands) -> Array:
    """Return the sums over each clipped distance [Hq, 2R + 1] from the sums of the bands."""
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
