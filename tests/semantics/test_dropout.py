from dataclasses import replace

import pytest
import torch
from array_api_compat import array_namespace

from tests.sides import EXPLICIT, attention, by_reference
from twin_attention.contract.dropout import LEVELS, DropoutRule, dropout_weights
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import make_inputs

CASE = FlashCase(
    "dropout", seq_q=70, seq_kv=80, heads_q=2, heads_kv=1, head_dim=32, dtype="float32",
    dropout_rate=0.3,
)  # fmt: skip


def run(side, case, inputs, implementation):
    return attention(side, inputs, implementation=implementation, **case.options)


def weights(seed, batch, heads, seq_q, seq_kv, rate):
    """Return what the contract multiplies probabilities by, [B, Hq, Sq, Skv]."""
    sizes = (batch, heads, seq_q, seq_kv)
    counters = torch.meshgrid(*(torch.arange(n) for n in sizes), indexing="ij")
    rule = DropoutRule.of(rate)
    return dropout_weights(array_namespace(seed), seed.cpu(), counters, rule, torch.float32)


@pytest.mark.parametrize("rate", [0.1, 1 - 1 / LEVELS])
def test_drops_the_same_probabilities(side, implementation, torch_device, rate):
    """With equal scores and the identity as values, out has the weights."""
    seq_q, seq_kv = 70, 72
    seed = torch.tensor([-7, 123456789], dtype=torch.int32, device=torch_device)
    q = torch.zeros(2, seq_q, 2, 16, device=torch_device)
    k = torch.zeros(2, seq_kv, 1, 16, device=torch_device)
    v = torch.eye(seq_kv, device=torch_device)[None, :, None].expand(2, -1, -1, -1).contiguous()
    operands = {"q": q, "k": k, "v": v, "dropout_seed": seed}
    options = {"implementation": implementation, "dropout_rate": rate}
    (out, *_) = side.call("flash_attention", operands, **options)
    want = weights(seed, 2, 2, seq_q, seq_kv, rate).permute(0, 2, 1, 3)
    got = (out.cpu() * seq_kv).float()
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


def test_a_part_drops_what_the_whole_does(side, implementation, torch_device):
    """The part is the second element and head, as its seed says."""
    dtype = "bfloat16" if implementation in EXPLICIT else "float32"
    case = replace(CASE, heads_kv=2, dtype=dtype)
    inputs = make_inputs(case, torch_device)
    del inputs["dlse"]
    whole = by_reference(inputs, **case.options)
    cut = lambda x: x[1:, :, 1:].contiguous()  # noqa: E731
    seed = inputs["dropout_seed"]
    part = {name: cut(inputs[name]) for name in ("q", "k", "v", "dout")}
    part["dropout_seed"] = torch.cat([seed, torch.ones_like(seed)])
    found = run(side, case, part, implementation)
    tolerances = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {}
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(found[name], cut(whole[name]), **tolerances)


def test_drops_the_share_that_was_asked_for():
    seed = torch.tensor([3, 4], dtype=torch.int32)
    kept = weights(seed, 2, 2, 256, 512, 0.2) > 0
    share = 1 - kept.double().mean()
    assert abs(share - 0.2) < 5 * (0.2 * 0.8 / kept.numel()) ** 0.5
    for axis, size in enumerate(kept.shape):
        for step in (1, 8, 16, 32):
            if step < size:
                both = kept & kept.roll(step, axis)
                assert abs(both.double().mean() - 0.64) < 0.005


def test_a_packed_sequence_drops_what_an_element_of_a_batch_does(
    side, implementation, torch_device
):
    inputs = make_inputs(replace(CASE, causal=True), torch_device)
    options = replace(CASE, causal=True).options | {"implementation": implementation}
    operands = {name: x for name, x in inputs.items() if name not in ("dout", "dlse")}
    dense = by_reference({x: y for x, y in inputs.items() if x != "dlse"}, **options)
    packed = {n: x.flatten(0, 1) if n in "qkv" else x for n, x in operands.items()}
    for name, size in (("q", 70), ("kv", 80)):
        offsets = torch.tensor([0, size, 2 * size], dtype=torch.int32, device=torch_device)
        packed[f"cu_seqlens_{name}"] = offsets
    found = side.call("flash_attention_varlen", packed, [inputs["dout"].flatten(0, 1)], **options)
    for x, y in zip(found, (dense[x] for x in ("out", "dq", "dk", "dv")), strict=True):
        torch.testing.assert_close(x, y.flatten(0, 1), rtol=1e-4, atol=1e-5)
