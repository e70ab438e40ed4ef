"""Bias of pairs, broadcast over any axes, with its gradient."""

from dataclasses import replace

import pytest
import torch

from interop.parity.cases import FlashCase
from interop.parity.inputs import make_inputs
from tests.oracle import assert_within_budget
from tests.sides import attention

CASE = FlashCase(
    "bias", seq_q=70, seq_kv=90, heads_q=2, heads_kv=1, head_dim=16, dtype="float32", bias="bhqk",
)  # fmt: skip


def run(side, case, inputs, implementation):
    return attention(side, inputs, implementation=implementation, **case.options)


@pytest.mark.parametrize("axes", ["", "b", "q", "hk", "qk"])
def test_broadcasts(side, implementation, torch_device, axes):
    """The gradient is summed where a bias is broadcast."""
    case = replace(CASE, bias=axes, sinks=True)
    inputs = make_inputs(case, torch_device)
    assert_within_budget(run(side, case, inputs, implementation), inputs, case.spec)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16", "scale": -0.3, "terms_in_q_dtype": True, "window_size": (20, 9)},
        {"segments": "shuffled", "tree": "any", "causal": True, "bias": "hqk", "row_max": True},
        {"seq_q": 1, "bias": "bhqk"},
        {"seq_kv": 0, "bias": "hqk"},
    ],
    ids=str,
)
def test_with_other_options(side, implementation, torch_device, changes):
    case = replace(CASE, **changes)
    inputs = make_inputs(case, torch_device)
    assert_within_budget(run(side, case, inputs, implementation), inputs, case.spec)


def test_minus_infinity_hides_keys(side, implementation, torch_device):
    """As a window does: hidden pairs have no gradient, and a row without a key gives 0."""
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
    want = run(side, plain, inputs, "reference")
    keep = torch.arange(70) != 3
    torch.testing.assert_close(got["out"][:, keep], want["out"][:, keep], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{"causal": True}, {"segments": "shuffled"}], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_where_a_pair_is_hidden_it_may_be_nan(side, implementation, torch_device, softcap, changes):
    case = replace(CASE, softcap=softcap, **changes)
    inputs = make_inputs(case, torch_device)
    want = run(side, case, inputs, implementation)
    hidden = torch.ones(2, 1, 70, 90, dtype=torch.bool, device=torch_device).triu(21)
    if not case.causal:
        queries, keys = inputs["q_segment_ids"], inputs["kv_segment_ids"]
        hidden = queries[:, None, :, None] != keys[:, None, None, :]
    inputs["bias"].masked_fill_(hidden, torch.nan)
    for name, x in run(side, case, inputs, implementation).items():
        torch.testing.assert_close(x, want[name], rtol=1e-5, atol=1e-5)


def test_strides_of_a_view(side, implementation, torch_device):
    """A bias may be a view of more heads and rows, and expanded."""
    inputs = make_inputs(CASE, torch_device)
    want = run(side, CASE, inputs, implementation)
    large = torch.full((4, 2, 100, 96), torch.nan, device=torch_device)
    large[::2, :, 30:, :90] = inputs["bias"]
    inputs["bias"] = large[::2, :, 30:, :90]
    got = run(side, CASE, inputs, implementation)
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-6)


def test_the_gradient_has_the_same_bits_every_time(bitwise_side, torch_device):
    case = replace(CASE, batch=3, bias="qk", deterministic=True)
    inputs = make_inputs(case, torch_device)
    first, second = (run(bitwise_side, case, inputs, "triton") for _ in range(2))
    assert all(torch.equal(first[name], x) for name, x in second.items())
