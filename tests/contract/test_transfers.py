import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.test_context import WINDOWS, plans, whole_mask
from twin_attention.contract import transfers as module
from twin_attention.contract.context import ContextPlan, context_plan
from twin_attention.contract.spec import AttentionSpec, Window
from twin_attention.contract.transfers import choose_exchange, equal_hops, exchange_steps


def positions_of(plan: ContextPlan, step) -> np.ndarray:
    parts = [plan.positions(x.rank)[x.start : x.end] for x in step.received]
    found = np.concatenate(parts or [np.zeros(0, int)])
    return found if step.order is None else found[step.order]


def _forget() -> None:
    for function in (exchange_steps, equal_hops, module._keys_of, module._needed):
        function.cache_clear()


@given(plans(), st.sampled_from(WINDOWS), st.sampled_from(["ring", "gather"]), st.data())
def test_each_pair_is_seen_once(plan: ContextPlan, window: Window, exchange: str, data):
    """Keys come in blocks of any size, in pieces or put in order."""
    sizes = data.draw(st.sampled_from([(1, 8, 9), (1, 1, 9), (4, 2, -9), (128, 8, 2)]))
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("BLOCK", "RUNS_MAX", "PIECES_MAX"), sizes, strict=True):
            patch.setattr(module, name, size)
        _forget()
        steps = [exchange_steps(plan, window, exchange, rank) for rank in range(plan.size)]
    _forget()
    seen = whole_mask(plan, window)
    for rank, of_rank in enumerate(steps):
        assert len(of_rank) == len(steps[0])
        covered = np.zeros((plan.local_len, plan.seq_len), int)
        for step in of_rank:
            key = np.arange(step.num_keys)
            begins, ends, query_begins, query_ends = step.intervals
            by_query = (key >= begins[:, None]) & (key < ends[:, None])
            query = np.arange(plan.local_len)[:, None]
            assert (by_query == ((query >= query_begins) & (query < query_ends))).all()
            positions = positions_of(plan, step)
            assert (np.diff(positions) > 0).all()
            covered[:, positions] += by_query
        assert (covered == seen[plan.positions(rank)]).all()


@given(plans(), st.sampled_from(WINDOWS), st.sampled_from([(1, 8), (1, 1), (4, 2)]))
def test_equal_hops_bring_every_key_that_is_seen(plan: ContextPlan, window: Window, sizes):
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("BLOCK", "RUNS_MAX"), sizes, strict=True):
            patch.setattr(module, name, size)
        _forget()
        hops = equal_hops(plan, window)
    _forget()
    needed, token = plan.needed(window), np.arange(plan.seq_len)
    begins, ends = plan.bounds(window)
    read = np.zeros((plan.size, plan.seq_len), int)
    for hop in hops:
        for rank in range(plan.size):
            holder = (rank - hop.distance) % plan.size
            positions = plan.positions(holder) if hop.positions is None else hop.positions[rank]
            real = positions[positions < plan.seq_len]
            assert (positions[: len(real)] == real).all()  # what is no key comes last
            assert ((holder, rank) in hop.routes) == needed[rank, holder]
            starts, counts = (x[rank] for x in hop.runs[:2])
            runs = zip(starts, counts, strict=True)
            found = [x + hop.runs.step * np.arange(count) for x, count in runs]
            assert (np.concatenate(found) == real).all()
            read[rank, real] += 1
            of_holder = plan.positions(holder)
            if hop.sent is None or hop.places is None:
                assert (real == of_holder).all()
                continue
            sent, places = hop.sent[holder], hop.places[holder]
            assert (of_holder[sent[sent < plan.local_len]] == real).all()
            assert (places[sent[: len(real)]] == np.arange(len(real))).all()
            assert (places < len(positions)).sum() == len(real)
    for rank in range(plan.size):
        own = plan.positions(rank)
        seen = (token >= begins[own, None]) & (token < ends[own, None])
        assert (read[rank][seen.any(0)] == 1).all()
    assert read.max(initial=0) <= 1


@given(plans(), st.sampled_from(WINDOWS), st.sampled_from(["ring", "gather"]))
def test_what_one_sends_another_receives(plan: ContextPlan, window: Window, exchange: str):
    steps = [exchange_steps(plan, window, exchange, rank) for rank in range(plan.size)]
    for at_once in zip(*steps, strict=True):
        for rank, step in enumerate(at_once):
            for rows in step.received, step.gathered:
                ends = np.cumsum([x.end - x.start for x in rows]).tolist()
                assert [x.place for x in rows] == [0, *ends][: len(rows)]
            for other, theirs in enumerate(at_once):
                sent = [x[1:] for x in step.sent if x.rank == other]
                arrived = [x[1:] for x in theirs.received if x.rank == rank]
                if other != rank:
                    assert sent == arrived
                back = [x[1:] for x in step.returned if x.rank == other]
                gathered = [x[1:] for x in theirs.gathered if x.rank == rank]
                assert back == gathered
                assert not (back and other == rank)
                if other != rank:
                    assert [x.end - x.start for x in step.gathered if x.rank == other] == [
                        x.end - x.start for x in theirs.received if x.rank == rank
                    ]


def test_a_window_receives_blocks_alone():
    plan = context_plan(8 * 1024, 8)
    (step,) = exchange_steps(plan, Window(100, 0), "gather", 3)
    assert step.order is None
    assert step.num_keys == 1024 + 2 * 128
    assert [x.rank for x in step.received] == [2, 3, 4, 3]


def spec_of(local: int, heads: int = 16) -> AttentionSpec:
    return AttentionSpec(1, local, local, heads, heads, 128, 128, "bfloat16", scale=1.0)


@pytest.mark.parametrize(
    ("local", "size", "window", "exchange"),
    [
        (512, 2, None, "ring"), (8192, 2, None, "ring"), (4096, 8, None, "ring"),
        (1024, 8, None, "gather"), (1024, 8, 256, "ring"),
    ],
)  # fmt: skip
def test_many_small_steps_are_one_gather(local, size, window, exchange):
    plan = context_plan(local * size, size)
    chosen, reason = choose_exchange(None, plan, Window(window, 0), spec_of(local))
    assert chosen == exchange
    assert "by estimate" in reason
    assert choose_exchange("heads", plan, Window(window, 0), spec_of(local))[0] == "heads"
