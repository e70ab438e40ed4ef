"""Cascades: pages that sequences of a batch begin with are read once for a tile of sequences.

`find_prefixes` compares page tables. Then the rows of a tile's sequences see the shared pages as
those of one sequence, which gives each a partial result. `paged_decode` gives those over its other
keys, and `combine` merges them. Ye et al. 2024 (cascade inference); Juravsky et al. 2024
(Hydragen).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from torch_attn.kernels.library.arguments import cache_of, decode_arguments
from torch_attn.kernels.library.pages import load_rows_at, locate_keys, share_of_tiles
from torch_attn.kernels.library.quantized import add_pv, load_q, scores, store_out, unpack
from torch_attn.kernels.library.softmax import online_softmax_update, row_statistics
from torch_attn.launch import KernelCall, Prepared, launch
from torch_attn.targets import num_sms
from twin_attention.contract.operands import DecodeOperands
from twin_attention.contract.spec import DecodeSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.splits import block_rows, cascade_tile, choose_splits

NO_SEQUENCE = tl.constexpr(2147483647)


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

    lens: Tensor
    members: Tensor
    tile: DecodeSpec
    num_states: int
    block_kv: int


@triton.jit
def pages_before(lens_ptr, sequence, exists, capacity, tokens, PAGE_SIZE: tl.constexpr):
    """Return how many pages of sequences are full of keys that all their new tokens see."""
    length = tl.load(lens_ptr + sequence, mask=exists, other=0)
    length = tl.minimum(tl.maximum(length, 0), capacity)
    return tl.maximum(length - tokens, 0) // PAGE_SIZE


@triton.jit(do_not_specialize=["table_stride", "batch_size", "max_pages"])
def find_prefixes_kernel(
    tables_ptr,
    lens_ptr,
    prefixes_ptr,
    members_ptr,
    table_stride,
    batch_size,
    max_pages,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
):
    """One program finds the tile of which one sequence is the first, if there is one.

    Operands: page tables [B, max_pages], int32, with the given stride; lens [B], int32; prefixes
    [B] and members [B, MEMBERS], int32, as `Prefixes` has them. Grid: batch. The sequences whose
    first page is the same, in their order, make tiles of MEMBERS. A tile's prefix is the pages that
    all of them begin with, before any new token, cut to a multiple of BLOCK_KEYS keys. Entries
    past a sequence's last page do not count. BLOCK_BATCH is a power of two, at least B.
    """
    # Which sequences begin with the same page, and how many of them come before this one.
    own = tl.program_id(0)
    capacity = max_pages * PAGE_SIZE
    other = tl.arange(0, BLOCK_BATCH)
    exists = other < batch_size
    pages = pages_before(lens_ptr, other, exists, capacity, TOKENS, PAGE_SIZE)
    # Loaded without waiting for the lengths, which say whether they count.
    page = tl.load(tables_ptr + other.to(tl.int64) * table_stride, mask=exists, other=0)
    table_ptr = tables_ptr + own.to(tl.int64) * table_stride
    own_pages = pages_before(lens_ptr, own, True, capacity, TOKENS, PAGE_SIZE)
    own_page = tl.load(table_ptr)
    is_alike = (pages > 0) & (own_pages > 0) & (page == own_page)
    rank = tl.sum((is_alike & (other < own)).to(tl.int32), 0)
    slot = tl.arange(0, MEMBERS)
    if rank % MEMBERS > 0:
        tl.store(members_ptr + own * MEMBERS + slot, -1)
        return

    # The sequences of the tile that it is the first of.
    follows = (other == own) | (is_alike & (other > own))
    place = tl.cumsum(follows.to(tl.int32), 0) - 1
    is_placed = follows[None, :] & (place[None, :] == slot[:, None])
    member = tl.max(tl.where(is_placed, other[None, :], -1), 1)
    is_member = member >= 0
    count = tl.sum(is_member.to(tl.int32), 0)
    ends = pages_before(lens_ptr, member, is_member, capacity, TOKENS, PAGE_SIZE)
    most = tl.where(count > 1, tl.min(tl.where(is_member, ends, own_pages), 0), 0)

    # The pages that all of them begin with.
    common = most
    rows = tables_ptr + member.to(tl.int64)[:, None] * table_stride
    for start in tl.range(0, most, BLOCK_PAGES):
        entry = start + tl.arange(0, BLOCK_PAGES)
        mine = tl.load(table_ptr + entry, mask=entry < most, other=0)
        inside = is_member[:, None] & (entry < most)[None, :]
        theirs = tl.load(rows + entry[None, :], mask=inside, other=0)
        differs = inside & (theirs != mine[None, :])
        first = tl.min(tl.where(differs, entry[None, :], NO_SEQUENCE), 1)
        common = tl.minimum(common, tl.min(first, 0))
    keys = common * PAGE_SIZE // BLOCK_KEYS * BLOCK_KEYS
    tl.store(prefixes_ptr + member, keys, mask=is_member)
    tl.store(members_ptr + own * MEMBERS + slot, tl.where(keys > 0, member, -1))


@triton.jit(do_not_specialize=["num_pages"])
def shared_pages_kernel(
    q_ptr,
    cache,
    prefixes_ptr,
    members_ptr,
    outs_ptr,
    lses_ptr,
    q_strides,
    batch_size,
    num_pages,
    first_state,
    num_splits,
    rule,
    HEADS_KV: tl.constexpr,
    TOKENS: tl.constexpr,
    MEMBERS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    UPCAST: tl.constexpr,
    PAST_2G: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """One program computes BLOCK_ROWS rows of one kv head of tiles over a split of their prefixes.

    Row r is that of `paged_decode_kernel` of the tile's sequence ``r // (TOKENS * GROUP_SIZE)``.
    Operands: q, the cache as there; prefixes and members of `find_prefixes_kernel`; outs [N, B, T,
    Hq, Dv] and lses [N, B, Hq, T], float32 and contiguous, of which the splits are those from
    first_state on; splits without keys are not written. Grid: (row tiles, kv heads, tiles) in one
    axis, row tiles fastest, and splits. The tiles are as many as full ones would be; where more
    have a prefix, a program takes several. All rows see all keys. Loop invariant:
    `online_softmax_update`. Accumulation: float32, exponents in base 2, p cast to the products'
    dtype. BLOCK_BATCH is a power of two, at least the batch.

    PDL: the decode over the other keys, which depends on nothing of this launch, may begin.
    """
    if PDL:
        gdc_launch_dependents()
    # Locate the tiles that have a prefix.
    num_tiles: tl.constexpr = (MEMBERS * TOKENS * GROUP_SIZE + BLOCK_ROWS - 1) // BLOCK_ROWS
    tile = tl.program_id(0) % num_tiles
    head_kv = (tl.program_id(0) // num_tiles % HEADS_KV).to(tl.int64)
    split = tl.program_id(1)
    other = tl.arange(0, BLOCK_BATCH)
    member = tl.load(members_ptr + other * MEMBERS, mask=other < batch_size, other=-1)
    leads = (member >= 0).to(tl.int32)
    place = tl.cumsum(leads, 0) - 1
    k_base = cache.k + head_kv * cache.k_strides.head
    v_base = cache.v + head_kv * cache.v_strides.head
    scale = rule.scale
    if cache.k_scale is not None:
        scale *= tl.load(cache.k_scale + head_kv * cache.k_scale_stride)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    member = row // (TOKENS * GROUP_SIZE)
    token = row // GROUP_SIZE % TOKENS
    head = head_kv * GROUP_SIZE + row % GROUP_SIZE

    first_tile = tl.program_id(0) // num_tiles // HEADS_KV
    step = tl.num_programs(0) // num_tiles // HEADS_KV
    for which in tl.range(first_tile, tl.sum(leads, 0), step):
        # Find the split's share of the keys.
        leader = tl.sum(tl.where((place == which) & (leads > 0), other, 0), 0).to(tl.int64)
        length = tl.load(prefixes_ptr + leader)
        first, count, _ = share_of_tiles(0, length, split, num_splits, BLOCK_KV)
        table_ptr = cache.tables + leader * cache.table_stride

        # Load the queries; they stay.
        sequence = tl.load(members_ptr + leader * MEMBERS + member, mask=member < MEMBERS, other=-1)
        is_row = (sequence >= 0) & (count > 0)
        sequence = sequence.to(tl.int64)
        at = sequence, token.to(tl.int64), head
        q, row_scale = load_q(q_ptr, at, q_strides, is_row, scale, HEAD_DIM, BLOCK_D, UPCAST)
        m_i = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_ROWS], tl.float32)
        acc = [tl.zeros([BLOCK_ROWS, BLOCK_DV], tl.float32) for _ in q]

        # Visit the split's tiles of keys.
        for index in tl.range(0, count):
            start = (first + index) * BLOCK_KV
            exists = start + tl.arange(0, BLOCK_KV) < length
            page, slot = locate_keys(
                table_ptr, start, length, num_pages, cache.page_size, BLOCK_KV, PAST_2G
            )
            # s = scale · q kᵀ
            k = load_rows_at(k_base, (page, slot), cache.k_strides, exists, HEAD_DIM, BLOCK_D)
            s = scores(q, unpack(k, UPCAST), row_scale, rule.softcap, rule.scale_first)
            # p = exp(s - max), and rescale what was accumulated
            p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, rule.exp2_scale)
            acc = [x * alpha[:, None] for x in acc]
            p = p.to(q[0].dtype)
            # acc += p v
            v = load_rows_at(v_base, (page, slot), cache.v_strides, exists, HEAD_DIM_V, BLOCK_DV)
            acc = add_pv(acc, p, unpack(v, UPCAST))

        # Normalise and store.
        l_safe, lse = row_statistics(m_i, l_i)
        out = [x / l_safe[:, None] for x in acc]
        if cache.v_scale is not None:
            v_scale = tl.load(cache.v_scale + head_kv * cache.v_scale_stride)
            out = [x * v_scale for x in out]
        heads_q: tl.constexpr = HEADS_KV * GROUP_SIZE
        row_size: tl.constexpr = HEAD_DIM_V * len(out)
        rows = (first_state + split).to(tl.int64) * batch_size * TOKENS * heads_q
        tl.store(lses_ptr + rows + (sequence * heads_q + head) * TOKENS + token, lse, mask=is_row)
        out_row = rows + (sequence * TOKENS + token) * heads_q + head
        store_out(outs_ptr, out, (out_row,), (row_size,), is_row, HEAD_DIM_V, BLOCK_DV)


def find_prefixes(
    operands: DecodeOperands[Tensor], spec: DecodeSpec, block_kv: int, backend: Backend
) -> Prefixes | None:
    """Launch `find_prefixes_kernel`; None where the shapes leave a cascade nothing to gain.

    Args:
        block_kv: keys of a tile of the decode over the other keys.
    """
    tile = cascade_tile(spec)
    if tile is None:
        return None
    config = backend.configs(tile)["paged_decode"]
    lens = operands.seq_lens.new_empty((spec.batch,))
    members = operands.seq_lens.new_empty((spec.batch, tile.tokens // spec.tokens))
    launch(
        "find_prefixes",
        find_prefixes_kernel,
        _prepare_find,
        (operands.block_tables, operands.seq_lens, lens, members),
        spec,
        backend,
        max(block_kv, config.block_kv),
    )
    splits = choose_splits(tile, config, num_sms(lens.device, backend.target))
    return Prefixes(lens, members, tile, splits, config.block_kv)


def attend_to_prefixes(
    operands: DecodeOperands[Tensor],
    prefixes: Prefixes,
    outs: Tensor,
    lses: Tensor,
    backend: Backend,
) -> None:
    """Launch `shared_pages_kernel`, which writes the last parts of outs and lses.

    On SM90 the launch behind it may start while it runs.

    Args:
        operands: those of the decode; an 8-bit pool is packed.
        prefixes: of its sequences.
        outs, lses: [N, B, T, Hq, Dv] and [N, B, Hq, T], float32, contiguous.
    """
    launch(
        "paged_decode",
        shared_pages_kernel,
        _prepare_shared,
        (operands.q, cache_of(operands), prefixes.lens, prefixes.members, outs, lses),
        prefixes.tile,
        backend,
        prefixes.num_states,
    )


def _prepare_find(call: KernelCall) -> Prepared:
    """Return grid and arguments of `find_prefixes_kernel`."""
    spec, (block_keys,) = call.spec, call.constants
    tables, _, _, members = call.layouts
    return (spec.batch,), {
        "table_stride": tables.strides[0],
        "batch_size": spec.batch,
        "max_pages": spec.cache.max_pages,
        "PAGE_SIZE": spec.cache.page_size,
        "TOKENS": spec.tokens,
        "MEMBERS": members.shape[1],
        "BLOCK_BATCH": triton.next_power_of_2(spec.batch),
        "BLOCK_KEYS": block_keys,
    }


def _prepare_shared(call: KernelCall) -> Prepared:
    """Return grid and arguments of `shared_pages_kernel`."""
    tile, (splits,) = call.spec, call.constants
    q, cache, _, members, outs, _ = call.layouts
    batch, count = members.shape
    rows = block_rows(tile, call.config)
    return (triton.cdiv(tile.rows, rows) * tile.heads_kv * tile.batch, splits), (
        decode_arguments(tile, call.target, q, cache)
        | {
            "batch_size": batch,
            "first_state": outs.shape[0] - splits,
            "num_splits": splits,
            "TOKENS": tile.tokens // count,
            "MEMBERS": count,
            "PDL": call.target == "sm90",
            "BLOCK_BATCH": triton.next_power_of_2(batch),
            "BLOCK_ROWS": rows,
        }
    )
