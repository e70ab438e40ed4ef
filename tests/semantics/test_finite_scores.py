import pytest
import torch

from tests.oracle import assert_within_budget
from tests.sides import attention
from twin_attention.interop.parity.cases import FlashCase, VarlenCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import results

LEAST = torch.finfo(torch.float32).min
VALUES = (-1e4, -1e9, -1e10, -1e30, torch.finfo(torch.bfloat16).min, LEAST)


def hide(inputs, value):
    """Give a value to the first keys and to all keys of some rows, or to distances."""
    name = next(x for x in ("bias", "relative_bias", "alibi_slopes") if x in inputs)
    x = inputs[name]
    if name == "alibi_slopes":
        x[..., ::2] = min(-value, 1e30)
        return
    value = max(value, torch.finfo(x.dtype).min)
    x[..., : x.shape[-1] * 3 // 4] = value
    if name == "bias":
        x[:, :, 5:20] = value


CASES = [
    FlashCase("rows", 1, 40, 50, 2, 1, 16, dtype="float32", bias="bhqk"),
    FlashCase("a sink", 1, 40, 50, 2, 1, 16, bias="hqk", sinks=True, causal=True, row_max=True),
    FlashCase("a cap", 1, 40, 50, 2, 1, 16, dtype="float16", bias="bhqk", softcap=20.0),
    FlashCase("all terms", 1, 40, 50, 2, 1, 16, bias="qk", relative=4, alibi="heads"),
    FlashCase("a table", 1, 40, 50, 2, 1, 16, dtype="float32", relative=30),
    VarlenCase("packed", ((20, 30), (9, 9)), (4, 3), 2, 1, 16, relative=3, alibi="all"),
    VarlenCase("packed slopes", ((20, 30), (9, 9)), (4, 3), 2, 1, 16, alibi="heads"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_number_may_hide_keys(side, implementation, torch_device, case):
    every = case.name in ("rows", "packed")
    for value in VALUES if every else VALUES[1::2]:
        inputs = make_inputs(case, torch_device)
        hide(inputs, value)
        options = {"implementation": implementation, **case.options}
        got = results(side, case.spec.function, inputs, **options)
        assert_within_budget(got, inputs, case.spec)


def test_a_row_of_one_value_has_the_mean(side, implementation, torch_device):
    """The values get the gradient once, not once for each key."""
    case = FlashCase("one value", 1, 30, 40, 1, 1, 16, dtype="float32", bias="bqk")
    for value in VALUES[1:]:
        inputs = make_inputs(case, torch_device)
        inputs["bias"][:] = value
        got = attention(side, inputs, implementation=implementation, **case.options)
        mean = inputs["v"].mean(1, keepdim=True).expand_as(got["out"])
        torch.testing.assert_close(got["out"], mean, rtol=1e-4, atol=1e-5)
        passed_on = inputs["dout"].sum((0, 1, 2))
        torch.testing.assert_close(got["dv"].sum((0, 1, 2)), passed_on, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("score", [2.0**10, 2.0**16])
def test_no_row_is_multiplied_without_terms(side, implementation, torch_device, score):
    """p of a backward sums to 1 to within the rounding of lse, which is that of the score."""
    case = FlashCase("large", 1, 30, 40, 1, 1, 16, dtype="float32", scale=score)
    inputs = make_inputs(case, torch_device)
    inputs["q"][:] = inputs["k"][:] = 0.25
    got = attention(side, inputs, implementation=implementation, **case.options)
    rows = inputs["dout"].abs().sum((0, 1, 2))
    error = (got["dv"].sum((0, 1, 2)) - inputs["dout"].sum((0, 1, 2))).abs()
    assert (error <= score * 2.0**-22 * rows).all()
