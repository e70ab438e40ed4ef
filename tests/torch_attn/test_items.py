from dataclasses import replace

import pytest
import torch

from torch_attn.kernels.explicit.barriers import number_barriers
from torch_attn.kernels.explicit.items import (
    ITEM_STEPS,
    heads_in_cache,
    heads_together,
    item_counter,
)
from twin_attention.contract.spec import AttentionSpec, Window
from twin_attention.targets.steps import steps_of_keys, steps_of_queries

CAUSAL = Window(None, 0)


def problem(batch, seq_q, seq_kv, heads_q, heads_kv, window=CAUSAL):
    return AttentionSpec(batch, seq_q, seq_kv, heads_q, heads_kv, 64, 64, "bfloat16", 0.1, window)


def deal(steps, heads, programs, together):
    """Return how long each program works: longest tiles of `together` heads first, and back."""
    items = [
        steps[tile] + ITEM_STEPS
        for first in range(0, heads, together)
        for tile in range(len(steps))
        for _ in range(first, min(first + together, heads))
    ]
    work = [0] * programs
    for start in range(0, len(items), programs):
        turn = range(programs) if start // programs % 2 == 0 else reversed(range(programs))
        for program, item in zip(turn, items[start : start + programs], strict=False):
            work[program] += item
    return work


@pytest.mark.parametrize(
    ("batch", "seq", "heads_q", "heads_kv"),
    [
        (4, 4096, 16, 4), (4, 4096, 16, 16), (2, 8192, 16, 16), (1, 16384, 32, 32),
        (1, 4096, 16, 16), (1, 4096, 32, 8), (32, 512, 16, 16), (1, 3000, 40, 40),
    ],
)  # fmt: skip
def test_programs_of_causal_problems_end_together(batch, seq, heads_q, heads_kv):
    spec = problem(batch, seq, seq, heads_q, heads_kv)
    for steps, heads in (
        (steps_of_queries(spec, 128, 128), batch * heads_q),
        (steps_of_keys(spec, 64, 128), batch * heads_kv),
    ):
        work = deal(steps, heads, 132, heads_together(steps, heads, 132))
        assert max(work) < 1.04 * sum(work) / len(work)


@pytest.mark.parametrize(("batch", "seq", "heads"), [(40, 384, 16), (32, 512, 32), (16, 1024, 16)])
def test_short_heads_go_in_pairs(batch, seq, heads):
    steps = steps_of_queries(problem(batch, seq, seq, heads, heads), 128, 128)
    assert heads_together(steps, batch * heads, 132) == 2


def test_short_heads_that_are_too_few_for_pairs_are_balanced():
    steps = steps_of_queries(problem(3, 640, 640, 9, 9), 128, 128)
    together = heads_together(steps, 27, 132)
    assert together != 2
    assert max(deal(steps, 27, 132, together)) < max(deal(steps, 27, 132, 2))


def test_heads_of_equal_tiles_follow_each_other():
    assert heads_together((32,) * 32, 16, 132) == 1


def test_the_default_dtype_changes_nothing():
    steps = tuple(range(128, 0, -1))
    want = heads_together.__wrapped__(steps, 16, 132)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        assert heads_together.__wrapped__(steps, 16, 132) == want
    finally:
        torch.set_default_dtype(default)


def test_uneven_tiles_are_counted_where_a_kernel_takes_a_counter():
    q, causal = torch.empty(0), problem(1, 300, 300, 2, 2)
    assert item_counter(q, causal, has_uneven=True).tolist() == [0]
    for spec in (replace(causal, window=Window()), replace(causal, segmented=True)):
        assert item_counter(q, spec, has_uneven=True) is None
    assert item_counter(q, causal) is None


@pytest.mark.parametrize(
    ("seq", "heads", "block_kv", "together"),
    [(16384, 16, 128, 1), (12288, 16, 128, 4), (6144, 16, 64, 8), (2048, 64, 64, 8)],
)
def test_few_heads_at_a_time_balance_programs_that_count(seq, heads, block_kv, together):
    steps = steps_of_queries(problem(1, seq, seq, heads, heads), 128, block_kv)
    assert heads_in_cache(steps, heads, 132) == together


def test_named_barriers_follow_each_other_and_end_with_the_last_that_a_program_has():
    assert [x.value for x in number_barriers(5, 3, 2, 6)] == [5, 8, 10]
    with pytest.raises(ValueError, match="16 named barriers, not 17"):
        number_barriers(5, 3, 2, 7)
