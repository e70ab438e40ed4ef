"""Cascades: pages that sequences of a batch begin with are read once for a tile of sequences.

`find_prefixes` compares page tables. Then the rows of a tile's sequences see the shared pages as
those of one sequence, which gives each a partial result. `paged_decode` gives those over its other
keys, and `combine` merges them. Ye et al. 2024 (cascade inference); Juravsky et al. 2024
(Hydragen).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_attn.kernels.library.arguments import decode_arguments
from pallas_attn.kernels.library.pages import load_rows_at, locate_keys, share_of_tiles
from pallas_attn.kernels.library.quantized import add_pv, load_q, scores, store_out, unpack
from pallas_attn.kernels.library.softmax import online_softmax_update, row_statistics
from pallas_attn.kernels.library.tiles import arange, cdiv
from pallas_attn.launch import ALL, COLUMNS, block_spec, launch
from pallas_attn.targets import num_sms
from twin_attention.contract.operands import DecodeOperands
from twin_attention.contract.spec import DecodeSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.splits import block_rows, cascade_tile, choose_splits

NO_SEQUENCE = 2**31 - 1


class Prefixes(NamedTuple):
    """Hold what the sequences of a batch have in common at their beginning.

    Attributes:
        lens: keys that each sequence shares with others, [B] int32, a multiple of all tiles of
            keys.
        members: sequences that share them, [B, members] int32. A tile has the row of its first
            sequence, and -1 behind its last one; other rows begin with -1.
        tile: the problem of a tile (`cascade_tile`).
        num_states: parts that the shared keys of a sequence are divided into.
        block_kv: keys of a tile of keys of these.
    """

    lens: Array
    members: Array
    tile: DecodeSpec
    num_states: int
    block_kv: int


def pages_before(len_ref, sequence, exists, capacity, tokens, page_size):
    """Return how many pages of sequences are full of keys that all their new tokens see."""
    length = plt.load(len_ref.at[sequence], mask=exists, other=0)
    length = jnp.minimum(jnp.maximum(length, 0), capacity)
    return jnp.maximum(length - tokens, 0) // page_size


def find_prefixes_kernel(
    table_ref,
    len_ref,
    prefix_ref,
    member_ref,
    *,
    page_size,
    tokens,
    members,
    block_batch,
    block_keys,
    block_pages,
):
    """One program finds the tile of which one sequence is the first, if there is one.

    Operands: page tables [B, max_pages], int32; lens [B], int32; prefixes [B] and members [B,
    members], int32, as `Prefixes` has them. Grid: batch. The sequences whose first page is the
    same, in their order, make tiles of `members`. A tile's prefix is the pages that all of them
    begin with, before any new token, cut to a multiple of block_keys keys. Entries past a
    sequence's last page do not count. block_batch is a power of two, at least B.
    """
    # Which sequences begin with the same page, and how many of them come before this one.
    own = pl.program_id(0)
    batch_size, max_pages = table_ref.shape
    capacity = max_pages * page_size
    other = arange(block_batch)
    exists = other < batch_size
    pages = pages_before(len_ref, other, exists, capacity, tokens, page_size)
    first_entry = jnp.zeros_like(other)
    # Loaded without waiting for the lengths, which say whether they count.
    page = plt.load(table_ref.at[other, first_entry], mask=exists, other=0)
    is_own = other == own
    own_pages = jnp.max(jnp.where(is_own, pages, 0), 0)
    own_page = jnp.max(jnp.where(is_own, page, -(2**31)), 0)
    is_alike = (pages > 0) & (own_pages > 0) & (page == own_page)
    rank = jnp.sum((is_alike & (other < own)).astype(jnp.int32), 0)
    slot = arange(members)
    is_first = rank % members == 0

    @pl.when(jnp.logical_not(is_first))
    def _():
        plt.store(member_ref.at[own, slot], jnp.full_like(slot, -1))

    @pl.when(is_first)
    def _():
        # The sequences of the tile that it is the first of.
        follows = is_own | (is_alike & (other > own))
        position = jnp.cumsum(follows, dtype=jnp.int32) - 1
        is_placed = follows[None, :] & (position[None, :] == slot[:, None])
        member = jnp.max(jnp.where(is_placed, other[None, :], -1), 1)
        is_member = member >= 0
        row = jnp.where(is_member, member, batch_size)
        count = jnp.sum(is_member.astype(jnp.int32), 0)
        ends = pages_before(len_ref, row, is_member, capacity, tokens, page_size)
        most = jnp.where(count > 1, jnp.min(jnp.where(is_member, ends, own_pages), 0), 0)

        # The pages that all of them begin with.
        def visit(step, common):
            entry = lax.convert_element_type(step, jnp.int32) * block_pages + arange(block_pages)
            shape = (members, block_pages)
            mine = plt.load(
                table_ref.at[jnp.full_like(entry, own), entry], mask=entry < most, other=0
            )
            inside = is_member[:, None] & (entry < most)[None, :]
            place = jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(entry[None, :], shape)
            theirs = plt.load(table_ref.at[place], mask=inside, other=0)
            differs = inside & (theirs != mine[None, :])
            first = jnp.min(jnp.where(differs, place[1], NO_SEQUENCE), 1)
            return jnp.minimum(common, jnp.min(first, 0))

        common = lax.fori_loop(0, cdiv(most, block_pages), visit, most)
        keys = common * page_size // block_keys * block_keys
        plt.store(prefix_ref.at[row], jnp.full_like(row, keys), mask=is_member)
        plt.store(member_ref.at[own, slot], jnp.where(keys > 0, member, -1))


def shared_pages_kernel(
    _outs_ref,
    _lses_ref,
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    k_scale_ref,
    v_scale_ref,
    prefix_ref,
    member_ref,
    outs_ref,
    lses_ref,
    *,
    num_splits,
    rule,
    tokens,
    group_size,
    head_dim,
    head_dim_v,
    block_d,
    block_dv,
    upcast,
    block_batch,
    block_rows,
    block_kv,
):
    """One program computes block_rows rows of one kv head of tiles over a split of their prefixes.

    Row r is that of `paged_decode_kernel` of the tile's sequence ``r // (tokens * group_size)``.
    Operands, of this program's kv head: q [B, T, group, D], the pools and scales as there; tables
    [B, max_pages]; the prefixes [B] and the members [B, members] of `find_prefixes_kernel`; outs
    [B, T, group, Dv] and lses [B, group, T] of its split, float32, which are inputs as well, and of
    splits without keys are not written. Grid: (row tiles, kv heads, tiles, splits). The tiles are
    as many as full ones would be; where more have a prefix, a program takes several. All rows see
    all keys. Loop invariant: `online_softmax_update`. Accumulation: float32, exponents in base 2, p
    cast to the products' dtype. block_batch is a power of two, at least the batch.
    """
    # Locate the tiles that have a prefix.
    tile, split = pl.program_id(0), pl.program_id(3)
    (num_pages, page_size, _), scale = k_ref.shape, rule.scale
    batch_size, members = member_ref.shape
    other = arange(block_batch)
    first_member = plt.load(
        member_ref.at[other, jnp.zeros_like(other)], mask=other < batch_size, other=-1
    )
    leads = first_member >= 0
    position = jnp.cumsum(leads, dtype=jnp.int32) - 1
    if k_scale_ref is not None:
        scale = scale * k_scale_ref[...]
    row = tile * block_rows + arange(block_rows)
    member = row // (tokens * group_size)
    token, head = row // group_size % tokens, row % group_size
    first_tile, step = pl.program_id(2), pl.num_programs(2)

    def attend(turn, _):
        # Find the split's share of the keys.
        which = first_tile + lax.convert_element_type(turn, jnp.int32) * step
        leader = jnp.sum(jnp.where(leads & (position == which), other, 0), 0, dtype=jnp.int32)
        length = plt.load(prefix_ref.at[leader])
        first, count, _ = share_of_tiles(0, length, split, num_splits, block_kv)

        # Load the queries; they stay.
        sequence = plt.load(member_ref.at[leader, member], mask=member < members, other=-1)
        is_row = (sequence >= 0) & (count > 0)
        sequence = jnp.where(is_row, sequence, batch_size)
        place = sequence, token, head
        q, row_scale = load_q(q_ref, place, is_row, scale, head_dim, block_d, upcast)
        m_i = jnp.full((block_rows,), float("-inf"), jnp.float32)
        l_i = jnp.zeros((block_rows,), jnp.float32)
        acc = [jnp.zeros((block_rows, block_dv), jnp.float32) for _ in q]

        # Visit the split's tiles of keys.
        def visit(index, carry):
            m_i, l_i, acc = carry
            start = (first + lax.convert_element_type(index, jnp.int32)) * block_kv
            exists = start + arange(block_kv) < length
            page, slot = locate_keys(
                table_ref, start, length, num_pages, page_size, block_kv, leader
            )
            # s = scale · q kᵀ
            k = load_rows_at(k_ref, (page, slot), exists, head_dim, block_d)
            s = scores(q, unpack(k, upcast), rule._replace(scale=row_scale))
            # p = exp(s - max), and rescale what was accumulated
            p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, rule.exp2_scale)
            acc = [x * alpha[:, None] for x in acc]
            p = p.astype(q[0].dtype)
            # acc += p v
            v = load_rows_at(v_ref, (page, slot), exists, head_dim_v, block_dv)
            acc = add_pv(acc, p, unpack(v, upcast))
            return m_i, l_i, acc

        m_i, l_i, acc = lax.fori_loop(0, count, visit, (m_i, l_i, acc))

        # Normalise and store.
        l_safe, lse = row_statistics(m_i, l_i)
        out = [x / l_safe[:, None] for x in acc]
        if v_scale_ref is not None:
            v_scale = v_scale_ref[...]
            out = [x * v_scale for x in out]
        plt.store(lses_ref.at[sequence, head, token], lse, mask=is_row)
        store_out(outs_ref, out, place, is_row, head_dim_v, block_dv)

    num_tiles = jnp.sum(leads, dtype=jnp.int32)
    lax.fori_loop(0, cdiv(jnp.maximum(num_tiles - first_tile, 0), step), attend, None)


def find_prefixes(
    operands: DecodeOperands[Array], spec: DecodeSpec, block_kv: int, backend: Backend
) -> Prefixes | None:
    """Call `find_prefixes_kernel`; None where the shapes leave a cascade nothing to gain.

    Args:
        block_kv: keys of a tile of the decode over the other keys.
    """
    tile = cascade_tile(spec)
    if tile is None:
        return None
    config = backend.configs(tile)["paged_decode"]
    count = tile.tokens // spec.tokens
    tables, lens = operands.block_tables, operands.seq_lens
    results = (
        jax.ShapeDtypeStruct((spec.batch,), jnp.int32),
        jax.ShapeDtypeStruct((spec.batch, count), jnp.int32),
    )

    def of(x, *axes):
        return block_spec(x, lambda batch: {}, *axes)

    prefixes, members = launch(
        "find_prefixes",
        find_prefixes_kernel,
        lambda config: (spec.batch,),
        (tables, lens),
        (of(tables, ALL, ALL), of(lens, ALL)),
        results,
        (of(results[0], ALL), of(results[1], ALL, ALL)),
        {
            "page_size": spec.cache.page_size,
            "tokens": spec.tokens,
            "members": count,
            "block_batch": 1 << (spec.batch - 1).bit_length(),
            "block_keys": max(block_kv, config.block_kv),
        },
        spec,
        backend,
    )
    splits = choose_splits(tile, config, num_sms(backend.target))
    return Prefixes(prefixes, members, tile, splits, config.block_kv)


def attend_to_prefixes(
    operands: DecodeOperands[Array],
    prefixes: Prefixes,
    outs: Array,
    lses: Array,
    backend: Backend,
) -> tuple[Array, Array]:
    """Call `shared_pages_kernel`, which writes the last parts of outs and lses.

    Args:
        operands: those of the decode; an 8-bit pool is packed.
        prefixes: of its sequences.
        outs, lses: [N, B, T, Hq, Dv] and [N, B, Hq, T], float32.

    Returns:
        outs and lses.
    """
    q, k_pages, v_pages, block_tables, _, _, k_scale, v_scale, _ = operands
    tile, (batch, count) = prefixes.tile, prefixes.members.shape
    rows = block_rows(tile, backend.configs(tile)["paged_decode"])
    first, heads = len(outs) - prefixes.num_states, ("head", tile.group_size)

    def place(tile, head, _of_sequences, split):
        return {"head": head, "state": first + split}

    def of(x, *axes):
        return block_spec(x, place, *axes)

    of_outs, of_lses = ("state", ALL, ALL, heads, COLUMNS), ("state", ALL, heads, ALL)
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (outs, lses))
    return launch(
        "paged_decode",
        shared_pages_kernel,
        lambda config: (pl.cdiv(tile.rows, rows), tile.heads_kv, tile.batch, prefixes.num_states),
        (
            outs,
            lses,
            q,
            k_pages,
            v_pages,
            block_tables,
            k_scale,
            v_scale,
            prefixes.lens,
            prefixes.members,
        ),
        (
            of(outs, *of_outs),
            of(lses, *of_lses),
            of(q, ALL, ALL, heads, COLUMNS),
            of(k_pages, ALL, ALL, "head", COLUMNS),
            of(v_pages, ALL, ALL, "head", COLUMNS),
            of(block_tables, ALL, ALL),
            of(k_scale, "head"),
            of(v_scale, "head"),
            of(prefixes.lens, ALL),
            of(prefixes.members, ALL, ALL),
        ),
        results,
        (of(results[0], *of_outs), of(results[1], *of_lses)),
        {
            name: x
            for name, x in decode_arguments(tile, k_pages, v_pages, backend.target).items()
            if name != "window_left"
        }
        | {
            "tokens": tile.tokens // count,
            "num_splits": prefixes.num_states,
            "block_batch": 1 << (batch - 1).bit_length(),
            "block_rows": rows,
        },
        tile,
        backend,
        aliases={0: 0, 1: 1},
    )
