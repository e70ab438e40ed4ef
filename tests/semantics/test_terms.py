from dataclasses import replace

import torch

from tests.sides import attention, by_reference
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import make_inputs

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


def test_an_entry_of_minus_infinity_hides_keys(side, implementation, torch_device):
    """Hidden pairs have no gradient, and a row without a key gives 0."""
    case = replace(CASE, window_size=None, relative=40)
    inputs = make_inputs(case, torch_device)
    hidden = (torch.arange(-40, 41) < -20) | (torch.arange(-40, 41) > 3)
    inputs["relative_bias"][:, hidden] = -torch.inf
    got = run(side, case, inputs, implementation)
    assert (got["drelative_bias"][:, hidden] == 0).all()
    inputs["relative_bias"][:, hidden] = 0
    want = by_reference(inputs, **replace(case, window_size=(20, 3)).options)
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-4, atol=1e-5)
    inputs["relative_bias"].fill_(-torch.inf)
    nothing = run(side, case, inputs, implementation)
    assert (nothing["lse"] == -torch.inf).all()
    assert all((x == 0).all() for name, x in nothing.items() if name != "lse")
