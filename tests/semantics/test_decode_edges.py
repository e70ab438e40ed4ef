from dataclasses import replace

import pytest
import torch

from tests.oracle import assert_within_budget
from twin_attention.interop.parity.cases import DecodeCase
from twin_attention.interop.parity.inputs import make_inputs

CASE = DecodeCase(
    "edge", lengths=(7, 12, 20), tokens=2, heads_q=4, heads_kv=2, head_dim=32, head_dim_v=16,
    page_size=5, max_pages=4,
)  # fmt: skip


def decode(side, implementation, inputs):
    return side.call("paged_decode", inputs, return_lse=True, implementation=implementation)


@pytest.mark.parametrize("function", ["paged_decode", "paged_attention"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 0}, {"tokens": 0}, {"heads_q": 0}, {"heads_q": 0, "heads_kv": 0},
        {"max_pages": 0}, {"num_pages": 0}, {"batch": 0, "num_pages": 0},
    ],
    ids=str,
)  # fmt: skip
def test_sizes_of_zero(side, implementation, torch_device, sizes, function):
    some = {"batch": 2, "tokens": 3, "heads_q": 4, "heads_kv": 2, "max_pages": 3, "num_pages": 5}
    batch, tokens, heads_q, heads_kv, max_pages, num_pages = (some | sizes).values()
    inputs = {
        "q": torch.ones(batch, tokens, heads_q, 32, dtype=torch.bfloat16),
        "k_pages": torch.ones(num_pages, 4, heads_kv, 32, dtype=torch.bfloat16),
        "v_pages": torch.ones(num_pages, 4, heads_kv, 16, dtype=torch.bfloat16),
        "block_tables": torch.zeros(batch, max_pages, dtype=torch.int32),
        "seq_lens": torch.full((batch,), 7, dtype=torch.int32),
    }
    shape, shape_of_lse = (batch, tokens, heads_q, 16), (batch, heads_q, tokens)
    if function == "paged_attention":  # with two tokens of padding
        inputs["q"] = torch.ones(batch * tokens + 2, heads_q, 32, dtype=torch.bfloat16)
        inputs["cu_seqlens_q"] = tokens * torch.arange(batch + 1, dtype=torch.int32)
        shape, shape_of_lse = (len(inputs["q"]), heads_q, 16), (heads_q, len(inputs["q"]))
    inputs = {name: x.to(torch_device) for name, x in inputs.items()}
    for sinks in (None, torch.arange(heads_q, dtype=torch.float32, device=torch_device)):
        given = inputs if sinks is None else inputs | {"sinks": sinks}
        out, lse = side.call(function, given, return_lse=True, implementation=implementation)
        assert (out.shape, out.dtype) == (shape, torch.bfloat16)
        assert (lse.shape, lse.dtype) == (shape_of_lse, torch.float32)
        assert (out == 0).all()
        assert (lse == (-torch.inf if sinks is None else sinks[:, None])).all()


def test_lengths_that_no_sequence_can_have(side, implementation, torch_device):
    inputs = make_inputs(replace(CASE, lengths=(20, 20, 0)), torch_device)
    lengths = torch.tensor([21, 2**31 - 1, -(2**31)], dtype=torch.int32, device=torch_device)
    want = decode(side, implementation, inputs)
    got = decode(side, implementation, inputs | {"seq_lens": lengths})
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_page_ids_out_of_range(side, implementation, torch_device):
    """They give what some page holds, and do not disturb the other sequences."""
    inputs = make_inputs(CASE, torch_device)
    for name in ("k_pages", "v_pages"):
        inputs[name] = inputs[name].nan_to_num(1.0)
    tables = inputs["block_tables"].clone()
    tables[1, :3] = torch.tensor([-1, len(inputs["k_pages"]), 2**31 - 1])
    want = decode(side, implementation, inputs)
    got = decode(side, implementation, inputs | {"block_tables": tables})
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a[[0, 2]], b[[0, 2]])


@pytest.mark.parametrize("power", [100, -100])
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_bfloat16_queries_of_any_size_with_an_8_bit_cache(
    side, implementation, torch_device, kv_dtype, power
):
    """Tensor cores take such a cache as float16, whose range is smaller."""
    inputs = make_inputs(replace(CASE, kv_dtype=kv_dtype), torch_device)
    large = inputs | {"q": inputs["q"] * 2.0**power, "k_scale": inputs["k_scale"] * 2.0**-power}
    want, got = (decode(side, implementation, x) for x in (inputs, large))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("column", [4, 5])
def test_a_nan_in_a_float8_cache(side, implementation, torch_device, column):
    inputs = make_inputs(replace(CASE, kv_dtype="float8_e4m3fn"), torch_device)
    want, _ = decode(side, implementation, inputs)
    key = 8  # of sequence 1, which both of its tokens see
    page = inputs["block_tables"][1, key // CASE.page_size]
    inputs["v_pages"].view(torch.uint8)[page, key % CASE.page_size, 1, column] = 0xFF
    got, _ = decode(side, implementation, inputs)
    reached = torch.zeros_like(got, dtype=torch.bool)
    reached[1, :, 2:, column] = True
    assert torch.equal(got.isnan(), reached)
    assert torch.equal(got.where(~reached, 0), want.where(~reached, 0))


@pytest.mark.parametrize("scale", [0.0, 1e-46, 1e-40])
def test_scales_that_vanish_in_float32(side, implementation, torch_device, scale):
    case = replace(CASE, scale=scale, window_size=(8, 0))
    inputs = make_inputs(case, torch_device)
    got = side.call(
        "paged_decode", inputs, return_lse=True, implementation=implementation, **case.options
    )
    assert_within_budget(got, inputs, case.spec)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_scale_that_is_nan(side, implementation, torch_device, name, num_splits):
    """It reaches only the results of its own kv head."""
    case = replace(CASE, kv_dtype="int8", num_splits=num_splits)
    inputs = make_inputs(case, torch_device)
    options = {"return_lse": True, "implementation": implementation, "num_splits": num_splits}
    inputs[name] = inputs[name].expand(2).clone()
    want_out, want_lse = side.call("paged_decode", inputs, **options)
    inputs[name][1] = torch.nan
    out, lse = side.call("paged_decode", inputs, **options)
    assert torch.equal(out[:, :, :2], want_out[:, :, :2])
    assert torch.equal(lse[:, :2], want_lse[:, :2])
    assert out[:, :, 2:].isnan().all()
    assert lse[:, 2:].isnan().all() if name == "k_scale" else torch.equal(lse, want_lse)
