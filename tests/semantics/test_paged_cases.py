"""Every named case of paged attention, on both sides, within the error budget."""

import pytest

from interop.parity.inputs import make_inputs
from interop.parity.suites.paged import paged_cases
from tests.oracle import assert_within_budget
from tests.sides import choose_runs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    choose_runs(metafunc, paged_cases, explicit=lambda case: case.num_splits == 1)


def test_paged_attention(side, by, case, torch_device):
    """Hold a case to its budget, with NaN, or ids of no page, in all that no sequence uses."""
    inputs = make_inputs(case, torch_device)
    got = side.call("paged_attention", inputs, return_lse=True, implementation=by, **case.options)
    assert_within_budget(got, inputs, case.spec)
