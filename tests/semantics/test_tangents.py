"""Forward mode by some of the operands. Named cases of parity have the tangents of all."""

from dataclasses import replace

import pytest

from tests.oracle import assert_within_budget
from twin_attention.interop.parity.cases import FlashCase, VarlenCase
from twin_attention.interop.parity.inputs import GRADIENTS, TANGENTS, make_inputs
from twin_attention.interop.parity.sides import call

DENSE = FlashCase(
    "tangents", batch=1, seq_q=24, seq_kv=40, heads_q=2, heads_kv=1, head_dim=16, dtype="float32",
    causal=True, sinks=True, relative=3, bias="qk", tangents=True,
)  # fmt: skip
PACKED = VarlenCase(
    "packed tangents", ((9, 20), (0, 3), (7, 7)), heads_q=2, heads_kv=1, head_dim=16,
    dtype="float32", causal=True, tangents=True,
)  # fmt: skip
CASES = {
    "q": (DENSE, {"tq"}),
    "v and sinks": (replace(DENSE, softcap=2.0, relative=0, bias=None), {"tv", "tsinks"}),
    "bias": (DENSE, {"tbias"}),
    "k": (PACKED, {"tk"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_other_operands_have_no_tangent(side, name, torch_device):
    case, tangents = CASES[name]
    left_out = {*GRADIENTS, *TANGENTS} - tangents
    inputs = {n: x for n, x in make_inputs(case, torch_device).items() if n not in left_out}
    assert_within_budget(call(side, case, inputs, "triton"), inputs, case.spec)
