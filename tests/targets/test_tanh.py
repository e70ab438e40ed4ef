import functools

import numpy as np
import pytest

from twin_attention.contract.spec import SMALL_CAP
from twin_attention.targets.tanh import (
    CLOSE,
    CLOSE_LIMIT,
    HIGH_BITS,
    LIMIT,
    NEAR,
    NEAR_LIMIT,
    SUM_BITS,
    P,
    Q,
)


def _tanh(x):
    def polynomial(coefficients):
        coefficients = np.asarray(coefficients, np.float32)
        return functools.reduce(lambda y, c: y * x2 + c, coefficients[::-1])

    x = np.clip(x, np.float32(-LIMIT), np.float32(LIMIT))
    x2 = x * x
    return x * polynomial(P) * (np.float32(1) / polynomial(Q))


def test_the_relative_error_is_at_most_5e_7():
    x = np.geomspace(1e-6, 20, 200_001, dtype=np.float32)
    x = np.concatenate([-x, x])
    got = _tanh(x)
    assert got.dtype == np.float32
    assert np.abs(got / np.tanh(x.astype(np.float64)) - 1).max() <= 5e-7


def test_it_is_constant_beyond_the_limit_and_never_above_1():
    limit = _tanh(np.float32(LIMIT))
    assert (_tanh(np.array([LIMIT, 8, 20, 1e30, np.inf], np.float32)) == limit).all()
    assert np.abs(_tanh(np.linspace(-20, 20, 100_001, dtype=np.float32))).max() <= 1
    assert _tanh(np.float32(0)) == 0
    assert np.isnan(_tanh(np.float32(np.nan)))


def _near(x):
    x2 = x * x
    return x * functools.reduce(lambda y, c: y * x2 + c, NEAR[::-1])


def test_the_polynomial_near_0_rises_everywhere():
    assert (np.diff(_near(np.linspace(-100, 100, 1_000_001))) > 0).all()


LEAST = HIGH_BITS / _near(NEAR_LIMIT)  # b, in base 2


@pytest.mark.parametrize("b", [LEAST, 1.1 * LEAST, 30 * np.log2(np.e), SMALL_CAP * np.log2(np.e)])
def test_sums_of_exponentials_show_that_scores_are_near_0(b):
    x = np.linspace(NEAR_LIMIT, 20, 1_000_001)
    high = 2 ** (b * _near(NEAR_LIMIT))
    error = 2 ** (-b * np.tanh(x)) - 2 ** (-b * _near(x))
    assert error.min() >= 0
    assert 32 * error.max() <= 2**-14 * 2**SUM_BITS / high


@pytest.mark.parametrize(
    ("coefficients", "limit", "error"), [(NEAR, NEAR_LIMIT, 5e-6), (CLOSE, CLOSE_LIMIT, 5.5e-7)]
)
def test_relative_errors_of_the_polynomials_near_0(coefficients, limit, error):
    x = np.linspace(1e-6, limit, 200_001, dtype=np.float32)
    x2 = x * x
    got = x * functools.reduce(lambda y, c: y * x2 + c, np.asarray(coefficients, np.float32)[::-1])
    assert got.dtype == np.float32
    assert np.abs(got / np.tanh(x.astype(np.float64)) - 1).max() <= error
