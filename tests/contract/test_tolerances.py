"""The error budget: each formula, and what must fail whatever the budget."""

import math

import numpy as np
import pytest
import torch

from twin_attention.contract.tolerances import (
    Agreement,
    cancelled_gradient,
    cancelled_sum,
    compare_lse,
    compare_to_reference,
    compare_twins,
    lse_tolerance,
    lse_unit,
    rounded_delta,
    ulp,
)

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_ulp_is_the_distance_to_the_next_number(dtype):
    for value in (0.0, 2.0**-20, 2.0**-14, 1e-3, 0.75, 1.0, 1.5, 3.0, 1000.0):
        at = torch.tensor(value).to(getattr(torch, dtype))
        above = torch.nextafter(at, torch.tensor(INF, dtype=at.dtype))
        assert ulp(float(at), dtype) == ulp(-float(at), dtype) == float(above) - float(at)
    assert [ulp(x, "tf32") for x in (1.0, 3.0, 0.0)] == [2.0**-10, 2.0**-9, 2.0**-136]


@pytest.mark.parametrize(
    ("kind", "max_factor", "rmse_factor"), [("output", 2.0, 1.25), ("gradient", 3.0, 1.5)]
)
def test_the_budget_is_a_multiple_of_the_plain_runs_error(kind, max_factor, rmse_factor):
    ref = np.tile([1.0, -1.5, 0.25, 0.5], 4)
    lp = ref + np.tile([0.1, -0.2, 0.0, 0.0], 4)
    agreement = compare_to_reference(ref + 0.05, ref, lp, "float16", kind)
    assert agreement.max_error == pytest.approx(0.05)
    assert agreement.rmse == pytest.approx(0.05)
    assert agreement.max_budget == pytest.approx(max_factor * 0.2 + 2 * 2.0**-10)
    assert agreement.rmse_budget == pytest.approx(rmse_factor * math.sqrt((0.01 + 0.04) / 4))


def test_an_lse_in_tf32_has_the_error_of_its_scores():
    ref = np.array([4.0, 0.5, -INF])
    lp = ref + np.array([0.08, 0.001, 0.0])
    for dtype in ("float16", "bfloat16", "float32"):
        assert lse_tolerance(ref, lp, dtype) == 1e-5
    tolerance = lse_tolerance(ref, lp, "tf32")
    assert tolerance == pytest.approx(1e-5 + 2 * 0.02)
    assert compare_lse(ref + 0.9 * tolerance, ref, tolerance).ok
    assert not compare_lse(ref + 1.1 * tolerance, ref, tolerance).ok
    assert not compare_lse(ref + 1.1e-5, ref).ok


def test_a_plain_run_without_error_leaves_ulps():
    ref = np.array([3.0] + [1e-9] * 15)
    agreement = compare_to_reference(ref, ref, ref, "bfloat16", "gradient")
    assert agreement.max_budget == 2 * 2.0**-6
    assert agreement.rmse_budget == 4e-6 * 3.0
    assert compare_to_reference(ref, ref, ref, "bfloat16", "output").rmse_budget == 4e-6 * 3.0
    attention = compare_to_reference(ref, ref, ref, "bfloat16", "output", np.zeros(16))
    assert attention.rmse_budget == pytest.approx(1.09 * 2**-8 * 0.75)


def _softmax(s):
    greatest = s.max(1, keepdims=True)
    e = np.exp(s - greatest)
    return e / e.sum(1, keepdims=True), np.log(e.sum(1, keepdims=True)) + greatest


def _gradient_of_values(deviation, seed):
    """Return dv as a kernel computes it, in float64, and plainly; and the log-sum-exps."""
    random = np.random.default_rng(seed)
    q, k = (random.normal(0, deviation, (n, 120)).astype(np.float32) for n in (9, 5))
    dout = random.normal(0, 1, (9, 24)).astype(np.float32)
    s = q @ k.T
    # A kernel keeps lse of its own scores, in float32, and computes p from it in base 2.
    base_2, kept = np.float32(np.log2(np.e)), np.float32(_softmax(s.astype(np.float64))[1])
    fused = np.float64(s) * np.float64(base_2) - np.float64(kept * base_2)  # one multiply-add
    p, lse = _softmax(q.astype(np.float64) @ k.T.astype(np.float64))
    got = np.exp2(np.float32(fused)).T @ dout
    return got, p.T @ dout.astype(np.float64), _softmax(s)[0].T @ dout, lse


def test_large_scores_have_the_error_of_their_exponents():
    ratios = []
    for seed in range(100):
        got, ref, lp, lse = _gradient_of_values(3.0, seed)
        assert 17 < np.abs(lse).max() < 600
        assert compare_to_reference(got, ref, lp, "float32", "gradient", lse).ok
        ratios.append(compare_to_reference(got, ref, lp, "float32", "gradient").ratio)
    assert max(ratios) > 1  # where lp happens to be nearly exact


def test_a_row_with_one_key_has_the_error_of_its_sums():
    ratios = []
    for seed in range(100):
        random = np.random.default_rng(seed)
        dout, v = random.normal(0, 1, (2, 2, 256)).astype(np.float32)
        k = random.normal(0, 3, 256).astype(np.float32)
        # p is 1, so that out is v. A kernel sums dp key by key, and delta in a tree.
        dp = np.add.accumulate(dout * v, axis=-1, dtype=np.float32)[:, -1]
        ds = dp - np.sum(dout * v, axis=-1)
        got, zero = (ds[:, None] * k / 16).astype(np.float64), np.zeros((2, 256))
        terms = [x.astype(np.float64) for x in (dout, v, k)]
        budgets = (cancelled_gradient(1 / 16, *terms, rows=1.0), 0.0)
        found = [
            compare_to_reference(got, zero, zero, "float32", "gradient", None, x) for x in budgets
        ]
        assert found[0].ok
        ratios.append(found[1].ratio)
        wrong = compare_to_reference(
            got + 3e-5, zero, zero, "float32", "gradient", None, budgets[0]
        )
        assert not wrong.ok
    assert max(ratios) > 1  # without what cancels


def test_a_table_that_all_rows_share_has_the_error_of_their_sums():
    random = np.random.default_rng(0)
    dout, v = (random.normal(0, 1, (n, 96)) for n in (1000, 20))
    p = random.dirichlet(np.ones(20), 1000)
    dp = dout @ v.T
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))  # 0 in each row's sum
    # A kernel's p is off by its exponent's rounding, by up to an ulp of float32.
    got = np.array([(ds * random.uniform(-1, 1, p.shape)).sum() * 2.0**-23 for _ in range(4)])
    zero = np.zeros_like(got)
    cancelled = cancelled_gradient(1.0, dout, v, np.ones(1), rows=1000.0)
    for each, is_ok in ((cancelled, True), (0.0, False)):
        found = compare_to_reference(got, zero, zero, "float32", "gradient", None, each)
        assert found.ok == is_ok
    assert not compare_to_reference(
        got + 1e-3, zero, zero, "float32", "gradient", None, cancelled
    ).ok


def test_a_sum_that_cancels_has_the_error_of_its_terms():
    terms = np.array([[30.0, -40.0], [3.0, 4.0]])
    ref = terms.sum(-1)
    for error, is_ok in ((1.9e-4, True), (2.1e-4, False)):  # 4e-6 of 50
        results = (ref + error, ref, ref, "float32", "gradient", None)
        assert compare_to_reference(*results, cancelled_sum(terms)).ok == is_ok
        assert not compare_to_reference(*results).ok


def test_small_values_leave_the_floor_as_it_is_without_keys_too():
    ones, none = np.ones((4, 64)), np.ones((0, 64))
    assert cancelled_gradient(0.125, ones, ones, ones, 1.0) == pytest.approx(0.125 * 64)
    assert cancelled_gradient(0.125, ones, none, none, 1.0) == 0.0


def test_a_plain_run_that_overflows_leaves_ulps():
    ref, lp = np.tile([1.0, 2.0], 8), np.tile([INF, NAN], 8)
    agreement = compare_to_reference(ref, ref, lp, "float16", "gradient")
    assert agreement.max_budget == 2 * 2.0**-9
    assert agreement.rmse_budget == 2.0**-9


def test_the_error_is_the_largest_and_the_mean_counts_too():
    ref = np.ones(100)
    lp = ref.copy()
    lp[0] += 1.0
    outlier = ref.copy()
    outlier[0] += 2.1
    everywhere = ref + 0.2
    by_max = compare_to_reference(outlier, ref, lp, "float32", "output")
    assert not by_max.ok
    assert by_max.ratio == max(2.1 / by_max.max_budget, 0.21 / by_max.rmse_budget)
    by_rmse = compare_to_reference(everywhere, ref, lp, "float32", "output")
    assert by_rmse.max_error < by_rmse.max_budget
    assert not by_rmse.ok
    assert by_rmse.ratio == by_rmse.rmse / by_rmse.rmse_budget


def test_a_row_counts_once_among_few_errors():
    """An error in the gradient of one score appears in all columns of its row."""
    ref, error = np.zeros((32, 16)), np.zeros((32, 16))
    ref[:, 0], error[::4] = 1.0, 0.01
    lp = ref + 0.1 * error
    few, many = (
        compare_to_reference((ref + error)[:n], ref[:n], lp[:n], "float16", "gradient")
        for n in (8, 32)
    )
    assert few.rmse_budget == few.max_budget
    assert many.rmse_budget < many.max_budget


def test_the_mean_of_few_errors_does_not_count():
    ref = np.ones(16)
    lp = ref + np.array([1.0] + [0.0] * 15)
    got = np.full(16, 1.9)
    assert not compare_to_reference(got, ref, lp, "float32", "gradient").ok
    few = compare_to_reference(got[:15], ref[:15], lp[:15], "float32", "gradient")
    assert few.ok
    assert few.rmse_budget == few.max_budget
    assert not compare_to_reference(got[:15] * 4, ref[:15], lp[:15], "float32", "gradient").ok


def test_each_row_has_the_budget_of_its_own_size_and_of_a_usual_error():
    """A small row may be as wrong as lp's other small rows, but not as wrong as large rows."""
    ref = np.ones((100, 16))
    ref[0], ref[1] = 1000.0, 0.25
    lp = ref * (1 + 1e-3)
    usual = 1e-3 * math.sqrt((1000**2 + 0.25**2 + 98) / 100)
    for row, size in ((0, 1000.0), (1, 0.25), (2, 1.0)):
        of_lp = max(usual, 1e-3 * size)
        for kind, factor in (("output", 2), ("gradient", 3)):
            got = ref.copy()
            got[row] += factor * of_lp + 2 * ulp(size, "float16")
            agreement = compare_to_reference(got, ref, lp, "float16", kind, each="row")
            assert agreement.each == pytest.approx(1.0)
            assert compare_to_reference(got, ref, lp, "float16", kind).each == 0.0
    zero = np.zeros((100, 16))  # rows that have no error leave the usual one as it is
    padded = [np.concatenate((x, zero)) for x in (got, ref, lp)]
    assert compare_to_reference(*padded, "float16", kind, each="row").each == pytest.approx(1.0)


def test_each_number_has_the_budget_of_its_own_size():
    ref = np.array([[100.0] + [0.1] * 15])
    lp = ref * (1 + 1e-3)
    lp[0, 1] = 0.1  # by chance
    got = ref.copy()
    for place, error in ((0, 0.3 + 2 * 2.0**-4), (1, 2 * 2.0**-14), (2, 3e-4 + 2 * 2.0**-14)):
        got[:] = ref
        got[0, place] += 0.99 * error + (place == 0) * 0.002
        results = (got, ref, lp, "float16", "gradient")
        assert compare_to_reference(*results, each="number").each == pytest.approx(
            (got - ref)[0, place] / max(error, 4e-4)
        )
    expected = np.array([[0.0, 1.0] + [0.0] * 14])
    got[:], got[0, 1] = ref, 3.0
    assert compare_to_reference(*results, each="number").each > 1000
    assert compare_to_reference(*results, each="number", expected=expected).each < 1


def test_numbers_that_count_alone_are_enough_for_a_mean():
    ref = np.ones((1, 16))
    lp, got = ref + 1e-2, ref + 2e-2
    assert compare_to_reference(got, ref, lp, "float16", "gradient").ok
    assert compare_to_reference(got, ref, lp, "float16", "gradient", each="number").ratio > 1


def test_the_error_of_a_delta_is_that_of_a_rounded_output():
    random = np.random.default_rng(0)
    out, dout = random.normal(0, 1, (2, 1000, 64))
    rounded = out.astype(np.float16).astype(np.float64)
    error = np.sum(dout * (rounded - out), axis=-1)
    expected = rounded_delta(out, dout, "float16")
    assert expected.shape == (1000,)
    assert 0.3 < np.sqrt(np.mean(error**2) / np.mean(expected**2)) < 0.6


@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
def test_nothing_unexpected_may_be_infinite_or_nan(wrong):
    ref = np.array([1.0, 2.0])
    lp = np.array([0.0, 1e9])
    agreement = compare_to_reference(np.array([1.0, wrong]), ref, lp, "bfloat16", "output")
    assert not agreement.ok
    assert agreement.ratio == INF


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_nothing_agrees_with_nothing(shape):
    nothing = np.zeros(shape)
    assert compare_to_reference(nothing, nothing, nothing, "float32", "output").ratio == 0.0
    assert compare_lse(nothing, nothing).ratio == 0.0


def test_the_edge_of_the_budget_passes():
    assert Agreement(1.0, 1.0, 0.5, 0.5).ok
    assert not Agreement(math.nextafter(1.0, 2), 1.0, 0.0, 0.5).ok
    assert Agreement(0.0, 0.0, 0.0, 0.0).ratio == 0.0
    assert Agreement(1e-30, 0.0, 0.0, 0.0).ratio == INF
    assert Agreement(0.0, 1.0, 0.0, 1.0, finite=False).ratio == INF


def test_an_output_may_have_rounded_one_probability_where_lp_is_lucky():
    v = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16)
    probability = 0.1308  # of every row's only key, beside a sink
    rounded = np.float16(probability)
    assert abs(float(rounded) / probability - 1) > 0.9 * 2**-11
    ref = probability * v.astype(np.float64)
    got = (np.float64(rounded) * v).astype(np.float16)
    lse = np.zeros(64)
    assert compare_to_reference(got, ref, ref, "float16", "output", lse).ok
    assert not compare_to_reference(got, ref, ref, "float16", "output").ok  # no attention
    worse = (np.float64(rounded) * (1 + 2**-11) * v).astype(np.float16)
    assert not compare_to_reference(worse, ref, ref, "float16", "output", lse).ok


def test_twins_share_the_sum_of_their_budgets():
    a, b = np.array([1.0, 2.0]), np.array([1.0, 2.3])
    budget_a, budget_b = Agreement(0, 0.1, 0, 0.2), Agreement(0, 0.3, 0, 0.05)
    agreement = compare_twins(a, b, budget_a, budget_b)
    assert agreement.max_error == pytest.approx(0.3)
    assert agreement.rmse == pytest.approx(0.3 / math.sqrt(2))
    assert agreement.max_budget == pytest.approx(0.4)
    assert agreement.rmse_budget == pytest.approx(0.25)


def test_lse_is_absolute_below_one_and_relative_above_and_exact_of_an_empty_row():
    small, large = np.array([0.5, -200.0, -INF]), np.array([0.5, -400.0, -INF])
    assert lse_unit(np.array([0.5, -41.0, -INF])) == 1.0
    assert lse_unit(large) == pytest.approx(400 * 2**-22 / 1e-5)  # the rounding of scores
    edges = (small, 1.0, 0, 1e-5), (small, 1.0, 1, -2e-3), (large, lse_unit(large), 0, 400 * 2**-22)
    for lse, unit, place, edge in edges:
        for share, is_ok in ((0.95, True), (1.05, False)):
            got = lse.copy()
            got[place] += share * edge
            assert compare_lse(got, lse, unit=unit).ok == is_ok
    for got, wanted in (
        (0.0, -INF),
        (-INF, 0.0),
        (INF, -INF),
        (NAN, -INF),
        (NAN, 0.0),
        (-1e30, -INF),
    ):
        assert not compare_lse(np.array([1.0, got]), np.array([1.0, wanted])).ok


@pytest.mark.parametrize(
    ("a", "b", "is_ok"),
    [
        (NAN, NAN, False),
        (INF, 1.0, False),
        (1.0, -INF, False),
        (INF, -INF, False),
        (-INF, -INF, True),
    ],
)
def test_twins_agree_on_the_same_infinity_alone(a, b, is_ok):
    budget = Agreement(0, INF, 0, INF)
    assert compare_twins(np.array([a]), np.array([b]), budget, budget).ok == is_ok
