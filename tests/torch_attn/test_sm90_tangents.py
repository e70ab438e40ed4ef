from dataclasses import replace

import torch

from tests.torch_attn.explicit_kernels import EDGES, LISTED, check_results, gluon_backend, in_turn
from tests.torch_attn.gluon_interpreter import interpreted
from tests.torch_attn.test_sm90_kernels import CASES, PACKED
from torch_attn.kernels.sm90.flash_jvp import flash_jvp
from twin_attention.contract.operands import FlashOperands, VarlenOperands
from twin_attention.interop.parity.cases import FlashCase, VarlenCase
from twin_attention.interop.parity.inputs import TANGENTS, make_inputs
from twin_attention.interop.parity.oracle import OF_TANGENTS, evaluate, expectations, parts_of

BACKEND = gluon_backend("sm90")
OTHERS = [
    FlashCase("one key", 1, 70, 1, 1, 1, 64, sinks=True),
    FlashCase("sinks and slopes", 1, 130, 140, 2, 2, 64, sinks=True, alibi="heads", causal=True),
    FlashCase("dropout", 1, 130, 140, 1, 1, 64, dropout_rate=0.3, causal=True),
]
ALL = [*CASES, *EDGES, *LISTED, *PACKED, *OTHERS]


@in_turn(x for x in ALL if BACKEND.family.supports("flash_jvp", x.spec, "sm90") is None)
def test_tangents(case, mode):
    inputs, spec = make_inputs(replace(case, tangents=True), "cpu"), case.spec
    (expected,) = expectations(inputs, parts_of(spec))
    exact = evaluate(inputs, spec, torch.float32)
    out, lse = exact["out"].to(inputs["q"].dtype), exact["lse"]
    rest = torch.zeros_like(lse) if spec.terms else None
    of = {x: inputs.pop(name) for name, x in TANGENTS.items() if name in inputs}
    kind = VarlenOperands if isinstance(case, VarlenCase) else FlashOperands
    operands = kind(**{name: x for name, x in inputs.items() if name in kind._fields})
    with interpreted(mode) as launched:
        found = flash_jvp(kind(*map(of.get, kind._fields)), operands, out, lse, rest, spec, BACKEND)
    check_results(dict(zip(OF_TANGENTS, found, strict=True)), expected)
    assert launched[-1] == "flash_jvp"
