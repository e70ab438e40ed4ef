"""Cascades: pages that several sequences begin with are read once for a tile of sequences."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_attn.integers import quotient, remainder
from pallas_attn.kernels.library.arguments import decode_arguments
from pallas_attn.kernels.library.pages import locate_keys, share_of_tiles, splits_with_keys
from pallas_attn.kernels.library.prefixes import find_leaders, find_members
from pallas_attn.kernels.library.quantized import (
    add_pv,
    add_stored,
    load_keys,
    load_q,
    load_values,
    no_keys,
    scores,
    store_out,
)
from pallas_attn.kernels.library.softmax import online_softmax_update
from pallas_attn.kernels.library.tiles import arange
from pallas_attn.launch import ALL, COLUMNS, block_spec, config_of, launch
from pallas_attn.targets import num_sms
from twin_attention.contract.operands import DecodeOperands
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.splits import block_rows, cascade_tile, cascade_tiles


class Cascade(NamedTuple):
    """Running softmaxes over keys that sequences share, shaped as the twin's."""

    prefixes: Any
    accs: Any
    maxima: Any
    sums: Any


def shared_pages_kernel(
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    len_ref,
    k_scale_ref,
    prefix_ref,
    acc_ref,
    maximum_ref,
    sum_ref,
    *,
    tiles,
    rule,
    tokens,
    group_size,
    head_dim,
    head_dim_v,
    block_d,
    block_dv,
    upcast,
    block_rows,
    block_kv,
):
    """One program computes block_rows rows of one kv head of tiles, over a split of their prefixes.

    Operands, of this program's kv head: q [B, T, group, D], the pools and k's scale as in
    `paged_decode_kernel`; tables [B, max_pages] and lens [B]; a `Cascade`'s prefixes, and the
    split's accs [B, T, group, Dv], maxima and sums [B, group, T]. Grid: (row tiles, kv heads,
    sequences by tiles.members, splits).
    """
    # Locate the tiles that have a prefix.
    tile, split = pl.program_id(0), pl.program_id(3)
    (num_pages, page_size, _), scale = k_ref.shape, rule.scale
    batch_size = len_ref.shape[0]
    candidate = pl.program_id(2) * tiles.members
    sequence, leads, is_alone = find_leaders(
        table_ref, len_ref, tiles, candidate, page_size, tokens
    )
    position = jnp.cumsum(leads, dtype=jnp.int32) - 1
    writes = (tile == 0) & (pl.program_id(1) == 0) & (split == 0)
    plt.store(prefix_ref.at[sequence], jnp.zeros_like(sequence), mask=is_alone & writes)
    if k_scale_ref is not None:
        scale = scale * k_scale_ref[...]
    row = tile * block_rows + arange(block_rows)
    index_in_tile = quotient(row, tokens * group_size)
    token, head = remainder(quotient(row, group_size), tokens), remainder(row, group_size)

    def attend(turn, _):
        # Find the split's share of the keys.
        turn = lax.convert_element_type(turn, jnp.int32)
        leader = jnp.sum(jnp.where(leads & (position == turn), sequence, 0), 0, dtype=jnp.int32)
        members, length = find_members(table_ref, len_ref, tiles, leader, page_size, tokens)
        writes_to = jnp.where((members >= 0) & writes, members, batch_size)
        lengths = jnp.full_like(members, length)
        plt.store(prefix_ref.at[writes_to], lengths, mask=writes_to < batch_size)
        first, count, _ = share_of_tiles(0, length, split, tiles.num_states, block_kv)

        # Load the queries; they stay.
        is_own = index_in_tile[:, None] == arange(tiles.members)[None, :]
        member = jnp.max(jnp.where(is_own, members[None, :], -1), 1)
        is_row = (member >= 0) & (count > 0)
        member = jnp.where(is_row, member, batch_size)
        place = member, token, head
        q, row_scale = load_q(
            q_ref, place, is_row, scale, v_ref, head_dim, head_dim_v, block_d, block_dv, upcast
        )
        m_i, l_i, acc = no_keys(block_rows, block_dv, upcast)

        # Visit the split's tiles of keys.
        def visit(index, carry):
            m_i, l_i, acc = carry
            start = (first + lax.convert_element_type(index, jnp.int32)) * block_kv
            exists = start + arange(block_kv) < length
            page, slot = locate_keys(
                table_ref, start, length, num_pages, page_size, block_kv, leader
            )
            # s = scale · q kᵀ
            k = load_keys(
                k_ref, (page, slot), v_ref, exists, head_dim, head_dim_v, block_d, block_dv, upcast
            )
            s = scores(q, k, rule._replace(scale=row_scale))
            # p = exp(s - max), and rescale what was accumulated
            p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, rule.exp2_scale)
            acc = [x * alpha[:, None] for x in acc]
            p = p.astype(q[0].dtype)
            # acc += p v
            v = load_values(v_ref, (page, slot), exists, k, head_dim_v, block_dv, upcast)
            acc = add_pv(acc, p, v)
            return m_i, l_i, acc

        m_i, l_i, acc = lax.fori_loop(0, count, visit, (m_i, l_i, acc))

        # Store the running softmax.
        plt.store(maximum_ref.at[member, head, token], m_i, mask=is_row)
        plt.store(sum_ref.at[member, head, token], l_i, mask=is_row)
        store_out(acc_ref, acc, place, is_row, head_dim_v, block_dv)

    lax.fori_loop(0, jnp.sum(leads.astype(jnp.int32), 0), attend, None)


def join_prefix(cascade, block_kv, keys, token, head, is_row, softmax, size, block_size):
    """Merge m_i, l_i and acc with the running softmax over the `keys` of a prefix."""

    def visit(state, softmax):
        m_i, l_i, acc = softmax
        state = lax.convert_element_type(state, jnp.int32)
        place = (jnp.full_like(token, state), head, token)
        maximum = plt.load(cascade.maxima.at[place], mask=is_row, other=float("-inf"))
        total = plt.load(cascade.sums.at[place], mask=is_row, other=0.0)
        m_new = jnp.maximum(m_i, maximum)
        m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new)
        alpha, beta = jnp.exp2(m_i - m_safe), jnp.exp2(maximum - m_safe)
        acc = [x * alpha[:, None] for x in acc]
        acc = add_stored(acc, cascade.accs, (state, token, head), is_row, beta, size, block_size)
        return m_new, l_i * alpha + total * beta, acc

    states = splits_with_keys(0, keys, cascade.accs.shape[0], block_kv)
    return lax.fori_loop(0, states, visit, softmax)


def attend_to_shared_pages(
    operands: DecodeOperands[Array], spec: DecodeSpec, block_kv: int, backend: Backend
) -> tuple[Cascade, int] | None:
    """Return a `Cascade` and its tiles' keys; None if it gains nothing for these shapes."""
    tile = cascade_tile(spec)
    if tile is None:
        return None
    q, k_pages, v_pages, block_tables, seq_lens, _, k_scale, *_ = operands
    config = config_of("paged_decode", tile, backend)
    tiles = cascade_tiles(spec, tile, config, block_kv, num_sms(backend.target))
    rows, heads = block_rows(tile, config), ("head", tile.group_size)

    def place(tile, head, _of_sequences, split):
        return {"head": head, "split": split}

    def of(x, *axes):
        return block_spec(x, place, *axes)

    states, batch = tiles.num_states, spec.batch
    accs = (states, batch, spec.tokens, spec.heads_q, spec.head_dim_v)
    statistics = (states, batch, spec.heads_q, spec.tokens)
    results = (
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        *(jax.ShapeDtypeStruct(x, jnp.float32) for x in (accs, statistics, statistics)),
    )
    of_statistics = of(results[2], "split", ALL, heads, ALL)
    arguments = decode_arguments(tile, k_pages, backend.target)
    del arguments["window_left"]
    cascade = Cascade(
        *launch(
            "paged_decode",
            shared_pages_kernel,
            lambda config: (pl.cdiv(tile.rows, rows), tile.heads_kv, tile.batch, states),
            (q, k_pages, v_pages, block_tables, seq_lens, k_scale),
            (
                of(q, ALL, ALL, heads, COLUMNS),
                of(k_pages, ALL, ALL, "head", COLUMNS),
                of(v_pages, ALL, ALL, "head", COLUMNS),
                of(block_tables, ALL, ALL),
                of(seq_lens, ALL),
                of(k_scale, "head"),
            ),
            results,
            (
                of(results[0], ALL),
                of(results[1], "split", ALL, ALL, heads, COLUMNS),
                of_statistics,
                of_statistics,
            ),
            arguments | {"tiles": tiles, "tokens": spec.tokens, "block_rows": rows},
            tile,
            backend,
        )
    )
    return cascade, tiles.block_kv
