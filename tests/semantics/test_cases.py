"""Every named case, on both sides, within the error budget of the float64 oracle."""

import pytest

from interop.parity.inputs import make_inputs
from interop.parity.suites.flash import flash_cases
from tests.oracle import assert_within_budget
from tests.sides import attention, choose_runs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    choose_runs(metafunc, flash_cases)


def test_forward_and_gradients(side, by, case, torch_device):
    inputs = make_inputs(case, torch_device)
    got = attention(side, inputs, implementation=by, **case.options)
    assert_within_budget(got, inputs, case.spec)
