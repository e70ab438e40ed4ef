from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.oracle import assert_within_budget
from tests.semantics.test_segments import SMALL_TILES
from tests.sides import attention, by_reference
from twin_attention.contract.ranges import block_diffusion_ranges, span_ranges
from twin_attention.interop.parity.cases import FlashCase, VarlenCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import results
from twin_attention.targets.config import use_configs

CASE = FlashCase(
    "ranges", batch=1, seq_q=90, seq_kv=90, heads_q=2, heads_kv=1, head_dim=16, head_dim_v=24,
    dtype="float32", causal=True, sinks=True,
)  # fmt: skip


def bounds_of(name: str) -> torch.Tensor:
    if name == "spans":
        return span_ranges(torch.tensor([[5, 50]]), torch.tensor([[30, 81]]), 90)
    return torch.from_numpy(block_diffusion_ranges(7, 45))[None]


@pytest.mark.parametrize("name", ["spans", "diffusion"])
def test_ranges_are_a_mask(side, implementation, torch_device, name):
    """A bias hides what neither ranges nor the window show."""
    window = {"window_size": (0, 0)} if name == "diffusion" else {}
    options = CASE.options | window | {"implementation": implementation}
    inputs, ranges = make_inputs(CASE, torch_device), bounds_of(name).to(torch_device)
    with use_configs(SMALL_TILES if implementation == "triton" else {}):
        got = attention(side, inputs | {"q_ranges": ranges}, **options)
    key, query = torch.arange(90), torch.arange(90)[:, None]
    seen = key == query if window else key <= query
    for own in ranges[0].cpu().unbind(1):
        seen = seen | ((own[:, :1] <= key) & (key < own[:, 1:]))
    hidden = torch.where(seen, 0.0, -torch.inf)[None, None].to(torch_device)
    plain = options | {"causal": False, "window_size": None}
    want = by_reference(inputs | {"bias": hidden}, **plain)
    for x in want.keys() & got.keys():
        torch.testing.assert_close(got[x], want[x], rtol=1e-5, atol=1e-5)


def test_empty_ranges_change_nothing(side, torch_device):
    """A head of its own: tiles of a group's heads are added up in another order.

    Pallas's kernel with ranges is another program, which a compiler may round otherwise.
    """
    options = CASE.options | {"implementation": "triton", "deterministic": True}
    case = replace(CASE, heads_kv=2)
    inputs = make_inputs(case, torch_device)
    position = torch.arange(90, dtype=torch.int32, device=torch_device)
    with use_configs(SMALL_TILES):
        empty = position[None, :, None, None].repeat(1, 1, 1, 2)
        got = attention(side, inputs | {"q_ranges": empty}, **options)
        if side.api.__name__ == "pallas_attn":
            assert_within_budget(got, inputs, case.spec)
        else:
            want = attention(side, inputs, **options)
            assert all(torch.equal(got[name], x) for name, x in want.items())


WILD = st.sampled_from([-(2**31), -1, 2**31 - 1]) | st.integers(0, 25)


@settings(
    max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(WILD, min_size=80, max_size=80))
def test_any_numbers_mean_what_the_formula_says(side, torch_device, numbers):
    case = replace(CASE, seq_q=20, seq_kv=23, window_size=(3, None), ranges="any")
    inputs = make_inputs(case, torch_device)
    ranges = torch.tensor(numbers, dtype=torch.int32, device=torch_device)
    inputs["q_ranges"] = ranges.view(1, 20, 2, 2)
    got = attention(side, inputs, implementation="triton", **case.options)
    assert_within_budget(got, inputs, case.spec)


def test_ranges_about_the_edges_of_tiles(side, implementation, torch_device):
    """A tile of queries and a tile of keys have a range that begins or ends beside an edge."""
    sizes = {"seq_q": 256, "seq_kv": 256, "heads_q": 1}
    case = replace(CASE, **sizes, dtype="bfloat16", window_size=(8, None))
    inputs = make_inputs(case, torch_device)
    own = replace(case, ranges="prefix").spec
    beside = (64, 128), (63, 129), (65, 128), (64, 127)
    for first, last, keys in ((0, 64, beside), (63, 129, beside[:2]), (128, 256, beside[2:])):
        ranges = torch.zeros((1, 256, 1, 2), dtype=torch.int32, device=torch_device)
        for begin, end in keys:
            ranges[:, first:last, 0] = ranges.new_tensor([begin, end])
            given_ = inputs | {"q_ranges": ranges}
            got = attention(side, given_, implementation=implementation, **case.options)
            assert_within_budget(got, given_, own)


def test_packed_ranges_count_from_their_first_key(torch_device):
    """In the formula, which cases hold the kernels to."""
    options = CASE.options | {"window_size": (3, None)}
    inputs = make_inputs(CASE, torch_device)
    both = torch.tensor([[2, 50]]), torch.tensor([[35, 70]])
    inputs["q_ranges"] = span_ranges(*both, 90).to(torch_device)
    ids = torch.where(torch.arange(90, device=torch_device) < 40, 0, 1).int()[None]
    inputs |= {"q_segment_ids": ids, "kv_segment_ids": ids}
    names = ("q", "k", "v", "sinks", "dout", "dlse", "q_ranges")
    packed = {name: inputs[name] if name == "sinks" else inputs[name][0] for name in names}
    offsets = torch.tensor([0, 40, 90], dtype=torch.int32, device=torch_device)
    packed |= {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    packed["q_ranges"] = packed["q_ranges"] - torch.where(ids[0] == 0, 0, 40)[:, None, None].int()
    want = by_reference(inputs, **options)
    for name, x in by_reference(packed, "flash_attention_varlen", **options).items():
        y = want[name] if name == "dsinks" else want[name][0]
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_tiles_of_no_range_are_not_visited(side, torch_device):
    """A NaN in a tile that is visited would reach all of its rows."""
    case = replace(CASE, seq_q=256, seq_kv=256, sinks=False, window_size=(9, None))
    inputs = make_inputs(case, torch_device)
    ranges = torch.zeros((1, 256, 1, 2), dtype=torch.int32, device=torch_device)
    ranges[:, 192:, 0] = ranges.new_tensor([0, 64])
    ranges[:, :64, 0] = ranges.new_tensor([192, 256])
    inputs["q_ranges"] = ranges
    for name in ("q", "k", "v", "dout"):
        inputs[name][:, 128:160] = torch.nan
    with use_configs(SMALL_TILES):
        got = attention(side, inputs, implementation="triton", **case.options)
    for name in ("out", "dq", "dk", "dv"):
        finite = got[name].isfinite().all(3).all(2)[0]
        assert finite[:64].all()
        assert finite[192:].all()
        assert not finite[128:160].any()


def test_ranges_of_all_keys_are_no_mask(side, implementation, torch_device):
    """Sequences end within tiles, whose other rows, NaN behind the last, have ranges as well."""
    lengths = ((70, 70), (90, 40), (33, 65))
    case = VarlenCase("all keys", lengths, (63, 9), head_dim=16, dtype="float32")
    inputs = make_inputs(case, torch_device)
    inputs = {name: x for name, x in inputs.items() if name not in ("dout", "dlse")}
    options = case.options | {"implementation": implementation}
    ranges = torch.tensor([[[0, 2**31 - 1]]], dtype=torch.int32, device=torch_device)
    shown = inputs | {"q_ranges": ranges.repeat(case.spec.seq_q, 1, 1)}
    got = results(side, "flash_attention_varlen", shown, **options)
    options |= {"causal": False}
    for name, x in by_reference(inputs, "flash_attention_varlen", **options).items():
        torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-5)
