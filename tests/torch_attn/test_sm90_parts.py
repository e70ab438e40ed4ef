"""Parts of attention by the explicit kernels of SM90, interpreted on a CPU: ranks of a plan."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from interop.parity.cases import FlashCase
from tests.oracle import assert_within_budget
from tests.torch_attn.explicit_kernels import MODES, gluon_backend
from tests.torch_attn.gluon_interpreter import interpreted
from tests.torch_attn.simulated_ranks import run_ranks
from tests.torch_attn.test_context import attend, problem
from torch_attn.distributed import context, context_plan
from twin_attention.targets import config
from twin_attention.targets.conditions import CONDITIONS

BACKEND = gluon_backend("sm90")
CASE = FlashCase("", 1, 512, 512, 1, 1, 64, causal=True)
DOCUMENTS = (0, 60, 61, 150, 200)  # of a rank's two tiles one has padding alone
CASES = {
    "causal": (CASE, context_plan(512, 2)),
    "wide": (replace(CASE, head_dim=128, heads_q=2), context_plan(512, 2, "stripe")),
    "ragged": (replace(CASE, seq_q=540, seq_kv=540, head_dim=80, batch=2), context_plan(540, 3)),
    "window": (replace(CASE, window_size=(70, None)), context_plan(512, 2)),
    "documents": (replace(CASE, sinks=True), context_plan(512, 2, "balanced", DOCUMENTS)),
    "softcap": (
        replace(CASE, causal=False, softcap=3.0, head_dim_v=128, dtype="float16"),
        context_plan(512, 2),
    ),
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", CASES)
def test_ranks(monkeypatch, name, mode, deterministic):
    """What ranks get is what the whole sequence has; memory that is not written yet is NaN."""
    (case, plan), launched = CASES[name], []
    case = replace(case, deterministic=deterministic)

    def run(self, operation, *tensors):
        function = BACKEND.family.function(operation)
        assert BACKEND.family.supports(operation, self.call.spec, "sm90") is None
        with lock, interpreted(mode) as names:
            results = context._RUN[operation](function, self.call.spec, BACKEND, *tensors)
        launched.extend(names)
        return results

    from tests.torch_attn.simulated_ranks import _one_at_a_time as lock

    monkeypatch.setattr(context.Problem, "run", run)
    always = dict.fromkeys((">= 1024 keys", ">= 2048 keys"), lambda spec: True)
    with mock.patch.dict(CONDITIONS, always):
        config._shipped.cache_clear()
        inputs, spec = problem(case, plan, torch.device("cpu"))
        got = attend(run_ranks, case, plan, inputs, exchange="ring")
    config._shipped.cache_clear()
    assert_within_budget(got, inputs, spec)
    assert ("flash_bwd_fused" in launched) != deterministic
