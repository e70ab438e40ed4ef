import multiprocessing
from collections.abc import Callable
from functools import partial

import pytest
import torch

from twin_attention.contract.explain import Explanation
from twin_attention.interop.parity import environment, workers
from twin_attention.interop.parity.cases import Case
from twin_attention.interop.parity.inputs import Tensors
from twin_attention.interop.parity.oracle import evaluate
from twin_attention.interop.parity.sides import Ours

Spoil = Callable[[Ours, Case, Tensors], None]
EXPLANATION = Explanation("triton", "interpreter", "a fake device", None, "a test asked for it")


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork workers from a process that has imported what they need; it has no GPU."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.parity.test_workers", "tests.parity.test_fuzz"])
    monkeypatch.setattr(workers, "SPAWN", context)


@pytest.fixture
def fake_twins(monkeypatch: pytest.MonkeyPatch) -> Callable[[Spoil], None]:
    """Replace both packages by the oracle; `spoil` changes results, or raises."""
    spoilers: list[Spoil] = []

    def run(subject: Ours, case: Case, inputs: Tensors, constants=()) -> Tensors:
        results = evaluate(inputs, case.spec, torch.float64)
        dtypes = dict.fromkeys(("lse", "dlses", "dsinks", "tlse"), torch.float32)
        own = getattr(torch, case.spec.dtype)
        results = {name: x.to(dtypes.get(name, own)) for name, x in results.items()}
        for spoil in spoilers:
            spoil(subject, case, results)
        return results

    monkeypatch.setattr(Ours, "start", lambda subject: partial(run, subject))
    monkeypatch.setattr(Ours, "explain", lambda subject, case, inputs: EXPLANATION)
    monkeypatch.setattr(environment, "choose_device", lambda: "cpu")
    # Other processes would have the real twins.
    monkeypatch.setattr(environment, "choose_jobs", lambda device, suite, cases: 1)
    return spoilers.append
