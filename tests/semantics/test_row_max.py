from dataclasses import replace

import torch

from tests.oracle import assert_within_budget
from tests.sides import attention
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import make_inputs

CASE = FlashCase(
    "row maxima", seq_q=70, seq_kv=50, heads_q=2, heads_kv=1, head_dim=32, dtype="float32",
    causal=True, sinks=True, row_max=True,
)  # fmt: skip
EMPTY = slice(0, CASE.seq_q - CASE.seq_kv)  # queries that see no key


def test_a_sink_is_no_score(side, implementation, torch_device):
    """Sinks far above all scores change only the output."""
    inputs = make_inputs(CASE, torch_device)
    options = CASE.options | {"implementation": implementation}
    want = attention(side, inputs, **options)["row_max"]
    inputs["sinks"] += 50
    got = attention(side, inputs, **options)
    assert torch.equal(got["row_max"], want)
    assert (got["row_max"][..., EMPTY] == -torch.inf).all()
    assert_within_budget(got, inputs, CASE.spec)


def test_asking_changes_no_other_result(side, torch_device):
    inputs = make_inputs(replace(CASE, sinks=False), torch_device)
    options = CASE.options | {"implementation": "triton", "deterministic": True}
    got = attention(side, inputs, **options)
    del options["return_row_max"]
    want = attention(side, inputs, **options)
    # Two programs of one compiler may contract a product and a sum of lse differently.
    is_exact = (side.api.__name__, torch_device) == ("torch_attn", "cpu")
    rounding = 0 if is_exact else 1e-5
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=rounding, atol=rounding)


def test_it_is_returned_without_the_log_sum_exp(side, implementation, torch_device):
    inputs = make_inputs(CASE, torch_device)
    operands = {name: inputs[name] for name in ("q", "k", "v")}
    options = {"implementation": implementation, "return_row_max": True}
    out, row_max = side.call("flash_attention", operands, **options)
    both = side.call("flash_attention", operands, return_lse=True, **options)
    assert len(both) == 3
    assert torch.equal(out, both[0])
    assert torch.equal(row_max, both[2])
