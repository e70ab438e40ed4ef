from dataclasses import replace

import pytest
import torch

from tests.sides import attention
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import make_inputs

pytestmark = pytest.mark.one_reference

CASE = FlashCase(
    "terms", seq_q=70, seq_kv=90, heads_q=2, heads_kv=1, head_dim=32, dtype="float32", relative=9,
    window_size=(40, 30),
)  # fmt: skip


def run(side, case, inputs, implementation):
    return attention(side, inputs, implementation=implementation, **case.options)


def test_distances_that_no_pair_has_have_no_gradient(side, implementation, torch_device):
    """The table is far wider than the sequences, and a window leaves a part of it."""
    inputs = make_inputs(replace(CASE, relative=500), torch_device)
    got = run(side, CASE, inputs, implementation)["drelative_bias"]
    seen = torch.zeros(1001, dtype=torch.bool)
    seen[500 - 40 : 500 + 31] = True
    assert (got[:, seen] != 0).all()
    assert (got[:, ~seen] == 0).all()


def test_far_distances_share_an_entry(side, torch_device):
    """The gradient of a wide table, summed behind R on each side, is that of a narrow one."""
    inputs = make_inputs(CASE, torch_device)
    want = run(side, CASE, inputs, "reference")["drelative_bias"]
    table = inputs["relative_bias"]
    inputs["relative_bias"] = torch.cat(
        [table[:, :1].expand(-1, 91), table, table[:, -1:].expand(-1, 91)], 1
    ).contiguous()
    wide = run(side, CASE, inputs, "reference")["drelative_bias"]
    first, last = wide[:, :92].sum(1), wide[:, -92:].sum(1)
    got = torch.cat([first[:, None], wide[:, 92:-92], last[:, None]], 1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_an_entry_of_minus_infinity_hides_keys(side, implementation, torch_device):
    """Hidden pairs have no gradient, and a row without a key gives 0."""
    case = replace(CASE, window_size=None, relative=40)
    inputs = make_inputs(case, torch_device)
    hidden = (torch.arange(-40, 41) < -20) | (torch.arange(-40, 41) > 3)
    inputs["relative_bias"][:, hidden] = -torch.inf
    got = run(side, case, inputs, implementation)
    assert (got["drelative_bias"][:, hidden] == 0).all()
    inputs["relative_bias"][:, hidden] = 0
    want = run(side, replace(case, window_size=(20, 3)), inputs, "reference")
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-4, atol=1e-5)
    inputs["relative_bias"].fill_(-torch.inf)
    nothing = run(side, case, inputs, implementation)
    assert (nothing["lse"] == -torch.inf).all()
    assert all((x == 0).all() for name, x in nothing.items() if name != "lse")


def test_buckets_of_distances_expand_to_a_table(side, torch_device):
    """T5's: 8 buckets of distances on each side, of which 4 are exact and the others grow."""
    inputs = make_inputs(replace(CASE, window_size=None), torch_device)
    radius, exact, buckets = 64, 4, 8
    distance = torch.arange(-radius, radius + 1)
    far = distance.abs().clamp(min=1)
    ratio = (far / exact).log() / torch.tensor(radius / exact).log()
    bucket = torch.where(far < exact, distance.abs(), exact + (ratio * (buckets - exact)).long())
    bucket = bucket.clamp(max=buckets - 1) + buckets * (distance > 0)
    of_buckets = torch.randn(2 * buckets, 2, device=torch_device)
    inputs["relative_bias"] = of_buckets[bucket.to(torch_device)].T.contiguous()
    got = run(side, replace(CASE, window_size=None), inputs, "reference")
    pairs = torch.arange(90)[None, :] - torch.arange(70)[:, None] - 20
    bias = of_buckets[bucket[(pairs.clamp(-radius, radius) + radius)].to(torch_device)]
    q, k = inputs["q"].double(), inputs["k"].double().expand(-1, -1, 2, -1)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 32**-0.5 + bias.permute(2, 0, 1)
    torch.testing.assert_close(got["lse"].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
