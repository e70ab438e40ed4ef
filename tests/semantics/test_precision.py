from dataclasses import replace

import pytest
import torch

from tests.oracle import assert_within_budget
from tests.sides import attention
from twin_attention.interop.parity.cases import BlockSparseCase, DilatedCase, FlashCase, VarlenCase
from twin_attention.interop.parity.check import agreements
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.oracle import expectations, parts_of
from twin_attention.interop.parity.sides import results

CASE = FlashCase("precision", 1, 40, 50, 2, 1, 16, dtype="float32", causal=True, precision="tf32")
ONE_KEY = replace(CASE, name="precision-one-key", seq_q=20, seq_kv=1, causal=False)
EACH_FUNCTION = {
    "flash_attention": CASE,
    "flash_attention_varlen": VarlenCase(
        "precision-varlen", ((20, 30), (9, 4)), (3, 3), head_dim=16, dtype="float32",
        precision="tf32",
    ),
    "block_sparse_attention": BlockSparseCase(
        "precision-sparse", 1, 90, 130, 2, 1, 16, dtype="float32", precision="tf32"
    ),
    "dilated_attention": DilatedCase(
        "precision-dilated", 1, 96, 96, 2, 2, 16, dtype="float32", precision="tf32",
        segment_lengths=(48, 96), dilation_rates=(1, 2),
    ),
}  # fmt: skip


def cut(x):
    return (x.view(torch.int32) & -(1 << 13)).view(torch.float32)


def as_tf32(x):
    """Ties go away from 0: add a half, and cut."""
    return cut((x.view(torch.int32) + (1 << 12)).view(torch.float32))


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def multiplies_in_tf32(side, implementation, device):
    """Pallas's interpreter multiplies in IEEE precision, whatever is asked for."""
    in_pallas = side.api.__name__ == "pallas_attn"
    return device == "cuda" or implementation == "reference" or not in_pallas


@pytest.fixture(params=["triton", "reference"])
def portable(request):
    return request.param


def test_products_round_their_operands(side, portable, torch_device):
    """With one key p is 1, so the result is the value as the product takes it."""
    inputs = make_inputs(ONE_KEY, torch_device)
    got = attention(side, inputs, implementation=portable, **ONE_KEY.options)
    value = inputs["v"]
    if multiplies_in_tf32(side, portable, torch_device):
        value = as_tf32(value)
        assert not torch.equal(value, inputs["v"])
        assert not torch.equal(value, cut(inputs["v"]))
    assert torch.equal(got["out"], value.expand_as(got["out"]))
    assert_within_budget(got, inputs, ONE_KEY.spec)


def test_ieee_is_the_default(side, portable, torch_device):
    inputs = make_inputs(CASE, torch_device)
    options = {"causal": True, "implementation": portable}
    default = attention(side, inputs, **options)
    assert equal(default, attention(side, inputs, precision="ieee", **options))
    assert_within_budget(default, inputs, replace(CASE, precision="ieee").spec)


def test_it_has_no_effect_in_16_bits(side, portable, torch_device):
    case = replace(CASE, dtype="float16")
    inputs = make_inputs(case, torch_device)
    options = {"causal": True, "implementation": portable}
    found = [attention(side, inputs, precision=x, **options) for x in ("ieee", "tf32")]
    assert equal(*found)


@pytest.mark.parametrize("function", EACH_FUNCTION)
def test_every_function_takes_it(side, torch_device, function):
    case = EACH_FUNCTION[function]
    inputs = make_inputs(case, torch_device)
    found = results(side, function, inputs, implementation="reference", **case.options)
    assert_within_budget(found, inputs, case.spec)
    options = case.options | {"implementation": "reference", "precision": "ieee"}
    assert not equal(found, results(side, function, inputs, **options))


@pytest.mark.parametrize("term", [{"bias": "bhq"}, {"relative": 0}], ids=lambda x: next(iter(x)))
def test_the_gradient_of_what_all_keys_share(side, portable, torch_device, term):
    """The sum of ds over all keys cancels but for the gradient of lse and the rounding."""
    case = replace(CASE, name="precision-shared", seq_kv=3, head_dim=128, causal=False, **term)
    inputs = make_inputs(case, torch_device)
    found = attention(side, inputs, implementation=portable, **case.options)
    assert_within_budget(found, inputs, case.spec)


def test_cut_operands_are_outside_of_the_budget(torch_device):
    """Tensor cores do not round by themselves."""
    case = replace(CASE, seq_q=64, seq_kv=579, head_dim=128, causal=False)
    inputs = make_inputs(case, torch_device)
    (expected,) = expectations(inputs, parts_of(case.spec))

    def forward(q, k, v, as_multiplied):
        q, k, v = (as_multiplied(x.transpose(1, 2)).double() for x in (q, k, v))
        s = (q * case.spec.scale) @ k.transpose(-1, -2)
        out = as_multiplied(s.softmax(-1).float()).double() @ v
        return {"out": out.transpose(1, 2).float(), "lse": s.logsumexp(-1).float()}

    operands = inputs["q"], *(inputs[x].repeat_interleave(2, 2) for x in "kv")
    for as_multiplied, ok in ((as_tf32, True), (cut, False)):
        found = agreements(forward(*operands, as_multiplied), expected)
        assert found["out"].ok == ok, found["out"]


def test_numbers_that_are_not_finite_stay_so(side, portable, torch_device):
    inputs = make_inputs(ONE_KEY, torch_device)
    value = inputs["v"].view(torch.int32)
    value[..., 0], value[..., 1], value[..., 2] = -1, 2**31 - 1, 0x7F800000
    out = attention(side, inputs, implementation=portable, **ONE_KEY.options)["out"]
    assert out[..., :2].isnan().all()
    assert (out[..., 2] == torch.inf).all()
