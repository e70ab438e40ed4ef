import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest

from bench.first import STEPS, FirstCallJob
from bench.job import Entry
from bench.records import Times
from bench.sampling import Sampler
from twin_attention.interop.parity.cases import FlashCase

CASE = FlashCase("tiny", 1, 16, 24, 2, 1, 16, dtype="float32", causal=True)
REFERENCE = {"torch": ("torch_attn", "reference"), "jax": ("pallas_attn", "reference")}


@pytest.fixture
def measured(monkeypatch, record):
    monkeypatch.setattr("bench.first.kernels_of", REFERENCE.get)
    origin = {"suite": "first"}
    for name in ("device", "versions", "commit", "date"):
        origin[name] = getattr(record(), name)

    def measure(case, name):
        job = FirstCallJob(case, Entry(name, "sm80"), turns=1)
        return job.measure(job.plan(origin), Sampler(None), lambda step: None)

    return measure


@pytest.mark.parametrize("name", REFERENCE)
def test_each_step_of_a_process_is_a_record(measured, monkeypatch, name):
    if name == "torch":  # that a second process runs JAX's test sees
        monkeypatch.setattr(FirstCallJob, "_process", cache(FirstCallJob._process))
    records = measured(CASE, name)
    assert [(r.operation, r.status) for r in records] == [(step, "ok") for step in STEPS]
    times = {r.operation: r.times.median for r in records}
    assert times["import"] > 100  # milliseconds
    assert 0 < times["forward"] < 60e3


@pytest.mark.parametrize(
    ("program", "message"),
    [("exit(3)", "exit code 3"), ("raise ValueError('too small')", "ValueError: too small")],
)
def test_a_process_that_fails_says_why(measured, monkeypatch, program, message):
    run = subprocess.run
    monkeypatch.setattr(
        "bench.first.subprocess.run",
        lambda command, **options: run([sys.executable, "-c", program], **options),
    )
    records = measured(CASE, "torch")
    assert {(r.status, r.message) for r in records} == {("failed", f"RuntimeError: {message}")}


def test_the_median_of_the_turns_is_kept(monkeypatch, record):
    turns = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(FirstCallJob, "_run", lambda self: dict.fromkeys(STEPS, next(turns)))
    job = FirstCallJob(CASE, Entry("torch gluon", "sm90"))
    plan = {"forward": replace(record(), status="planned", times=None)}
    (found,) = job.measure(plan, Sampler(None), lambda step: None)
    assert found.times == Times(2e3, 1e3, 3e3)
