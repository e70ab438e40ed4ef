"""Comparisons of results on samples of a case."""

import pytest
import torch

from interop.parity import oracle
from interop.parity.cases import FlashCase
from interop.parity.compare import compare
from interop.parity.inputs import make_inputs
from interop.parity.oracle import evaluate, expectations
from interop.parity.run import Runner

CASE = FlashCase(
    "samples", batch=1, seq_q=128, seq_kv=128, head_dim=16, dtype="float32", window_size=(4, 0)
)
TORCH, PALLAS = Runner("torch_attn", "triton"), Runner("pallas_attn", "triton")


def ratios(token: int, value: float, device: str) -> dict[tuple[str, str], float]:
    """Ratios when `value` is added to torch_attn's out at a token."""
    inputs = make_inputs(CASE, device)
    right = evaluate(inputs, CASE.spec, torch.float64)
    results = {runner: {n: x.float() for n, x in right.items()} for runner in (TORCH, PALLAS)}
    results[TORCH]["out"][0, token] += value
    found = compare(results, expectations(inputs, CASE.spec), CASE.dtype)
    assert len(found) == 15
    return {(c.title, c.output): c.agreement.ratio for c in found}


@pytest.fixture(autouse=True)
def samples(monkeypatch):
    monkeypatch.setattr(oracle, "SAMPLE_ABOVE", 0)
    monkeypatch.setattr(oracle, "STRETCH", 32)


@pytest.mark.parametrize("token", [0, 127])
def test_the_worst_sample_counts(token, torch_device):
    got = ratios(token, 1.0, torch_device)
    wrong = {("torch_attn triton", "out"), ("twins triton", "out")}
    assert {lane for lane, ratio in got.items() if ratio > 1} == wrong


def test_a_nan_between_the_samples_fails(torch_device):
    got = ratios(64, float("nan"), torch_device)
    assert {lane for lane, ratio in got.items() if ratio > 1} == {("torch_attn triton", "out")}
