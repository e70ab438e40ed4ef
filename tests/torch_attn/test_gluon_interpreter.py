"""The explicit kernels of SM90 in the interpreter of Gluon, in several orders of events."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from interop.parity.cases import FlashCase
from interop.parity.check import agreements
from interop.parity.inputs import make_inputs
from interop.parity.oracle import evaluate, expectations, parts_of
from tests.torch_attn.gluon_interpreter import (
    READS_FIRST,
    WRITES_FIRST,
    Mode,
    at_random,
    interpreted,
)
from torch_attn.kernels.sm90.flash_bwd import flash_bwd
from twin_attention.contract.operands import FlashOperands
from twin_attention.targets import config
from twin_attention.targets.conditions import CONDITIONS
from twin_attention.targets.family import FAMILIES, Backend

(GLUON,) = (x for x in FAMILIES["torch_attn"] if x.name == "gluon" and x.folder == "sm90")
MODES = {"writes first": WRITES_FIRST, "reads first": READS_FIRST, "random": at_random(0)}
SUMMED = [
    "flash_bwd_preprocess",
    "flash_bwd_fused",
    "flash_bwd_postprocess",
]
SMALL = {"batch": 1, "heads_q": 1, "heads_kv": 1}


@pytest.fixture(autouse=True)
def _sums_of_few_keys():
    """Sum dq for any number of keys."""
    with mock.patch.dict(CONDITIONS, {">= 2048 keys": lambda spec: True}):
        config._shipped.cache_clear()
        yield
    config._shipped.cache_clear()


def check_backward(case: FlashCase, mode: Mode, programs: int = 3, replaced=None) -> list[str]:
    """Hold the gradients of a case to the contract; returns the names of the kernels."""
    inputs, spec = make_inputs(case, "cpu"), case.spec
    spec = replace(spec, deterministic=case.deterministic)
    (expected,) = expectations(inputs, parts_of(spec))
    exact = evaluate(inputs, spec, torch.float32)
    out, lse = exact["out"].to(inputs["q"].dtype), exact["lse"]
    dout, dlse = inputs.pop("dout"), inputs.pop("dlse")
    with interpreted(mode, programs, replaced) as launched:
        operands = FlashOperands(**inputs)
        gradients = flash_bwd(dout, dlse, operands, out, lse, spec, Backend(GLUON, "sm90"))
    got = {f"d{name}": getattr(gradients, name) for name in ("q", "k", "v")}
    for name, agreement in agreements(got, expected).items():
        assert agreement.ok, (name, agreement)
    return launched


CASES = [
    FlashCase("full", **SMALL, seq_q=256, seq_kv=256),
]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backward_that_sums_dq(case, mode):
    assert set(check_backward(case, mode)) == set(SUMMED)
