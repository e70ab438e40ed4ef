"""Cascades: pages that several sequences begin with are read once for a tile of sequences.

Each row gets a running softmax, which `paged_decode` continues over other keys. Ye et al. 2024
(cascade inference); Juravsky et al. 2024 (Hydragen).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from torch_attn.kernels.library.arguments import cache_of, decode_arguments
from torch_attn.kernels.library.pages import locate_keys, share_of_tiles, splits_with_keys
from torch_attn.kernels.library.prefixes import find_leaders, find_members
from torch_attn.kernels.library.quantized import (
    add_pv,
    add_stored,
    load_keys,
    load_q,
    load_values,
    locate_pools,
    no_keys,
    scores,
    store_out,
)
from torch_attn.kernels.library.softmax import online_softmax_update
from torch_attn.launch import KernelCall, Prepared, config_of, launch
from torch_attn.targets import num_sms
from twin_attention.contract.operands import DecodeOperands
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.splits import CascadeTiles, block_rows, cascade_tile, cascade_tiles


class Cascade(NamedTuple):
    """Running softmaxes over keys that sequences share.

    Attributes:
        prefixes: shared keys of each sequence, [B] int32.
        accs: [N, B, T, Hq, Dv], float32, not normalised. Splits without keys are not written.
        maxima, sums: [N, B, Hq, T], float32, the m_i and l_i of `softmax.online_softmax_update`.
        block_kv: keys of a tile of shared keys.
    """

    prefixes: Any
    accs: Any
    maxima: Any
    sums: Any
    num_states: Any = None
    block_kv: Any = None


@triton.jit(do_not_specialize=["batch_size", "num_pages", "max_pages"])
def shared_pages_kernel(
    q_ptr, cache, cascade, tiles, q_strides, batch_size, num_pages, max_pages, rule,
    HEADS_KV: tl.constexpr, TOKENS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UPCAST: tl.constexpr,
    PAST_2G: tl.constexpr, PDL: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_ROWS rows of one kv head of tiles, over a split of their prefixes.

    Row r is a row of `paged_decode_kernel`, of the tile's sequence ``r // (TOKENS * GROUP_SIZE)``.
    Operands and accumulation: as there; it writes a `Cascade`; tiles: the constants of
    `CascadeTiles`. Grid: (row tiles, kv heads, sequences by tiles.members) in one axis, row tiles
    fastest, and splits. A program takes the tiles whose first sequence is one of its `members`: a
    single tile if all share pages. All rows see all keys. PDL: the decode may begin to start once
    only these products are left.
    """
    # Locate the tiles that have a prefix.
    num_tiles: tl.constexpr = (tiles.members * TOKENS * GROUP_SIZE + BLOCK_ROWS - 1) // BLOCK_ROWS
    tile = tl.program_id(0) % num_tiles
    head_kv = (tl.program_id(0) // num_tiles % HEADS_KV).to(tl.int64)
    split = tl.program_id(1)
    candidate = tl.program_id(0) // num_tiles // HEADS_KV * tiles.members
    sequence, leads, is_alone = find_leaders(cache, tiles, candidate, batch_size, max_pages, TOKENS)
    place = tl.cumsum(leads.to(tl.int32), 0) - 1
    num_leaders = tl.sum(leads.to(tl.int32), 0)
    writes = (tile == 0) & (head_kv == 0) & (split == 0)
    tl.store(cascade.prefixes + sequence, 0, mask=is_alone & writes)
    if PDL:
        gdc_launch_dependents()
    k_base, v_base, scale = locate_pools(cache, head_kv, rule.scale)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    index_in_tile = row // (TOKENS * GROUP_SIZE)
    token = row // GROUP_SIZE % TOKENS
    head = head_kv * GROUP_SIZE + row % GROUP_SIZE

    # Hoist nothing: the search needs the registers before the products do.
    for which in tl.range(0, num_leaders, disable_licm=True):
        # Find the split's share of the keys.
        leader = tl.sum(tl.where(leads & (place == which), sequence, 0), 0)
        members, length = find_members(cache, tiles, leader, batch_size, max_pages, TOKENS)
        tl.store(cascade.prefixes + members, length, mask=(members >= 0) & writes)
        first, count, _ = share_of_tiles(0, length, split, tiles.num_states, BLOCK_KV)
        table_ptr = cache.tables + leader.to(tl.int64) * cache.table_stride

        # Load the queries; they stay.
        is_member = index_in_tile[:, None] == tl.arange(0, tiles.members)[None, :]
        member = tl.max(tl.where(is_member, members[None, :], -1), 1)
        is_row = (member >= 0) & (count > 0)
        member = member.to(tl.int64)
        at = member, token.to(tl.int64), head
        q, row_scale = load_q(
            q_ptr, at, q_strides, is_row, scale, cache,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, UPCAST,
        )  # fmt: skip
        m_i, l_i, acc = no_keys(BLOCK_ROWS, BLOCK_DV, UPCAST)

        # Visit the split's tiles of keys.
        for index in tl.range(0, count):
            start = (first + index) * BLOCK_KV
            exists = start + tl.arange(0, BLOCK_KV) < length
            page, slot = locate_keys(
                table_ptr, start, length, num_pages, cache.page_size, BLOCK_KV, PAST_2G
            )
            # s = scale · q kᵀ
            k = load_keys(
                k_base, (page, slot), cache, exists, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, UPCAST
            )
            s = scores(q, k, row_scale, rule.softcap, rule.scale_first)
            # p = exp(s - max), and rescale what was accumulated
            p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, rule.exp2_scale)
            acc = [x * alpha[:, None] for x in acc]
            p = p.to(q[0].dtype)
            # acc += p v
            v = load_values(v_base, (page, slot), cache, exists, k, HEAD_DIM_V, BLOCK_DV, UPCAST)
            acc = add_pv(acc, p, v)

        # Store the running softmax.
        heads_q: tl.constexpr = HEADS_KV * GROUP_SIZE
        row_size: tl.constexpr = HEAD_DIM_V * len(acc)
        rows = split.to(tl.int64) * batch_size * TOKENS * heads_q
        of_row = rows + (member * heads_q + head) * TOKENS + token
        tl.store(cascade.maxima + of_row, m_i, mask=is_row)
        tl.store(cascade.sums + of_row, l_i, mask=is_row)
        out_row = rows + (member * TOKENS + token) * heads_q + head
        store_out(cascade.accs, acc, (out_row,), (row_size,), is_row, HEAD_DIM_V, BLOCK_DV)


@triton.jit
def join_prefix(
    cascade, keys, rows, lse_row, out_row, is_row, acc, m_i, l_i, SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Merge a running softmax with the ones over a prefix's keys; return acc, m_i and l_i."""
    size: tl.constexpr = SIZE * len(acc)
    for state in tl.range(0, splits_with_keys(0, keys, cascade.num_states, cascade.block_kv)):
        at = tl.cast(state, tl.int64) * rows
        maximum = tl.load(cascade.maxima + at + lse_row, mask=is_row, other=float("-inf"))
        total = tl.load(cascade.sums + at + lse_row, mask=is_row, other=0.0)
        m_new = tl.maximum(m_i, maximum)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, beta = tl.exp2(m_i - m_safe), tl.exp2(maximum - m_safe)
        acc = [x * alpha[:, None] for x in acc]
        acc = add_stored(
            acc, cascade.accs + at * size, (out_row,), (size,), is_row, beta, SIZE, BLOCK_SIZE
        )
        l_i = l_i * alpha + total * beta
        m_i = m_new
    return acc, m_i, l_i


def attend_to_shared_pages(
    operands: DecodeOperands[Tensor], spec: DecodeSpec, block_kv: int, backend: Backend
) -> tuple[Cascade, CascadeTiles] | None:
    """Launch `shared_pages_kernel`; None if it gains nothing; block_kv: the decode's."""
    tile = cascade_tile(spec)
    if tile is None:
        return None
    q, config = operands.q, config_of("paged_decode", tile, backend, operands.q.device)
    tiles = cascade_tiles(spec, tile, config, block_kv, num_sms(q.device, backend.target))
    rows = tiles.num_states, spec.batch, spec.heads_q, spec.tokens
    maxima, sums = (q.new_empty(rows, dtype=torch.float32) for _ in range(2))
    accs = maxima.new_empty((*rows[:2], spec.tokens, spec.heads_q, spec.head_dim_v))
    cascade = Cascade(operands.seq_lens.new_empty((spec.batch,)), accs, maxima, sums)
    launch(
        "paged_decode",
        shared_pages_kernel,
        _prepare,
        (q, cache_of(operands), cascade),
        tile,
        backend,
        tiles,
        config.block_kv,
    )
    return cascade, tiles


def _prepare(call: KernelCall) -> Prepared:
    tile, (tiles, block_kv) = call.spec, call.constants
    assert call.config.block_kv == block_kv, "the decode counts other tiles"
    q, cache, cascade = call.layouts
    rows = block_rows(tile, call.config)
    grid = triton.cdiv(tile.rows, rows) * tile.heads_kv * tile.batch, tiles.num_states
    arguments = decode_arguments(tile, call.target, q, cache)
    return grid, arguments | {
        "cascade": cascade,
        "tiles": CascadeTiles(*map(tl.constexpr, tiles)),
        "batch_size": q.shape[0],
        "TOKENS": tile.tokens // tiles.members,
        "PDL": call.target == "sm90",
        "BLOCK_ROWS": rows,
    }


def cascade_argument(cascade: Cascade | None, tiles: CascadeTiles) -> Cascade | None:
    if cascade is None:
        return None
    return cascade._replace(
        num_states=tl.constexpr(tiles.num_states), block_kv=tl.constexpr(tiles.block_kv)
    )
