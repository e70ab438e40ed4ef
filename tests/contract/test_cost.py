from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin_attention.contract.block_mask import BlockMask
from twin_attention.contract.cost import (
    backward_bytes,
    backward_flops,
    block_sparse_backward_flops,
    block_sparse_forward_flops,
    block_sparse_pairs,
    cache_bytes,
    decode_bytes,
    decode_flops,
    forward_bytes,
    forward_flops,
    paged_bytes,
    paged_flops,
    visible_pairs,
)
from twin_attention.contract.paged_spec import DecodeSpec, PagedCache, PagedSpec
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec, Window

SPEC = AttentionSpec(
    batch=2, seq_q=3, seq_kv=5, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=24,
    dtype="float16", scale=1.0,
)  # fmt: skip

DECODE = DecodeSpec(
    batch=3, tokens=2, heads_q=4, cache=PagedCache(9, 5, 4, 2, 16, 24, "float16"),
    dtype="float16", scale=1.0,
)  # fmt: skip
LENGTHS = (0, 7, 20)

sides = st.none() | st.integers(0, 15)


@given(st.integers(0, 12), st.integers(0, 12), sides, sides)
def test_visible_pairs_count_the_visible_keys(seq_q, seq_kv, left, right):
    spec = replace(SPEC, seq_q=seq_q, seq_kv=seq_kv, window=Window(left, right))
    assert visible_pairs(spec) == sum(len(spec.visible_keys(query)) for query in range(seq_q))


def test_a_causal_rectangle_is_not_half_a_rectangle():
    """Query i of 1024 sees 3073 + i of the 4096 keys: 7/8 of all."""
    spec = replace(SPEC, seq_q=1024, seq_kv=4096, window=Window(None, 0))
    assert visible_pairs(spec) == sum(3073 + query for query in range(1024)) == 3_670_528
    full = replace(spec, window=Window())
    assert visible_pairs(full) == 1024 * 4096
    assert 0.875 < forward_flops(spec) / forward_flops(full) < 0.876


def test_flops_of_each_matrix_product():
    pairs = 2 * 4 * 3 * 5
    qk, pv = 2 * 16 * pairs, 2 * 24 * pairs
    assert forward_flops(SPEC) == qk + pv
    s, dp, dv, dk, dq = qk, pv, pv, qk, qk
    assert backward_flops(SPEC) == s + dp + dv + dk + dq
    square = replace(SPEC, head_dim_v=16)
    assert backward_flops(square) == 2.5 * forward_flops(square)


def sparse(masks=(1, 1), **fields):
    """Tiles of 64 queries and 128 keys, the last ones cut off."""
    of_mask = {"tile_q": 64, "tile_kv": 128, "mask_batch": masks[0], "mask_heads": masks[1]}
    return BlockSparseSpec(**vars(replace(SPEC, seq_q=150, seq_kv=300)) | of_mask | fields)


WINDOWS = [Window(), Window(None, 0), Window(40, None), Window(70, 5), Window(0, 0)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("masks", [(1, 1), (1, 4), (2, 4)], ids=str)
def test_pairs_of_a_mask_are_those_of_its_tiles_that_the_window_shows(window, masks):
    spec = sparse(masks, window=window)
    kept = np.random.default_rng(0).random((*masks, 3, 3)) < 0.5
    pairs = sum(
        bool(kept[b * (masks[0] > 1), h * (masks[1] > 1), query // 64, key // 128])
        for b, h, query in np.ndindex(2, 4, 150)
        for key in spec.visible_keys(query)
    )
    mask = BlockMask.of(kept)
    assert block_sparse_pairs(spec, mask) == pairs > 0
    assert block_sparse_forward_flops(spec, mask) == 2 * (16 + 24) * pairs
    assert block_sparse_backward_flops(spec, mask) == 2 * (3 * 16 + 2 * 24) * pairs


def test_a_mask_of_all_tiles_costs_what_no_mask_does():
    for spec in (sparse(window=Window(None, 0)), sparse(batch=0), sparse(seq_q=0, seq_kv=0)):
        tiles = -(-spec.seq_q // 64), -(-spec.seq_kv // 128)
        mask = BlockMask.of(np.ones(tiles, bool))
        assert block_sparse_forward_flops(spec, mask) == forward_flops(spec)
        assert block_sparse_backward_flops(spec, mask) == backward_flops(spec)


def test_entries_that_no_kernel_reads_cost_nothing():
    spec = sparse()
    mask = BlockMask.of(np.ones((3, 3), bool))
    tiles = mask.kv_tiles.copy()
    tiles[0, 0, 1] = (-1, 3, 2**31 - 1)
    counts = np.array([[[0, 3, 9]]], np.int32)
    mask = mask._replace(kv_counts=counts, kv_tiles=tiles)
    assert block_sparse_pairs(spec, mask) == 2 * 4 * (150 - 128) * 300


def test_bytes_of_each_operand():
    q, k, v, out = (2 * 2 * rows for rows in (3 * 4 * 16, 5 * 2 * 16, 5 * 2 * 24, 3 * 4 * 24))
    lse = 4 * 2 * 4 * 3
    assert forward_bytes(SPEC) == q + k + v + out + lse
    dout = out
    assert backward_bytes(SPEC) == (q + k + v + out + lse + dout) + (q + k + v)


def test_flops_of_a_decode():
    """The last of two tokens sees every key, the one before it all but one."""
    pairs = 4 * ((6 + 7) + (19 + 20))
    assert decode_flops(DECODE, LENGTHS) == 2 * (16 + 24) * pairs


def test_a_paged_attention_costs_what_its_sequences_do():
    spec = PagedSpec(**vars(replace(DECODE, tokens=6)))
    sequences = [(0, 7), (5, 20), (1, 9)]
    pairs = 4 * (sum(range(16, 21)) + 9)
    assert paged_flops(spec, sequences) == 2 * (16 + 24) * pairs
    each = [decode_bytes(spec.sequence(tokens), [keys]) for tokens, keys in sequences]
    assert each[0] == 4  # its length
    assert paged_bytes(spec, sequences) == sum(each) + 4 * 4


def test_keys_that_hold_their_values_are_read_once():
    spec = replace(DECODE, cache=replace(DECODE.cache, latent=True, head_dim_v=8))
    assert cache_bytes(spec, LENGTHS) == 2 * (7 + 20) * 2 * 16
    pairs = 4 * ((6 + 7) + (19 + 20))
    assert decode_flops(spec, LENGTHS) == 2 * (16 + 8) * pairs


@given(st.integers(-2, 22), st.integers(0, 4), sides)
def test_a_key_is_read_once_however_many_tokens_see_it(length, tokens, left):
    spec = replace(DECODE, batch=1, tokens=tokens, window_left=left)
    seen = {key for token in range(tokens) for key in spec.visible_keys(token, length)}
    assert cache_bytes(spec, (length,)) == 2 * len(seen) * 2 * (16 + 24)
    pages = {key // 5 for key in seen}
    rows = tokens * 4 * (2 * (16 + 24) + 4)
    assert decode_bytes(spec, (length,)) == cache_bytes(spec, (length,)) + rows + 4 * (
        len(pages) + 1
    )
