"""Every named case of block-sparse attention, on both sides, within the error budget."""

import pytest

from interop.parity.cases import block_sparse_cases
from interop.parity.inputs import make_inputs
from interop.parity.sides import GRADIENTS, results
from tests.oracle import assert_within_budget
from tests.sides import EXPLICIT, IMPLEMENTATIONS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The plain reference runs the quick suite, the kernels the suite that was chosen.

    Of the explicit kernels that is their forward, with tiles of 128 by 128: they have no backward.
    """
    suites = dict.fromkeys(IMPLEMENTATIONS, metafunc.config.getoption("--suite"))
    suites["reference"] = "quick"
    runs = [
        (name, case)
        for name, suite in suites.items()
        for case in block_sparse_cases(suite)
        if name not in EXPLICIT or case.tile_q == case.tile_kv == 128
    ]
    metafunc.parametrize(("by", "case"), runs, ids=[f"{name}-{case.name}" for name, case in runs])


def test_forward_and_gradients(side, by, case, torch_device):
    inputs = make_inputs(case, torch_device)
    if by in EXPLICIT:
        inputs = {name: x for name, x in inputs.items() if name not in GRADIENTS}
    got = results(side, "block_sparse_attention", inputs, implementation=by, **case.options)
    assert_within_budget(got, inputs, case.spec)
