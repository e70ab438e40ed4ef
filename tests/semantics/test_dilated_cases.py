"""Every named case of dilated attention, on both sides, within the error budget."""

import pytest

from interop.parity.inputs import make_inputs
from interop.parity.sides import results
from interop.parity.suites.dilated import dilated_cases
from tests.oracle import assert_within_budget
from tests.sides import choose_runs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    choose_runs(metafunc, dilated_cases)


def test_forward_and_gradients(side, by, case, torch_device):
    inputs = make_inputs(case, torch_device)
    got = results(side, "dilated_attention", inputs, implementation=by, **case.options)
    assert_within_budget(got, inputs, case.spec)
