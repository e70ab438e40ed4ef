"""Reducing the times of calls."""

import doctest

import pytest

from bench import timing
from bench.records import Times
from bench.timing import summarize


def test_the_median_is_of_rounds_so_that_one_bad_round_does_not_move_it():
    times = summarize([[1.0, 2.0, 3.0], [50.0, 60.0, 70.0], [1.0, 2.0, 4.0]])
    assert (times.median, times.fastest, times.slowest) == (2.0, 2.0, 60.0)


def test_percentiles_are_of_all_calls():
    times = summarize([[float(i) for i in range(6)], [float(i) for i in range(6, 11)]])
    assert (times.p20, times.p80) == (2.0, 8.0)


def test_spread_is_relative_to_the_median():
    assert Times(2.0, 1.9, 2.2).spread == pytest.approx(0.15)


@pytest.mark.parametrize("rounds", [[], [[]], [[1.0], []]])
def test_a_round_without_calls_is_refused(rounds):
    with pytest.raises(ValueError, match="rounds: expected a call or more in each"):
        summarize(rounds)


def test_the_example_runs():
    assert doctest.testmod(timing) == doctest.TestResults(failed=0, attempted=1)
