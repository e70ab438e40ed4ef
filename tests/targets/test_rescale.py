"""The PTX that rescales a warp's sums, run by NumPy for its lanes."""

import numpy as np
import pytest

from tests.targets.warp import LANES, run
from twin_attention.targets.ptx import any_of_warp, rescale

COUNT = 8


def rescaled(factors):
    registers, _ = run(any_of_warp(2), {"$2": factors[0], "$3": factors[1]})
    flags = [registers["$0"], registers["$1"]]
    numbers = np.random.default_rng(0).normal(size=(COUNT, LANES)).astype(np.float32)
    operands = [
        *numbers,
        *(factors[i % 2] for i in range(COUNT)),
        *(flags[i % 2] for i in range(COUNT)),
    ]
    named = {f"${COUNT + i}": x for i, x in enumerate(operands)}
    registers, taken = run(rescale(COUNT), named)
    return numbers, np.stack([registers[f"${i}"] for i in range(COUNT)]), taken


def test_a_warp_whose_factors_are_all_1_passes_over_it():
    numbers, results, taken = rescaled(np.ones((2, LANES), np.float32))
    assert taken == 1
    np.testing.assert_array_equal(results, numbers)


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("value", [0.0, 0.5, np.nan])
def test_one_factor_is_enough(row, value):
    factors = np.ones((2, LANES), np.float32)
    factors[row, 7] = value
    numbers, results, taken = rescaled(factors)
    assert taken == 0
    np.testing.assert_array_equal(results, numbers * np.tile(factors, (COUNT // 2, 1)))
