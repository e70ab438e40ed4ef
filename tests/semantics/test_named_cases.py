"""Every named case of parity on both sides. What no sequence uses holds NaN, or ids of no page.

Those of the quick suite run under JAX's strict switches, which change no result.
"""

from contextlib import nullcontext

import pytest

import pallas_attn
from tests.oracle import assert_within_budget
from tests.sides import EXPLICIT, IMPLEMENTATIONS, strict_types
from twin_attention.interop.parity.cases import AppendCase, BlockSparseCase, ContextCase, PagedCase
from twin_attention.interop.parity.inputs import GRADIENTS, TANGENTS, make_inputs
from twin_attention.interop.parity.sides import call
from twin_attention.interop.parity.suites.choose import QUICK
from twin_attention.interop.parity.suites.kinds import KINDS


def named_cases(suite):
    cases = [case for cases in KINDS for case in cases(suite)]
    return [case for case in cases if not isinstance(case, ContextCase)]


def run_explicitly(case):
    if isinstance(case, BlockSparseCase):
        return case.tile_q == case.tile_kv == 128
    if isinstance(case, PagedCase):
        return case.num_splits == 1
    return not isinstance(case, AppendCase)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The plain reference is the same code on both sides, and runs the quick suite."""
    suites = dict.fromkeys(IMPLEMENTATIONS, metafunc.config.getoption("--suite"))
    suites["reference"] = "quick"
    runs = [
        pytest.param(by, case, id=f"{by}-{case.name}")
        for by, suite in suites.items()
        for case in named_cases(suite)
        if by not in EXPLICIT or run_explicitly(case)
    ]
    metafunc.parametrize(("by", "case"), runs)


def test_results_and_gradients(side, by, case, torch_device):
    inputs = make_inputs(case, torch_device)
    if by in EXPLICIT:
        left_out = (*TANGENTS, *GRADIENTS * isinstance(case, BlockSparseCase))  # no backward
        inputs = {name: x for name, x in inputs.items() if name not in left_out}
    if getattr(case, "batch_invariant", False) and by == "triton" and side.api is pallas_attn:
        by = "torch_triton"
    with strict_types() if case.name in QUICK else nullcontext():
        got = call(side, case, inputs, by)
    assert_within_budget(got, inputs, case.spec)
