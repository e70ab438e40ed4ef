import re
from itertools import pairwise
from math import log
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin_attention.contract.context import (
    LAYOUTS,
    ContextPlan,
    context_plan,
    shard_sequence,
    unshard_sequence,
)
from twin_attention.contract.spec import Window

WINDOWS = [Window(), Window(None, 0), Window(5, 0), Window(3, 2), Window(0, 0), Window(None, 4)]


@st.composite
def plans(draw: st.DrawFn) -> ContextPlan:
    size = draw(st.integers(1, 5))
    seq_len = 2 * size * draw(st.integers(0, 12))
    cu_seqlens = None
    if draw(st.booleans()):
        inner = draw(st.lists(st.integers(0, seq_len), min_size=1, max_size=5))
        cu_seqlens = [0, *sorted(inner)]
    return context_plan(seq_len, size, draw(st.sampled_from(LAYOUTS)), cu_seqlens)


def whole_mask(plan: ContextPlan, window: Window) -> np.ndarray:
    token = np.arange(plan.seq_len)
    query, key = token[:, None], token[None, :]
    seen = np.ones((plan.seq_len, plan.seq_len), bool)
    if plan.cu_seqlens is not None:
        document = sum((token >= end).astype(int) for end in plan.cu_seqlens[1:])
        document = np.where(token >= plan.cu_seqlens[-1], -1 - token, document)
        seen = (document[:, None] == document[None, :]) & (document >= 0)[:, None]
    if window.left is not None:
        seen &= key >= query - window.left
    if window.right is not None:
        seen &= key <= query + window.right
    return seen


@given(plans())
def test_each_token_has_one_rank(plan: ContextPlan):
    held = [plan.positions(rank) for rank in range(plan.size)]
    assert all(len(x) == plan.local_len and (np.diff(x) > 0).all() for x in held)
    assert sorted(np.concatenate(held)) == list(range(plan.seq_len))


@given(plans(), st.sampled_from(WINDOWS))
def test_intervals_say_who_sees_whom_from_both_axes(plan: ContextPlan, window: Window):
    seen, covered = whole_mask(plan, window), np.zeros((plan.seq_len,) * 2, int)
    for rank in range(plan.size):
        begins, ends, _, _ = plan.intervals(rank, window)  # of the whole sequence
        key = np.arange(plan.seq_len)
        by_query = (key >= begins[:, None]) & (key < ends[:, None])
        assert (by_query == seen[plan.positions(rank)]).all()
        for distance in plan.distances(window):
            rank_kv = (rank - distance) % plan.size
            rows, cols = plan.positions(rank), plan.positions(rank_kv)
            kb, ke, qb, qe = plan.intervals(rank, window, rank_kv)
            key, query = np.arange(len(cols)), np.arange(len(rows))[:, None]
            by_query = (key >= kb[:, None]) & (key < ke[:, None])
            by_key = (query >= qb) & (query < qe)
            expected = seen[np.ix_(rows, cols)]
            assert (by_query == expected).all()
            assert (by_key == expected).all()
            assert all((np.diff(x) >= 0).all() for x in (kb, ke, qb, qe))
            assert plan.pairs(window)[rank, rank_kv] == expected.sum()
            covered[np.ix_(rows, cols)] += expected
    assert (covered == seen).all()


@pytest.mark.parametrize("layout", ["zigzag", "stripe", "balanced"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_causal_work_is_equal(layout: str, size: int):
    work = context_plan(size * 2048, size, layout).pairs(Window(None, 0)).sum(1)
    assert work.max() <= 1.05 * work.mean()


def lognormal_offsets(seed: int, seq_len: int, mean: int, sigma: float = 1.0) -> list[int]:
    generator, offsets = Random(seed), [0]
    while offsets[-1] < seq_len:
        length = round(generator.lognormvariate(log(mean) - sigma**2 / 2, sigma))
        offsets.append(min(offsets[-1] + max(length, 1), seq_len))
    return offsets


def rows_needed(plan: ContextPlan) -> list[int]:
    begins, ends = plan.bounds(Window(None, 0))
    counts = []
    for rank in range(plan.size):
        rows = plan.positions(rank)
        edges = np.zeros(plan.seq_len + 1, int)
        np.add.at(edges, begins[rows], 1)
        np.add.at(edges, ends[rows], -1)
        seen = np.cumsum(edges)[:-1] > 0
        seen[rows] = False
        counts.append(int(seen.sum()))
    return counts


@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 8),
    st.sampled_from([1000, 4096]),
    st.sampled_from([300, 2000]),
    st.sampled_from([0.5, 1.5]),
    st.floats(0.5, 1.0),
)
def test_causal_work_of_documents_is_equal(
    seed: int, size: int, local_len: int, mean: int, sigma: float, filled: float
):
    tokens = int(size * local_len * filled)
    offsets = lognormal_offsets(seed, tokens, mean, sigma)
    plan = context_plan(size * local_len, size, "balanced", offsets)
    assert np.bincount(plan.owners, minlength=size).tolist() == [local_len] * size
    work = plan.pairs(Window(None, 0)).sum(1)
    assert work.max() <= 1.05 * work.mean()


@pytest.mark.parametrize(
    ("size", "local_len", "rows_mean", "rows_max", "runs"),
    [(4, 8192, 0.4, 0.55, 12), (8, 8192, 0.25, 0.4, 12), (8, 16384, 0.01, 0.02, 24)],
)
def test_few_keys_of_documents_travel(
    size: int, local_len: int, rows_mean: float, rows_max: float, runs: int
):
    tokens = size * local_len
    plan = context_plan(tokens, size, "balanced", lognormal_offsets(2, tokens, 1024))
    rows = np.array(rows_needed(plan)) / local_len
    assert rows.mean() <= rows_mean
    assert rows.max() <= rows_max
    assert (np.diff(plan.positions_by_rank) != 1).sum(1).max() < runs


def test_documents_stay_whole_where_work_is_equal_with_them():
    lengths = [900, 150, 700, 800, 200, 100, 850, 396]
    offsets = np.append(0, np.cumsum(lengths))
    plan = context_plan(4096, 2, "balanced", offsets)
    assert plan.distances(Window(None, 0)) == (0, 1)  # of documents that had to be cut
    cut = [len(set(plan.owners[a:b])) > 1 for a, b in pairwise(offsets)]
    assert sum(cut) <= 1
    plan = context_plan(8192, 4, "balanced", range(0, 8193, 512))
    assert plan.distances(Window(None, 0)) == (0,)


def test_short_documents_are_shared_by_near_ranks_alone():
    plan = context_plan(8 * 4000, 8, "balanced", [*range(0, 8 * 4000, 300), 8 * 4000])
    assert plan.distances(Window(None, 0)) == (0, 1)
    assert 0 < max(rows_needed(plan)) < 300


@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_document_is_shared_as_in_zigzag(size: int):
    owners = [context_plan(64, size, layout).owners for layout in ("balanced", "zigzag")]
    assert (owners[0] == owners[1]).all()


def test_a_window_needs_near_ranks_alone():
    plan = context_plan(64, 8, "contiguous")
    assert plan.distances(Window(7, 0)) == (0, 1)
    assert plan.distances(Window(None, 0)) == tuple(range(8))
    assert plan.distances(Window(4, 4)) == (0, 1, 7)


@given(plans())
def test_documents_begin_where_they_begin(plan: ContextPlan):
    for rank in range(plan.size):
        position, first = plan.positions(rank), plan.documents(rank)
        for p, begin in zip(position, first, strict=True):
            if plan.cu_seqlens is None:
                assert begin == 0
            elif p < plan.cu_seqlens[-1]:
                around = [x for x in pairwise(plan.cu_seqlens) if x[0] <= p < x[1]]
                assert begin == around[0][0]


@given(plans(), st.sampled_from([0, 1, -2]))
def test_shards_come_back(plan: ContextPlan, axis: int):
    shape = [2, 3, 2]
    shape[axis] = plan.seq_len
    x = np.arange(np.prod(shape)).reshape(shape)
    shards = [shard_sequence(x, plan, rank, axis) for rank in range(plan.size)]
    assert (unshard_sequence(shards, plan, axis) == x).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((10, 4), ValueError, "seq_len: expected a multiple of 8, for 4 ranks in layout 'zigzag'"),
        ((10, 4, "stripe"), ValueError, "seq_len: expected a multiple of 4"),
        ((8, 0), ValueError, "size: expected an integer from 1"),
        ((8.0, 2), TypeError, "seq_len: expected an integer"),
        ((8, 2, "ring"), ValueError, "layout: expected one of 'contiguous', 'zigzag', 'stripe'"),
        ((8, 2, "zigzag", [0, 5, 4]), ValueError, "cu_seqlens[2]: expected an offset from 5 to 8"),
        ((8, 2, "zigzag", [0, 9]), ValueError, "cu_seqlens[1]: expected an offset from 0 to 8"),
        ((8, 2, "zigzag", [[0, 8]]), ValueError, "cu_seqlens: expected shape (N + 1,)"),
        ((8, 2, "zigzag", [0.0, 8.0]), TypeError, "cu_seqlens: expected integers, got float64"),
    ],
)
def test_bad_plans(arguments: tuple, error: type[Exception], message: str):
    with pytest.raises(error, match=re.escape(message)):
        context_plan(*arguments)


def test_bad_shards():
    plan, x = context_plan(8, 2), np.zeros((2, 8, 3))
    for rank, error in ((2, ValueError), (-1, ValueError), (0.5, TypeError)):
        with pytest.raises(error, match="rank: expected an integer from 0 to 1"):
            shard_sequence(x, plan, rank)
    with pytest.raises(ValueError, match="x: expected 8 tokens along axis 0, got shape"):
        shard_sequence(x, plan, 0, axis=0)
    with pytest.raises(ValueError, match="xs: expected the tokens of 2 ranks, got 1"):
        unshard_sequence([x], plan)
    with pytest.raises(ValueError, match=re.escape("xs[0]: expected 4 tokens along axis 1")):
        unshard_sequence([x, x], plan)
