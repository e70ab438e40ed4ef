import pytest
import torch

from tests.sides import attention, by_reference
from twin_attention.interop.parity.cases import DilatedCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import results

CASE = DilatedCase(
    "dilated", batch=2, seq_q=48, seq_kv=48, heads_q=6, heads_kv=3, head_dim=16, head_dim_v=24,
    dtype="float32", causal=True, segment_lengths=(12, 24, 48), dilation_rates=(1, 2, 4),
)  # fmt: skip
SHARED = {"causal": True, "deterministic": False}


def dilated(side, inputs, segment_lengths, dilation_rates, **options):
    pairs = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
    return results(side, "dilated_attention", inputs, **SHARED | pairs | options)


@pytest.fixture
def inputs(torch_device):
    return make_inputs(CASE, torch_device)


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert torch.equal(got[name], x), name


def assert_close(got, want):
    assert got.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-5)


def test_one_whole_segment_is_flash_attention(side, inputs):
    got = dilated(side, inputs, (48,), (1,), implementation="triton")
    assert_close(got, by_reference(inputs, **SHARED))


def test_segments_are_sequences(side, inputs):
    """One pair of rate 1."""
    axis = {"lse": 2, "dlse": 2}
    parts = [
        attention(
            side,
            {n: x.narrow(axis.get(n, 1), start, 16).contiguous() for n, x in inputs.items()},
            **SHARED,
        )
        for start in (0, 16, 32)
    ]
    want = {n: torch.cat([part[n] for part in parts], axis.get(n, 1)) for n in parts[0]}
    assert_close(dilated(side, inputs, (16,), (1,)), want)


def test_pairs_have_no_order(side, inputs):
    want = dilated(side, inputs, (12, 24, 16), (1, 2, 4))
    assert_equal(dilated(side, inputs, (16, 12, 24), (4, 1, 2)), want)


def test_a_pair_given_twice_counts_twice(side, inputs):
    want = dilated(side, inputs, (12,), (1,))
    got = dilated(side, inputs, (12, 12), (1, 1))
    want["lse"] += torch.log(torch.tensor(2.0))
    assert_close(got, want)


def test_sequences_do_not_meet(side, inputs):
    want = dilated(side, inputs, (12, 24, 16), (1, 2, 4))
    changed = {name: torch.cat([x[:1], torch.full_like(x[1:], torch.nan)])
               for name, x in inputs.items()}  # fmt: skip
    got = dilated(side, changed, (12, 24, 16), (1, 2, 4))
    assert_equal({n: x[:1] for n, x in got.items()}, {n: x[:1] for n, x in want.items()})


@pytest.mark.parametrize("pairs", [((24,), (8,)), ((24, 48), (8, 16)), ((12,), (4,))], ids=str)
def test_tokens_that_no_pair_keeps(side, inputs, pairs):
    got = dilated(side, inputs, *pairs)
    position, head = torch.arange(48)[:, None], torch.arange(6) // 2
    kept = torch.zeros(48, 6, dtype=torch.bool)
    for rate in pairs[1]:
        kept |= position % rate == head % rate
    kept = kept.to(inputs["q"].device)
    assert torch.equal(got["lse"].isfinite(), kept.T.expand(2, 6, 48))
    for name in ("out", "dq", "dk", "dv"):
        x = got[name]
        dropped = ~kept if x.shape[2] == 6 else ~kept[:, ::2]
        assert not x[:, dropped].any()
        assert x[:, ~dropped].any(-1).all() or name == "dq"  # a first query's dq is 0: one key
    for name, x in inputs.items():
        if name == "dlse":
            x.mT[:, ~kept] = torch.nan
        else:
            x[:, ~kept if x.shape[2] == 6 else ~kept[:, ::2]] = torch.nan
    assert_equal(dilated(side, inputs, *pairs), got)


@pytest.mark.parametrize("shape", [(0, 48, 6, 3), (2, 0, 6, 3), (2, 48, 0, 0)], ids=str)
def test_nothing_to_do(side, torch_device, shape):
    batch, tokens, heads_q, heads_kv = shape
    make = {"device": torch_device}
    inputs = {
        "q": torch.zeros(batch, tokens, heads_q, 16, **make),
        "k": torch.zeros(batch, tokens, heads_kv, 16, **make),
        "v": torch.zeros(batch, tokens, heads_kv, 24, **make),
        "dout": torch.zeros(batch, tokens, heads_q, 24, **make),
        "dlse": torch.zeros(batch, heads_q, tokens, **make),
    }
    for pairs in (((12, 24, 16), (1, 2, 4)), ((12,), (1,)), ((12,), (4,))):
        got = dilated(side, inputs, *pairs)
        assert got["out"].shape == inputs["dout"].shape
        assert got["lse"].shape == inputs["dlse"].shape
