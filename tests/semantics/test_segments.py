from dataclasses import replace
from itertools import accumulate

import torch

from tests.oracle import assert_within_budget
from tests.sides import attention, by_reference
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.targets.config import use_configs

CASE = FlashCase(
    "segments", batch=1, seq_q=90, seq_kv=90, heads_q=2, heads_kv=1, head_dim=16, head_dim_v=24,
    dtype="float32", causal=True, sinks=True, segments="documents",
)  # fmt: skip
SMALL_TILES = {
    "flash_fwd": {"block_q": 32, "block_kv": 16},
    "flash_bwd_dq": {"block_q": 16, "block_kv": 32},
    "flash_bwd_dkdv": {"block_q": 16, "block_kv": 64},
}


def ids(*lengths: int, like: torch.Tensor) -> torch.Tensor:
    found = torch.full((1, like.shape[1]), -1, dtype=torch.int32, device=like.device)
    for document, (end, length) in enumerate(zip(accumulate(lengths), lengths, strict=True)):
        found[:, end - length : end] = 7 * document
    return found


def test_documents_are_as_packed_sequences(torch_device):
    """In the formula, which cases hold the kernels to."""
    lengths_q, lengths_kv = (30, 1, 0, 45), (20, 9, 5, 52)
    options = CASE.options | {"causal": False}
    inputs = make_inputs(replace(CASE, segments=""), torch_device)
    inputs["q_segment_ids"] = ids(*lengths_q, like=inputs["q"])
    inputs["kv_segment_ids"] = ids(*lengths_kv, like=inputs["k"])
    got = by_reference(inputs, **options)
    names = ("q", "k", "v", "sinks", "dout", "dlse")
    packed = {name: inputs[name] if name == "sinks" else inputs[name][0] for name in names}
    for name, lengths in (("cu_seqlens_q", lengths_q), ("cu_seqlens_kv", lengths_kv)):
        packed[name] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(torch_device)
    want = by_reference(packed, "flash_attention_varlen", **options)
    for name, x in want.items():
        y = got[name] if name == "dsinks" else got[name][0]
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-5)


def test_names_of_segments_and_what_padding_holds_do_not_matter(side, torch_device):
    """Bit for bit, also with names that are far apart or the largest there is."""
    case = replace(CASE, segments="shuffled", seq_kv=70)
    inputs = make_inputs(case, torch_device)
    options = case.options | {"implementation": "triton"}
    with use_configs(SMALL_TILES):
        got = attention(side, inputs, **options)
        assert_within_budget(got, inputs, case.spec)
        names = torch.tensor([2**31 - 1, 3, 2**30, 0, 5, 1, 9, 8, 7, 6], device=torch_device)
        for name, of in (("q", "q"), ("k", "kv"), ("v", "kv"), ("dout", "q")):
            old = inputs[f"{of}_segment_ids"]
            inputs[name] = torch.where((old < 0)[..., None, None], 1e4, inputs[name])
        for name in ("q_segment_ids", "kv_segment_ids"):
            old = inputs[name]
            inputs[name] = torch.where(old < 0, -(2**31), names[old.clamp(0)]).int()
        again = attention(side, inputs, **options)
    assert all(torch.equal(again[name], x) for name, x in got.items())


def test_padding_sees_nothing_and_is_seen_by_nothing(side, implementation, torch_device):
    inputs = make_inputs(CASE, torch_device)
    got = attention(side, inputs, implementation=implementation, **CASE.options)
    is_padding = inputs["q_segment_ids"][0] < 0
    assert 0 < is_padding.sum() < len(is_padding)
    for name in ("out", "dq", "dk", "dv"):
        assert (got[name][:, is_padding] == 0).all()
    lse = got["lse"][..., is_padding]
    torch.testing.assert_close(lse, inputs["sinks"][:, None].expand_as(lse[0])[None])
    for name in ("sinks", "dout", "dlse"):
        del inputs[name]
    got = attention(side, inputs, implementation=implementation, **CASE.options)
    assert (got["lse"][..., is_padding] == -torch.inf).all()
    assert got["lse"][..., ~is_padding].isfinite().all()


def test_tiles_of_other_segments_are_not_visited(side, torch_device):
    """A NaN in a tile that is visited would reach all of its rows."""
    case = replace(CASE, seq_q=192, seq_kv=192, causal=False, sinks=False)
    inputs = make_inputs(replace(case, segments=""), torch_device)
    for name in ("q", "k"):
        inputs[f"{name if name == 'q' else 'kv'}_segment_ids"] = ids(64, 64, 64, like=inputs[name])
    for name in ("q", "k", "v", "dout"):
        inputs[name][:, :64], inputs[name][:, 128:] = torch.nan, torch.nan
    with use_configs(SMALL_TILES):
        got = attention(side, inputs, implementation="triton", **case.options)
    for name in ("out", "dq", "dk", "dv"):
        assert got[name][:, 64:128].isfinite().all()
        assert got[name][:, :64].isnan().all()
