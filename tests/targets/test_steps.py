import pytest

from twin_attention.contract.spec import AttentionSpec, Window
from twin_attention.targets.steps import splits_group, steps_of_keys, steps_of_queries

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
        (1, 4096, 16, 4, CAUSAL, True),
        (1, 4096, 16, 4, Window(), False),
        (4, 4096, 16, 4, CAUSAL, False),
        (1, 4096, 32, 8, CAUSAL, False),
        (1, 4096, 8, 1, Window(), True),
        (1, 4096, 4, 4, CAUSAL, False),
    ],
)
def test_tiles_that_most_sms_would_wait_for_are_split(batch, seq, heads_q, heads_kv, window, split):
    spec = problem(batch, seq, seq, heads_q, heads_kv, window)
    assert splits_group(spec, 64, 128, 132) == split
