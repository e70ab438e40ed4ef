"""The order in which SM80's forward takes tiles of queries."""

from heapq import heapreplace

import pytest

from twin_attention.contract.spec import AttentionSpec, Window
from twin_attention.targets.sm80 import heads_together

NUM_SMS = 132


def problem(batch, seq, heads, window):
    return AttentionSpec(batch, seq, seq, heads, heads, 128, 128, "float16", 0.125, window)


def busy_share(spec, together, num_programs=2 * NUM_SMS):
    """Return the share of busy time when programs take tiles in `longest_first`'s order."""
    num_tiles, heads = spec.seq_q // 128, spec.batch * spec.heads_q
    places = []
    for first in range(0, heads, together):
        section = min(together, heads - first)
        places += [tile for tile in range(num_tiles) for _ in range(section)]
    # Two tiles of keys for each tile of queries before, and what a program takes beside its loop.
    costs = [2 * tile + 4 for tile in reversed(places)]
    ends = [0] * num_programs
    for cost in costs:
        heapreplace(ends, ends[0] + cost)
    return sum(costs) / (num_programs * max(ends))


@pytest.mark.parametrize(
    ("batch", "seq", "heads"), [(32, 512, 16), (4, 4096, 16), (3, 4096, 12), (1, 16384, 16)]
)
def test_causal_programs_end_together(batch, seq, heads):
    spec = problem(batch, seq, heads, Window(None, 0))
    together = heads_together(spec, seq // 128, NUM_SMS)
    assert busy_share(spec, together) > 0.96 > 0.92 > busy_share(spec, 1)


@pytest.mark.parametrize("window", [Window(), Window(100, None), Window(100, 0)])
def test_tiles_of_one_length_are_taken_head_by_head(window):
    assert heads_together(problem(4, 4096, 16, window), 32, NUM_SMS) == 1


@pytest.mark.parametrize(("batch", "heads", "num_tiles"), [(1, 2, 4), (1, 1, 1000)])
def test_no_more_heads_than_there_are(batch, heads, num_tiles):
    spec = problem(batch, 512, heads, Window(None, 0))
    assert heads_together(spec, num_tiles, NUM_SMS) == min(heads, 4 * NUM_SMS // num_tiles or 1)
