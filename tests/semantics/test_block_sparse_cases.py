"""Every named case of block-sparse attention, on both sides, within the error budget."""

import pytest

from interop.parity.cases import BlockSparseCase
from interop.parity.inputs import make_inputs
from interop.parity.sides import GRADIENTS, results
from interop.parity.suites.block_sparse import block_sparse_cases
from tests.oracle import assert_within_budget
from tests.sides import EXPLICIT, choose_runs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the explicit kernels' forward, of tiles of 128 by 128: they have no backward."""

    def explicit(case: BlockSparseCase) -> bool:
        return case.tile_q == case.tile_kv == 128

    choose_runs(metafunc, block_sparse_cases, explicit)


def test_forward_and_gradients(side, by, case, torch_device):
    inputs = make_inputs(case, torch_device)
    if by in EXPLICIT:
        inputs = {name: x for name, x in inputs.items() if name not in GRADIENTS}
    got = results(side, "block_sparse_attention", inputs, implementation=by, **case.options)
    assert_within_budget(got, inputs, case.spec)
