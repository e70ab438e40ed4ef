"""Exactly which keys a query sees at long lengths: no error budget shows one key of thousands.

All scores are 0, so a probability is one over the number of visible keys. v and k are 0 but at one
key, dout and q but at one query: a result there shows one pair.
"""

import pytest
import torch

from tests.conftest import ON_GPU
from tests.oracle import assert_within_budget
from tests.sides import attention
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import make_inputs

PROBES = 8  # columns of each kind
SIZES = [
    (130, 4300),
    pytest.param(
        8200, 12400, marks=pytest.mark.skipif(not ON_GPU, reason="an interpreter takes minutes")
    ),
]


@pytest.mark.parametrize(("seq_q", "seq_kv"), SIZES)
@pytest.mark.parametrize(
    "options",
    [{"causal": True, "sinks": True, "window_size": (4096, None)}, {"window_size": (4095, 9)}],
    ids=str,
)
def test_each_query_sees_its_keys(side, implementation, torch_device, seq_q, seq_kv, options):
    case = FlashCase("long", 1, seq_q, seq_kv, 1, 1, 16, scale=1.0, **options)
    first, last = seq_kv - seq_q, seq_kv - 1
    keys = torch.tensor([first - 4096, first - 4095, last - 4096, last - 4095, 128, first, last, 0])
    keys = keys.clamp(min=0)
    queries = torch.tensor([0, 1, 63, 64, 127, 128, 129, seq_q - 1])
    columns = torch.arange(PROBES)
    q, k, v, dout = (torch.zeros(1, n, 1, 16) for n in (seq_q, seq_kv, seq_kv, seq_q))
    v[0, keys, 0, columns] = 1
    dout[..., :PROBES] = 1
    dout[0, queries, 0, PROBES + columns] = 1
    of_keys, of_queries = k.clone(), q.clone()
    of_keys[0, keys, 0, columns], of_queries[0, queries, 0, columns] = 1, 1
    inputs = {"q": q, "k": of_keys, "v": v, "dout": dout, "dlse": torch.zeros(1, 1, seq_q)}
    if case.sinks:
        inputs["sinks"] = torch.zeros(1)
    inputs = {
        name: x.to(torch_device, torch.bfloat16 if x.ndim == 4 else torch.float32)
        for name, x in inputs.items()
    }
    got = attention(side, inputs, implementation=implementation, **case.options)
    swapped = inputs | {
        "q": of_queries.to(inputs["q"]), "k": k.to(inputs["k"])
    }  # fmt: skip
    dk = attention(side, swapped, implementation=implementation, **case.options)["dk"]

    left, right = case.spec.window.left, case.spec.window.right
    distance = torch.arange(seq_kv) - torch.arange(first, seq_kv)[:, None]
    seen = torch.ones(seq_q, seq_kv, dtype=torch.bool)
    seen &= distance >= (-seq_kv if left is None else -left)
    seen &= distance <= (seq_kv if right is None else right)
    count = seen.sum(1) + case.sinks
    torch.testing.assert_close(got["lse"].cpu()[0, 0].exp(), count.float(), rtol=0, atol=0.3)
    found = {name: (x.cpu()[0, :, 0] != 0) for name, x in (got | {"dk": dk}).items() if x.ndim == 4}
    assert torch.equal(found["out"][:, :PROBES], seen[:, keys])
    assert torch.equal(found["dq"][:, :PROBES], seen[:, keys])
    assert torch.equal(found["dv"][:, PROBES:], seen[queries].T)
    sees_a_probe = seen[queries][:, keys].any(1)
    assert torch.equal(found["dk"][:, :PROBES], seen[queries].T & sees_a_probe)


@pytest.mark.parametrize("seq_q", [20, 4300])
def test_sums_of_thousands_are_not_rounded_tile_by_tile(side, implementation, torch_device, seq_q):
    """Over keys in out and dq, over queries in dk and dv."""
    case = FlashCase("long", 1, seq_q, 4320 - seq_q, 1, 1, 16)
    inputs = make_inputs(case, torch_device)
    got = attention(side, inputs, implementation=implementation, **case.options)
    assert_within_budget(got, inputs, case.spec)
