"""The oracle in pieces: what it gives is what the contract's formula gives in one go."""

from dataclasses import replace

import pytest
import torch

from interop.parity import oracle
from interop.parity.cases import DecodeCase, FlashCase, decode_cases, flash_cases
from interop.parity.inputs import make_inputs
from interop.parity.oracle import blocks, evaluate, expectations
from twin_attention.contract.reference import attention_backward, attention_forward, paged_forward

CASE = FlashCase(
    "pieces", batch=2, seq_q=70, seq_kv=53, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=24,
    dtype="float32", causal=True, softcap=5.0,
)  # fmt: skip


def in_one_go(inputs, spec, dtype):
    qkv = inputs["q"], inputs["k"], inputs["v"]
    out, lse = attention_forward(*qkv, spec, dtype)
    dq, dk, dv = attention_backward(inputs["dout"], inputs["dlse"], *qkv, spec, dtype)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def assert_same(got, want):
    assert list(got) == list(want)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "case", [CASE, replace(CASE, batch=0), replace(CASE, seq_kv=0), replace(CASE, seq_q=0)]
)
def test_slicing_agrees_with_unsliced(case, torch_device):
    inputs = make_inputs(case, torch_device)
    got = evaluate(inputs, case.spec, torch.float64)
    assert_same(got, in_one_go(inputs, case.spec, torch.float64))


def test_without_gradients(torch_device):
    inputs = make_inputs(replace(CASE, gradients=False), torch_device)
    assert list(evaluate(inputs, CASE.spec, torch.float64)) == ["out", "lse"]


def test_a_small_case_is_one_block_in_both_dtypes(torch_device):
    inputs = make_inputs(CASE, torch_device)
    (everything,) = expectations(inputs, CASE.spec)
    assert {name: x.shape for name, x in everything.crop(everything.ref).items()} == {
        name: x.shape for name, x in everything.ref.items()
    }
    assert {x.dtype for x in everything.ref.values()} == {torch.float64}
    assert {x.dtype for x in everything.lp.values()} == {torch.float32}


@pytest.mark.parametrize("window", [(5, 0), (0, 3), (7, 4)])
def test_a_stretch_agrees_with_the_whole_sequence(window, monkeypatch, torch_device):
    monkeypatch.setattr(oracle, "SAMPLE_ABOVE", 0)
    monkeypatch.setattr(oracle, "STRETCH", 32)
    case = FlashCase(
        "stretch", batch=2, seq_q=100, seq_kv=100, heads_q=4, heads_kv=2, head_dim=16,
        dtype="float32", window_size=window,
    )  # fmt: skip
    middle = oracle._sample(case.spec, batch=1, token=50, head=3)
    monkeypatch.setattr(oracle, "blocks", lambda spec: [*blocks(spec), middle])
    inputs = make_inputs(case, torch_device)
    whole = in_one_go(inputs, case.spec, torch.float64)
    stretches = [block.queries for block in oracle.blocks(case.spec)]
    assert stretches == [slice(0, 32), slice(68, 100), slice(34, 66)]
    for expectation in expectations(inputs, case.spec):
        assert expectation.ref["dk"].shape[:3:2] == (1, 1)
        assert expectation.ref["dk"].shape[1] >= 32 - 2 * sum(window)
        assert_same(expectation.ref, expectation.crop(whole))


@pytest.mark.parametrize(
    "case", [*decode_cases("quick"), DecodeCase("no-pages", lengths=(0, 9), tokens=2, max_pages=0)],
    ids=lambda case: case.name,
)  # fmt: skip
def test_a_decode_sequence_by_sequence_agrees_with_all_at_once(case, torch_device):
    inputs = make_inputs(case, torch_device)
    (everything,) = expectations(inputs, case.spec)
    named = dict.fromkeys(("sinks", "k_scale", "v_scale")) | inputs
    if case.tokens is None:
        named["q"] = named["q"][:, None]
    out, lse = paged_forward(**named, spec=case.spec, dtype=torch.float64)
    if case.tokens is None:
        out, lse = out[:, 0], lse[:, :, 0]
    assert_same(everything.ref, {"out": out, "lse": lse})
    assert everything.crop(inputs) is inputs
    assert {x.dtype for x in everything.lp.values()} == {getattr(torch, case.dtype)}
    assert everything.lp["out"].isfinite().all()


def test_samples_hold_the_elements_around_2_to_31():
    for case in flash_cases("large", "2g-elements"):
        shape = (case.batch, case.seq_q, case.heads_q, case.head_dim)
        last = torch.Size(shape).numel() - 1
        found = blocks(case.spec)
        for element, block in zip((0, 2**31 - 1, 2**31, last), found, strict=True):
            row, head = divmod(element // case.head_dim, case.heads_q)
            batch, token = divmod(row, case.seq_q)
            compared = range(case.seq_q)[block.queries][block.inner]
            assert batch in range(case.batch)[block.batch]
            assert head in range(case.heads_q)[block.heads_kv]
            assert token in compared
            assert len(range(case.seq_q)[block.queries]) <= oracle.STRETCH
