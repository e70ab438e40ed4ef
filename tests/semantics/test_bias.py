from dataclasses import replace

import pytest
import torch

from tests.sides import TorchSide, attention, by_reference
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import make_inputs

CASE = FlashCase(
    "bias", seq_q=70, seq_kv=90, heads_q=2, heads_kv=1, head_dim=16, dtype="float32", bias="bhqk",
)  # fmt: skip


def run(side, case, inputs, implementation):
    return attention(side, inputs, implementation=implementation, **case.options)


def test_minus_infinity_hides_keys(side, implementation, torch_device):
    """Hidden pairs have no gradient, and a row without a key gives 0."""
    inputs = make_inputs(CASE, torch_device)
    distance = torch.arange(90)[None, :] - torch.arange(70)[:, None] - 20
    hidden = ((distance < -30) | (distance > 5)).to(torch_device)
    inputs["bias"][:] = torch.where(hidden, -torch.inf, 0.0)
    inputs["bias"][:, :, 3] = -torch.inf
    got = run(side, CASE, inputs, implementation)
    assert (got["out"][:, 3] == 0).all()
    assert (got["lse"][:, :, 3] == -torch.inf).all()
    assert (got["dq"][:, 3] == 0).all()
    assert (got["dbias"][:, :, hidden] == 0).all()
    assert all(torch.isfinite(x).all() for name, x in got.items() if name != "lse")
    del inputs["bias"]
    plain = replace(CASE, bias=None, window_size=(30, 5))
    want = by_reference(inputs, **plain.options)
    keep = torch.arange(70) != 3
    torch.testing.assert_close(got["out"][:, keep], want["out"][:, keep], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"causal": True, "softcap": 5.0}, {"segments": "shuffled"}], ids=str
)
def test_where_a_pair_is_hidden_it_may_be_nan(side, implementation, torch_device, changes):
    case = replace(CASE, **changes)
    inputs = make_inputs(case, torch_device)
    want = by_reference(inputs, **case.options)
    hidden = torch.ones(2, 1, 70, 90, dtype=torch.bool, device=torch_device).triu(21)
    if not case.causal:
        queries, keys = inputs["q_segment_ids"], inputs["kv_segment_ids"]
        hidden = queries[:, None, :, None] != keys[:, None, None, :]
    inputs["bias"].masked_fill_(hidden, torch.nan)
    for name, x in run(side, case, inputs, implementation).items():
        torch.testing.assert_close(x, want[name], rtol=1e-5, atol=1e-5)


def test_strides_of_a_view(implementation, torch_device):
    """In torch, a bias may be a view of more heads and rows, and expanded."""
    side = TorchSide(torch_device)
    inputs = make_inputs(CASE, torch_device)
    want = run(side, CASE, inputs, implementation)
    large = torch.full((4, 2, 100, 96), torch.nan, device=torch_device)
    large[::2, :, 30:, :90] = inputs["bias"]
    inputs["bias"] = large[::2, :, 30:, :90]
    got = run(side, CASE, inputs, implementation)
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-6)
