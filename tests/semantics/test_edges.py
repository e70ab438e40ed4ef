from dataclasses import replace

import pytest
import torch

from tests.conftest import ON_GPU
from tests.oracle import assert_within_budget
from tests.sides import attention
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import make_inputs

CASE = FlashCase("edge", 1, 70, 50, heads_q=2, heads_kv=1, head_dim=32, dtype="bfloat16")


@pytest.mark.parametrize(
    ("options", "seq_q", "seq_kv", "empty"),
    [({"causal": True}, 70, 50, slice(0, 20)), ({"window_size": (5, 0)}, 150, 3, slice(0, 147))],
)
def test_rows_without_keys(side, implementation, torch_device, options, seq_q, seq_kv, empty):
    case = replace(CASE, seq_q=seq_q, seq_kv=seq_kv)
    inputs = make_inputs(case, torch_device)
    got = attention(side, inputs, implementation=implementation, **options)
    assert all(torch.isfinite(x).all() for x in (got["out"], got["dq"], got["dk"], got["dv"]))
    assert (got["out"][:, empty] == 0).all()
    assert (got["lse"][..., empty] == -torch.inf).all()
    assert (got["dq"][:, empty] == 0).all()
    assert torch.isfinite(got["lse"][..., empty.stop :]).all()
    assert (got["dq"][:, empty.stop + 1 :] != 0).any(dim=-1).all()

    dout, dlse = inputs["dout"].clone(), inputs["dlse"].clone()
    dout[:, empty], dlse[..., empty] = 1e4, torch.nan
    other = attention(
        side, inputs | {"dout": dout, "dlse": dlse}, implementation=implementation, **options
    )
    for name in ("dq", "dk", "dv"):
        assert torch.equal(got[name], other[name]), f"rows without keys reached {name}"


@pytest.mark.parametrize("tile", [32, 64, 128] if ON_GPU else [64])  # an interpreter's are of 64
def test_a_tile_of_which_one_key_is_hidden(side, implementation, torch_device, tile):
    """`causal` hides a tile's last key from the first query, its first key from the last one."""
    behind = replace(CASE, seq_q=20, seq_kv=20 + tile - 2, causal=True)
    before = replace(CASE, seq_q=20, seq_kv=2 * tile + 19, window_size=(tile + 17, None))
    for case in (behind, before):
        inputs = make_inputs(case, torch_device)
        got = attention(side, inputs, implementation=implementation, **case.options)
        assert_within_budget(got, inputs, case.spec)


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 0}, {"seq_q": 0}, {"seq_kv": 0}, {"seq_q": 0, "seq_kv": 0}, {"heads_q": 0},
        {"heads_q": 0, "heads_kv": 0},
    ],
    ids=str,
)  # fmt: skip
def test_sizes_of_zero(side, implementation, torch_device, sizes):
    inputs = make_inputs(replace(CASE, sinks=True, **sizes), torch_device)
    options = {"implementation": implementation, "causal": True, "softcap": 3.0}
    with_sinks, sinks = attention(side, inputs, **options), inputs.pop("sinks")
    assert torch.equal(with_sinks["lse"], sinks[:, None].expand_as(with_sinks["lse"]))
    torch.testing.assert_close(with_sinks["dsinks"], inputs["dlse"].sum((0, 2)))
    got = attention(side, inputs, **options)
    assert got["out"].shape == inputs["dout"].shape
    assert got["lse"].shape == inputs["dlse"].shape
    assert got["lse"].dtype == torch.float32
    assert (got["out"] == 0).all()
    assert (got["lse"] == -torch.inf).all()
    for name in "qkv":
        gradient, x = got[f"d{name}"], inputs[name]
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
        assert (gradient == 0).all()


@pytest.mark.parametrize(
    ("scale", "options"),
    [
        (0.0, {"causal": True, "softcap": 2.0}), (1e-40, {"causal": True}),
        (-1e-46, {"window_size": (9, 4)}),
    ],
    ids=str,
)  # fmt: skip
def test_scales_that_vanish_in_float32(side, implementation, torch_device, scale, options):
    """Every key that a query sees counts alike."""
    case = FlashCase("scale", 1, 20, 30, 2, 1, head_dim=16, dtype="float32", scale=scale, **options)
    inputs = make_inputs(case, torch_device)
    got = attention(side, inputs, implementation=implementation, **case.options)
    assert_within_budget(got, inputs, case.spec)


def test_the_largest_softcap_changes_nothing(side, implementation, torch_device):
    inputs = make_inputs(CASE, torch_device)
    got = attention(side, inputs, implementation=implementation, softcap=2.0**100)
    assert_within_budget(got, inputs, CASE.spec)
