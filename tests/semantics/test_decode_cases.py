"""Every named decode, on both sides, within the error budget of the float64 oracle."""

import pytest

from interop.parity.inputs import make_inputs
from interop.parity.suites.decode import decode_cases
from tests.oracle import assert_within_budget
from tests.sides import choose_runs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    choose_runs(metafunc, decode_cases)


def test_decode(side, by, case, torch_device):
    """Pages lie in random order; what no sequence uses is NaN, or no page at all."""
    inputs = make_inputs(case, torch_device)
    got = side.call("paged_decode", inputs, return_lse=True, implementation=by, **case.options)
    assert_within_budget(got, inputs, case.spec)
