from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.oracle import assert_within_budget
from tests.torch_attn.explicit_kernels import MODES, gluon_backend, summing
from tests.torch_attn.gluon_interpreter import interpreted
from tests.torch_attn.test_context import attend, problem
from torch_attn.distributed import context, context_plan
from torch_attn.kernels.explicit import items
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.ranks import run_ranks

BACKEND = gluon_backend("sm90")
CASE = FlashCase("", 1, 512, 512, 1, 1, 64, causal=True, deterministic=False)
SHORT = replace(CASE, seq_q=276, seq_kv=276)
DOCUMENTS = (0, 60, 61, 150, 200)  # of a rank's two tiles one has padding alone
CASES = {
    "causal": (CASE, context_plan(512, 2), "writes first"),
    "documents": (
        replace(CASE, sinks=True, deterministic=True),
        context_plan(512, 2, "balanced", DOCUMENTS),
        "reads first",
    ),
    "groups": (
        replace(SHORT, heads_q=2, head_dim=80, window_size=(70, None)),
        context_plan(276, 2, "stripe"),
        "random",
    ),
    "gather": (
        replace(CASE, window_size=(40, None), deterministic=True),
        context_plan(512, 2, "contiguous"),
        "random",
    ),
    "softcap": (
        replace(
            SHORT, causal=False, softcap=3.0, head_dim_v=128, dtype="float16", deterministic=True
        ),
        context_plan(276, 2),
        "random",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks(monkeypatch, name):
    """Memory that is not written yet is NaN."""
    (case, plan, mode), launched = CASES[name], []
    exchange = "gather" if name == "gather" else "ring"

    def run(self, operation, part, *tensors):
        function, spec = BACKEND.family.function(operation), part.spec
        assert BACKEND.family.supports(operation, spec, "sm90") is None
        with interpreted(MODES[mode]) as names:
            results = context._RUN[operation](function, spec, BACKEND, *tensors)
        launched.extend(names)
        return results

    monkeypatch.setattr(context.RankCall, "run", run)
    if name in ("causal", "documents"):  # one program takes all items
        monkeypatch.setattr(items, "num_sms", lambda *_: 1)
    with summing(True):
        inputs, spec = problem(case, plan, torch.device("cpu"))
        got = attend(run_ranks, case, plan, inputs, exchange=exchange)
    assert_within_budget(got, inputs, spec)
    assert ("flash_bwd_fused" in launched) != case.deterministic
