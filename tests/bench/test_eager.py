"""Tests of the cases that `python -m bench eager` times, and of one of them without a GPU."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from bench import ours
from bench.job import Subject
from bench.peaks import peaks
from bench.problems import attention_jobs, attention_tensors
from bench.records import Times
from bench.report.tables import every
from bench.runner import Instruments, measure
from bench.suites import eager
from bench.suites.eager import columns, jobs
from bench.timing import Timing
from interop.parity.cases import FlashCase

TRITON = Subject("torch triton", "sm90")
TORCH = {TRITON, Subject("eager"), Subject("SDPA")}
JAX = {Subject("jax triton", "sm90"), Subject("jax.nn XLA")}
TIMES = Times(2.0, 1.9, 2.1)


class NoSampler(nullcontext):
    """Samples nothing."""

    def summary(self):
        return None


@pytest.fixture
def single():
    """The jobs of single causal heads."""
    return [job for job in jobs(["sm90", "sm80"]) if job.case["causal"]]


def test_every_operation_of_every_single_head(single):
    cases = {tuple(job.case[n] for n in ("dtype", "head_dim", "seq_q")) for job in single}
    lengths = [128 << n for n in range(9)]
    assert {length for dtype, d, length in cases if (dtype, d) == ("float32", 64)} == set(lengths)
    assert {(dtype, d) for dtype, d, _ in cases} == {
        (dtype, d) for dtype in ("bfloat16", "float32") for d in (16, 32, 64)
    }
    assert [job.operation for job in single] == ["forward", "backward", "both"] * len(cases)
    for job in single:
        assert (job.case["batch"], job.case["heads_q"]) == (1, 1)
        assert job.case["seq_kv"] == job.case["seq_q"]


def test_forward_and_backward_of_every_batch():
    found = [job for job in jobs(["sm90", "sm80"]) if not job.case["causal"]]
    shapes = {(job.case["head_dim"], job.case["seq_q"]) for job in found}
    assert shapes == {(d, n) for d in (16, 32, 64, 128) for n in (256, 1024, 4096, 8192, 16384)}
    assert [job.operation for job in found] == ["forward", "backward"] * len(shapes)
    for job in found:
        assert set(job.factories) == {Subject("eager"), TRITON}
        assert (job.case["batch"], job.case["heads_q"], job.case["dtype"]) == (8, 1, "float32")
        assert job.case["seq_kv"] == job.case["seq_q"]


def test_jax_compiles_at_few_lengths_of_every_head_size(single):
    with_jax = set()
    for job in single:
        assert set(job.factories) in (TORCH, TORCH | JAX)
        if set(job.factories) > TORCH:
            with_jax.add((job.case["head_dim"], job.case["seq_q"]))
    assert with_jax == {(16, 2048), (32, 2048), (64, 2048), (64, 32768)}


def test_a_filter_is_part_of_a_name():
    assert {job.case["name"] for job in jobs(["sm80"], "fp32-d16-20")} == {"fp32-d16-2048"}
    assert [job.operation for job in jobs(["sm80"], "d16-256")] == ["forward", "backward"]


def test_every_implementation_passes_its_gate(monkeypatch):
    monkeypatch.setattr(eager, "JAX_LENGTHS", {16: (128,)})
    job, *_ = jobs(["sm90"], "fp32-d16-128")
    assert job.operation == "forward"
    assert set(job.factories) == TORCH | JAX
    tensors = attention_tensors(FlashCase(**job.case), "cpu")
    check = job.check(tensors)
    for subject, factory in job.factories.items():
        call = factory(tensors)
        assert check(call.result(call.run())) < 1, subject


def test_a_record_has_the_memory_that_a_forward_saved(monkeypatch, origin):
    allocated = iter((1000, 3500))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    case = FlashCase("small", 1, 16, 16, 1, 1, 16, dtype="float32")
    tensors = attention_tensors(case, "cpu")
    factories = {TRITON: ours.flash_factories(["sm90"])[TRITON]}
    timing = Timing(TIMES, TIMES, TIMES, kernels=("k",))
    instruments = Instruments(
        lambda calls: dict.fromkeys(calls, timing), lambda x: x, lambda: None, lambda: None
    )
    found = attention_jobs([case], ("forward", "backward"), lambda case: factories)
    for job, saved in zip(found, (None, 2500), strict=True):
        job = replace(job, inputs=lambda: tensors)
        (record,) = measure(job, job.plan(origin), instruments, NoSampler(), print)
        assert (record.status, record.held) == ("ok", saved)


def test_the_table_shows_speed_ups(record):
    case = jobs(["sm90"], "bf16-d64-128")[0].case
    fast = replace(record(), case=case)
    slow = replace(fast, implementation="eager", target=None, times=Times(5.0, 4.9, 5.1))
    failed = replace(fast, implementation="SDPA", target=None, status="failed", times=None)
    titles, *rows = every([fast, slow, failed], columns, peaks([fast]))
    assert [row[titles.index("eager / this")] for row in rows] == ["2.50", "1.00", ""]


def test_columns(record):
    _, job = jobs(["sm90"], "d16-256")
    measured = record(operation="backward", held=3_000_000, memory=5_000_000)
    found = columns(replace(measured, case=job.case))
    assert found == {
        "batch": 8, "d": 16, "length": 256, "dtype": "float32", "saved, MB": 3.0, "memory, MB": 5.0,
    }  # fmt: skip
    failed = columns(replace(record(status="out of memory"), case=job.case))
    assert failed.keys() == found.keys()
    assert failed["saved, MB"] is failed["memory, MB"] is None
