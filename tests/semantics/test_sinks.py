from dataclasses import replace

import pytest
import torch

from tests.oracle import assert_within_budget
from tests.sides import attention
from twin_attention.contract.operands import WIDENED
from twin_attention.interop.parity.cases import (
    BlockSparseCase,
    DecodeCase,
    FlashCase,
    PagedCase,
    VarlenCase,
)
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import call

CASE = FlashCase(
    "sinks", seq_q=70, seq_kv=50, heads_q=2, heads_kv=1, head_dim=32, dtype="float32", causal=True,
    sinks=True,
)  # fmt: skip
IN_16_BITS = (
    replace(CASE, alibi="all"),
    VarlenCase("packed", sinks=True, alibi="heads"),
    BlockSparseCase("mask", sinks=True),
    DecodeCase("decode", (9, 20), page_size=8, max_pages=3, sinks=True),
    PagedCase("chunks", (9, 20), new_tokens=(2, 9), page_size=8, max_pages=3, sinks=True),
)
EMPTY = slice(0, CASE.seq_q - CASE.seq_kv)  # queries that see no key


def test_a_sink_of_minus_infinity_is_none(bitwise_side, torch_device):
    """Bit for bit in the kernels, also in rows without a key."""
    inputs = make_inputs(CASE, torch_device)
    options = CASE.options | {"implementation": "triton"}
    inputs["sinks"] = torch.full_like(inputs["sinks"], -torch.inf)
    got = attention(bitwise_side, inputs, **options)
    del inputs["sinks"]
    want = attention(bitwise_side, inputs, **options)
    assert all(torch.equal(got[name], x) for name, x in want.items())
    assert (got["lse"][..., EMPTY] == -torch.inf).all()
    assert (got["dsinks"] == 0).all()


def test_one_head_may_have_a_sink_of_minus_infinity(side, implementation, torch_device):
    inputs = make_inputs(CASE, torch_device)
    inputs["sinks"][1] = -torch.inf
    got = attention(side, inputs, implementation=implementation, **CASE.options)
    assert (got["lse"][:, 1, EMPTY] == -torch.inf).all()
    assert torch.isfinite(got["lse"][:, ::2]).all()
    assert got["dsinks"][1] == 0
    assert_within_budget(got, inputs, CASE.spec)


def test_a_huge_sink_takes_everything(side, implementation, torch_device):
    inputs = make_inputs(CASE, torch_device)
    inputs["sinks"].fill_(100.0)
    got = attention(side, inputs, implementation=implementation, **CASE.options)
    for name in ("out", "dq", "dk", "dv"):
        assert got[name].abs().max() < 1e-30
    assert (got["lse"] == 100).all()
    torch.testing.assert_close(got["dsinks"], inputs["dlse"].sum((0, 2)), rtol=1e-4, atol=1e-4)


def test_a_row_without_keys_has_its_sink_as_lse(side, implementation, torch_device):
    """The gradient of that lse goes only to the sink."""
    inputs = make_inputs(CASE, torch_device)
    options = CASE.options | {"implementation": implementation, "deterministic": True}
    got = attention(side, inputs, **options)
    assert (got["out"][:, EMPTY] == 0).all()
    assert (got["dq"][:, EMPTY] == 0).all()
    sinks = inputs["sinks"][:, None].expand_as(got["lse"][..., EMPTY][0])
    for lse in got["lse"][..., EMPTY]:
        torch.testing.assert_close(lse, sinks)

    dout, dlse = inputs["dout"].clone(), inputs["dlse"].clone()
    dout[:, EMPTY], dlse[..., EMPTY] = 1e4, dlse[..., EMPTY] + 1
    other = attention(side, inputs | {"dout": dout, "dlse": dlse}, **options)
    assert all(torch.equal(got[name], other[name]) for name in ("dk", "dv"))
    assert torch.equal(got["dq"], other["dq"])
    more = got["dsinks"] + CASE.batch * EMPTY.stop
    torch.testing.assert_close(other["dsinks"], more, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", IN_16_BITS, ids=lambda case: case.name)
def test_sinks_and_slopes_in_16_bits(side, torch_device, case):
    """They are the same numbers in float32, and the gradient of sinks has their dtype."""
    inputs = make_inputs(case, torch_device)
    rounded = {name: inputs[name].bfloat16() for name in WIDENED if name in inputs}
    got = call(side, case, inputs | rounded, "reference")
    want = call(side, case, inputs | {x: rounded[x].float() for x in rounded}, "reference")
    for name, x in want.items():
        torch.testing.assert_close(got[name], x.to(got[name].dtype))
    assert "dsinks" not in got or got["dsinks"].dtype == torch.bfloat16
