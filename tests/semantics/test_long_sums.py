"""float32 gradients summed over many queries are rounded once a tile, not once a query."""

import re

import pytest

from tests.conftest import ON_GPU
from tests.oracle import assert_within_budget
from tests.sides import attention
from tuning.static.gate import FRAMEWORKS, Problem, compiler
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.targets.target import TARGETS


@pytest.mark.parametrize(("framework", "target"), zip(FRAMEWORKS, TARGETS, strict=True))
def test_compiled_float32_products_start_from_zero(framework, target):
    """Triton turns ``acc + dot(a, b)`` into ``dot(a, b, acc)``, which adds to acc row by row."""
    spec = Problem(framework, target, "float32", 16, "causal").spec
    compiled = {name: kernel.asm["ttir"] for name, _, kernel in compiler(framework)(spec, target)}
    ttir = compiled["flash_bwd_dkdv"]
    zeros = set(re.findall(r"(%\w+) = arith\.constant dense<0\.0+e\+00>", ttir))
    accumulators = re.findall(r"tt\.dot %\w+, %\w+, (%\w+)", ttir)
    assert len(accumulators) == ttir.count("tt.dot ") >= 4
    assert set(accumulators) <= zeros


@pytest.mark.skipif(not ON_GPU, reason="interpreters sum a product by itself, whatever is asked")
def test_many_small_terms_after_a_large_one(side, torch_device):
    """One by one, each term would be rounded at the magnitude of the large one."""
    case = FlashCase("long-sum", 1, 32768, 16, 1, 1, head_dim=16, dtype="float32")
    inputs = make_inputs(case, "cpu")
    inputs["dout"][:, 0] *= 1000
    on_device = {name: x.to(torch_device) for name, x in inputs.items()}
    got = attention(side, on_device, implementation="triton")
    assert_within_budget({name: x.cpu() for name, x in got.items()}, inputs, case.spec)
