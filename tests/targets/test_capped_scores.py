"""The PTX of capped scores, run by NumPy for the lanes of a warp."""

import numpy as np
import pytest

from tests.targets.warp import LANES, run
from twin_attention.contract.spec import ScoreRule
from twin_attention.targets.ptx import cap_scores, capped_exponentials

COUNT = 32
LOG2E = np.log2(np.e)


def _exponentials(s, a, b):
    """Run `capped_exponentials` of [lanes, pairs, 2]; return exponentials, sums and the branch."""
    given = [s[:, :, 0].T, s[:, :, 1].T, np.full((COUNT, LANES), a), np.full((COUNT, LANES), b)]
    names = [f"${i}" for i in range(2 * COUNT, 6 * COUNT)]
    with np.errstate(all="ignore"):
        registers, taken = run(
            capped_exponentials(COUNT),
            zip(names, np.concatenate(given).astype(np.float32), strict=True),
        )
    words = np.stack([registers[f"${i}"] for i in range(COUNT)], 1)
    pairs = np.stack([words << 16, words & 0xFFFF0000], -1).astype(np.uint32).view(np.float32)
    sums = np.stack([registers[f"${COUNT + i}"] for i in range(COUNT)], 1)
    return pairs, sums, taken


def _scores(deviation, mean=0.0):
    numbers = np.random.default_rng(0).normal(mean, deviation, (LANES, COUNT, 2))
    return numbers.astype(np.float32)


# Softcap, scores' deviation and mean, and the branch: the first where the sums show that all are
# near, the second where the largest does, or none.
CASES = {
    "near": (30.0, 1.0, 0.0, 1), "cap of 50": (50.0, 1.0, 0.0, 1), "some far": (30.0, 5.0, 0.0, 0),
    "all far": (30.0, 60.0, 0.0, 0), "far and negative": (30.0, 1.0, -15.0, 0),
    "low sums of what is near": (30.0, 0.1, -10.0, 2), "a small cap": (10.0, 0.5, 0.0, 2),
    "a small cap, far": (0.5, 1.0, 0.0, 0),
}  # fmt: skip


@pytest.mark.parametrize("scale", [0.125, -0.125, 1e3])
@pytest.mark.parametrize(("softcap", "deviation", "mean", "branch"), CASES.values(), ids=CASES)
def test_exponentials_are_right_and_computed_again_where_they_must(
    softcap, deviation, mean, branch, scale
):
    scores = _scores(deviation, mean)
    rule = ScoreRule.of(scale, softcap)
    s = scores / np.float32(scale)
    got, sums, taken = _exponentials(s, rule.cap_scale, softcap * LOG2E)
    expected = np.exp(softcap * np.tanh(scores.astype(np.float64) / softcap))
    rows = expected.sum(-1).reshape(LANES, COUNT // 2, 2).sum(1)
    rows = np.tile(rows, COUNT // 2)
    assert taken == branch
    assert np.abs(sums / rows - 1).max() <= 2e-4
    # An exponential is right relative to its own rounding and to its row's sum.
    error = np.abs(got - expected) - 2.0**-8 * expected
    assert (error <= 2e-4 * rows[..., None]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_and_what_is_infinite(value):
    s = _scores(1.0)
    s[3, 5, 1] = value
    got, sums, _ = _exponentials(s, 1 / 30, 30 * LOG2E)
    expected = np.exp(30 * np.tanh(s.astype(np.float64) / 30))
    rows = np.tile(expected.sum(-1).reshape(LANES, COUNT // 2, 2).sum(1), COUNT // 2)
    np.testing.assert_allclose(sums, rows, rtol=2e-4)
    assert np.isnan(got[3, 5, 1]) == np.isnan(value)


def _capped(scores, scale, exact=False, close=False):
    """Run `cap_scores` with a cap of 30 on the products of scores of a scale."""
    rule = ScoreRule.of(scale, 30.0)
    products = (scores / np.float32(scale)).T
    given = [products, np.full((COUNT, LANES), rule.cap_scale), np.full((COUNT, LANES), 30)]
    names = [f"${i}" for i in range(COUNT, 4 * COUNT)]
    with np.errstate(all="ignore"):
        registers, _ = run(
            cap_scores(COUNT, exact=exact, close=close),
            zip(names, np.concatenate(given).astype(np.float32), strict=True),
        )
    return np.stack([registers[f"${i}"] for i in range(COUNT)], 1)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("deviation", [1.0, 20.0])
def test_capped_scores(exact, deviation):
    scores = _scores(deviation)[:, :, 0]
    expected = 30 * np.tanh(scores.astype(np.float64) / 30)
    np.testing.assert_allclose(_capped(scores, 1.0, exact), expected, rtol=6e-6, atol=2e-5)


@pytest.mark.parametrize("how", [{"exact": True}, {"close": True}])
def test_capped_scores_of_a_small_error(how):
    scores = _scores(1.0, -3.0)[:, :, 0]
    assert scores.min() > -7.5  # a quarter of the cap
    expected = 30 * np.tanh(scores.astype(np.float64) / 30)
    np.testing.assert_allclose(_capped(scores, 1.0, **how), expected, rtol=6e-7)


@pytest.mark.parametrize("scale", [1e-6, 1e-7, 1e-8, 1e-10])
def test_a_small_scale_loses_no_coefficient(scale):
    scores = np.full((LANES, COUNT), 11.0, np.float32)  # near 3/8 of the cap
    expected = 30 * np.tanh(11.0 / 30)
    np.testing.assert_allclose(_capped(scores, scale), expected, rtol=6e-6)
