from dataclasses import replace

import pytest

from twin_attention.contract.spec import AttentionSpec, VarlenSpec, Window
from twin_attention.targets.steps import (
    keys_of_query,
    splits_group,
    steps_of_keys,
    steps_of_queries,
)

CAUSAL = Window(None, 0)


def problem(batch, seq_q, seq_kv, heads_q, heads_kv, window=CAUSAL):
    return AttentionSpec(batch, seq_q, seq_kv, heads_q, heads_kv, 64, 64, "bfloat16", 0.1, window)


@pytest.mark.parametrize(
    "window", [Window(), CAUSAL, Window(150, 0), Window(0, 90), Window(64, 32)]
)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(300, 300), (1, 500), (999, 200), (200, 999)])
def test_steps_count_the_tiles_with_visible_pairs(seq_q, seq_kv, window):
    spec = problem(2, seq_q, seq_kv, 6, 2, window)
    pairs = {
        (query // 128, key // 64) for query in range(seq_q) for key in spec.visible_keys(query)
    }
    tiles = range(-(-seq_q // 128)), range(-(-seq_kv // 64))
    visited = [max(sum((tile, key) in pairs for key in tiles[1]), 1) for tile in tiles[0]]
    assert steps_of_queries(spec, 128, 64) == tuple(reversed(visited))
    visited = [max(sum((tile, key) in pairs for tile in tiles[0]), 1) for key in tiles[1]]
    assert steps_of_keys(spec, 128, 64) == tuple(visited)


@pytest.mark.parametrize(
    ("batch", "seq", "heads_q", "heads_kv", "window", "split"),
    [
        (1, 4096, 16, 4, CAUSAL, True), (1, 4096, 16, 4, Window(), False),
        (4, 4096, 16, 4, CAUSAL, False), (1, 4096, 32, 8, CAUSAL, False),
        (1, 4096, 8, 1, Window(), True), (1, 4096, 4, 4, CAUSAL, False),
    ],
)  # fmt: skip
def test_tiles_that_most_sms_would_wait_for_are_split(batch, seq, heads_q, heads_kv, window, split):
    spec = problem(batch, seq, seq, heads_q, heads_kv, window)
    assert splits_group(spec, 64, 128, 132) == split


@pytest.mark.parametrize(
    ("heads_kv", "head_dim", "window", "split"),
    [
        (4, 128, CAUSAL, True), (4, 128, Window(1024, 0), True), (4, 128, Window(), False),
        (4, 64, CAUSAL, False), (8, 128, CAUSAL, False),
    ],
)  # fmt: skip
def test_large_groups_with_wide_rows_are_split(heads_kv, head_dim, window, split):
    """Where all tiles see the same queries, programs read them at the same time."""
    spec = problem(4, 4096, 4096, 32, heads_kv, window)
    spec = replace(spec, head_dim=head_dim, head_dim_v=head_dim)
    assert splits_group(spec, 64, 128, 132) == split


def test_how_long_the_longest_tile_may_take_can_be_chosen():
    spec = problem(4, 3000, 3000, 16, 4)
    assert not splits_group(spec, 64, 128, 132)
    assert splits_group(spec, 64, 128, 132, most_of_mean=0.6)


@pytest.mark.parametrize(
    ("seq", "window", "keys"),
    [
        (1024, Window(), 1024), (2048, CAUSAL, 1025), (64, CAUSAL, 33), (1, CAUSAL, 1),
        (4096, Window(63, 0), 64),
    ],
)  # fmt: skip
def test_keys_of_a_query(seq, window, keys):
    assert keys_of_query(problem(2, seq, seq, 4, 2, window)) == pytest.approx(keys, rel=0.01)


def test_keys_of_a_query_of_packed_sequences():
    dense = problem(1, 1500, 1500, 4, 2)
    packed = VarlenSpec(**vars(replace(dense, seq_q=6000, seq_kv=6000)), num_sequences=7)
    assert keys_of_query(packed) == keys_of_query(dense)
    assert keys_of_query(replace(packed, seq_kv=0)) == 0
