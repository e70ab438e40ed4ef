"""Every named case of an append, packed or rotated, on both sides, within the error budget."""

import pytest

from interop.parity.inputs import make_inputs
from interop.parity.sides import results
from interop.parity.suites.append import append_cases
from tests.oracle import assert_within_budget
from tests.sides import choose_runs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    choose_runs(metafunc, append_cases, explicit=lambda case: False)


def test_append_kv(side, by, case, torch_device):
    """Hold a case to its budget: both pools whole, and rotated queries; padding holds NaN."""
    inputs = make_inputs(case, torch_device)
    got = results(side, "append_kv", inputs, implementation=by, **case.options)
    assert_within_budget(got, inputs, case.spec)
