"""Flash attention, backward of a bias that pairs share: sums of ds, recomputed tile by tile."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_attn.integers import quotient, remainder
from pallas_attn.kernels.library.mask import Mask
from pallas_attn.kernels.library.pairs.rows import rows_at
from pallas_attn.kernels.library.sequences import TileRows
from pallas_attn.kernels.library.terms import Terms, shares_values, store_pairs
from pallas_attn.kernels.library.tiles import cdiv, store_rows, visible_tiles
from pallas_attn.kernels.portable.flash_bwd_terms import (
    compiler_numbers,
    flat_mask,
    score_gradients,
)
from pallas_attn.launch import (
    ALL,
    COLUMNS,
    block_spec,
    flash_arguments,
    launch,
    of_all,
    of_head,
    of_pairs,
)
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend


def flash_bwd_bias_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    terms,
    mask,
    sums_ref,
    *,
    kind,
    shared_heads,
    shared,
    heads_q,
    group_size,
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
    """One program adds up ds over the tiles that share a tile of the sums.

    Operands, of all batch elements and heads: q [B · Sq, Hq, D], k [B · Skv, Hkv, D], v [B · Skv,
    Hkv, Dv], dout [B · Sq, Hq, Dv], lse2 and delta [B · Hq, padded Sq]. Grid: (tiles, heads, batch
    elements). kind "pairs": sums [Sq, Skv] are the gradient itself, in its dtype; "rows" or "keys":
    they are [Sq] or [Skv] float32.
    """
    tile, head, element = (pl.program_id(i) for i in range(3))
    start_q, start_kv, diagonal = tile * block_q, tile * block_kv, seq_kv - seq_q
    if kind == "pairs":
        tiles_kv = cdiv(seq_kv, block_kv)
        start_q, start_kv = quotient(tile, tiles_kv) * block_q, remainder(tile, tiles_kv) * block_kv
    # Find the tiles that a row or a column of tiles sees.
    left, right = window.left, window.right
    if mask.q_ranges.bounds is not None:
        left, right = None, None
    if kind == "keys":
        first, *counts = visible_tiles(
            start_kv, seq_kv, seq_q, -diagonal, right, left, block_kv, block_q
        )
    else:
        first, *counts = visible_tiles(
            start_q, seq_q, seq_kv, diagonal, left, right, block_q, block_kv
        )
    count = jnp.int32(sum(counts))
    if kind == "pairs":
        is_visible = (start_kv >= first) & (start_kv < first + count * block_kv)
        count = jnp.where(is_visible, jnp.int32(shared), 0 * count)
    refs = q_ref, k_ref, v_ref, dout_ref, lse2_ref, delta_ref

    def add_tile(step, acc):
        step = lax.convert_element_type(step, jnp.int32)
        own_head, own_element, own_q, own_kv = head, element, start_q, start_kv
        if kind == "pairs":
            own_head = head + remainder(step, shared_heads)
            own_element = element + quotient(step, shared_heads)
        elif kind == "rows":
            own_kv = first + step * block_kv
        else:
            own_q = first + step * block_q
        first_q, first_kv = own_element * seq_q, own_element * seq_kv
        start, end = first_q + own_q, first_q + seq_q
        found = TileRows(own_element, first_q, start, end, first_kv, seq_kv)
        rows = rows_at(
            mask, mask.segments.q_ids, own_element, own_head, found, None, block_q, own_head
        )
        prepared = 0, own_q, block_q, own_element * heads_q + own_head
        return acc + score_gradients(
            refs, terms, mask, rows, prepared, own_kv, rule, window, dropout, head_dim, head_dim_v,
            block_kv, group_size,
        )  # fmt: skip

    acc = jnp.zeros((block_q, block_kv), jnp.float32)
    acc = lax.fori_loop(jnp.int32(0), count, add_tile, acc)

    # Store.
    if kind == "pairs":
        store_pairs(sums_ref, acc, start_q, start_kv, seq_q, seq_kv)
    elif kind == "rows":
        store_rows(sums_ref, jnp.sum(acc, 1), start_q, seq_q, block_q)
    else:
        store_rows(sums_ref, jnp.sum(acc, 0), start_kv, seq_kv, block_kv)


def bias_gradient(
    inputs: Any, terms: Terms, mask: Mask, spec: AttentionSpec, backend: Backend
) -> dict[str, Array]:
    bias = terms.bias
    if bias is None or "bias" in spec.frozen or not shares_values(bias.shape, spec):
        return {}
    whole = spec.batch, spec.heads_q, spec.seq_q, spec.seq_kv
    kind = "pairs" if 1 not in bias.shape[2:] else "keys" if bias.shape[3] > 1 else "rows"
    if kind == "pairs":
        sums = jax.ShapeDtypeStruct(bias.shape, bias.dtype)
    else:
        shape = (*whole[:2], whole[3] if kind == "keys" else whole[2])
        sums = jax.ShapeDtypeStruct(shape, jnp.float32)
    heads_shared, batch_shared = spec.heads_q // sums.shape[1], spec.batch // sums.shape[0]
    rows = [x.reshape(-1, *x.shape[2:]) for x in inputs]
    assert terms.rest2 is not None
    terms = terms._replace(rest2=terms.rest2.reshape(-1, terms.rest2.shape[-1]))
    slopes = terms.slopes
    if slopes is not None and slopes.ndim == 2:
        terms = terms._replace(slopes=slopes.T)
    mask = flat_mask(mask)

    def grid(config):
        tiles = cdiv(spec.seq_q, config.block_q), cdiv(spec.seq_kv, config.block_kv)
        count = {"pairs": tiles[0] * tiles[1], "rows": tiles[0], "keys": tiles[1]}[kind]
        return count, sums.shape[1], sums.shape[0]

    (found,) = launch(
        "flash_bwd_dq",
        flash_bwd_bias_kernel,
        grid,
        (*rows, terms, mask),
        (
            *(block_spec(x, _whole, ALL, ALL, COLUMNS) for x in rows[:4]),
            *(block_spec(x, _whole, ALL, ALL) for x in rows[4:]),
            terms._make(map(of_all, terms)),
            jax.tree.map(of_all, mask),
        ),
        (sums,),
        (of_pairs(sums) if kind == "pairs" else of_head(sums),),
        flash_arguments(spec, backend.interpreted)
        | {
            "kind": kind,
            "shared_heads": heads_shared,
            "shared": heads_shared * batch_shared,
            "heads_q": spec.heads_q,
            "group_size": spec.group_size,
            "dropout": spec.dropout,
        },
        spec,
        backend,
        numbers=compiler_numbers(spec),
    )
    if kind != "pairs":
        found = jnp.expand_dims(found, 2 if kind == "keys" else 3)
        shared = tuple(i for i in range(4) if bias.shape[i] == 1)
        found = found.sum(shared, keepdims=True)
    return {"bias": found.astype(bias.dtype)}


def _whole(*_: Any) -> dict[str, Any]:
    return {}
