"""What `python -m bench eager-attention` times, and its table's own columns."""

from contextlib import nullcontext
from dataclasses import replace

import torch

from bench import ours
from bench.job import Subject
from bench.runner import Instruments, measure
from bench.statistics import Times
from bench.suites.eager_attention import columns, jobs
from bench.suites.flash_job import flash_job, flash_tensors
from bench.timing import Timing
from interop.parity.cases import FlashCase

TRITON = Subject("torch triton", "sm90")
TIMES = Times(2.0, 1.9, 2.1)


class NoSampler(nullcontext):
    """Samples nothing."""

    def summary(self):
        return None


def test_forward_and_backward_of_every_case():
    found = jobs(["sm90", "sm80"])
    shapes = {(job.case["head_dim"], job.case["seq_q"]) for job in found}
    assert shapes == {(d, n) for d in (16, 32, 64, 128) for n in (256, 1024, 4096, 8192, 16384)}
    assert [job.operation for job in found] == ["forward", "backward"] * len(shapes)
    for job in found:
        assert set(job.makers) == {Subject("eager"), TRITON}
        assert (job.case["batch"], job.case["heads_q"], job.case["causal"]) == (8, 1, False)
        assert job.case["seq_kv"] == job.case["seq_q"]


def test_a_filter_is_part_of_a_name():
    assert [job.operation for job in jobs(["sm80"], "d16-256")] == ["forward", "backward"]


def test_a_record_says_what_its_backward_finds(monkeypatch, origin):
    allocated = iter((1000, 3500))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    case = FlashCase("small", 1, 16, 16, 1, 1, 16, dtype="float32")
    tensors = flash_tensors(case, "cpu")
    makers = {TRITON: ours.flash_makers(["sm90"])[TRITON]}
    timing = Timing(TIMES, TIMES, TIMES, kernels=("k",))
    instruments = Instruments(
        lambda calls: dict.fromkeys(calls, timing), lambda x: x, lambda: None, lambda: None
    )
    for operation, held in (("forward", None), ("backward", 2500)):
        job = replace(flash_job(case, operation, makers), inputs=lambda: tensors)
        (record,) = measure(job, job.plan(origin), instruments, NoSampler(), print)
        assert (record.status, record.held) == ("ok", held)


def test_columns(record):
    _, job = jobs(["sm90"], "d16-256")
    measured = replace(
        record(operation="backward"), case=job.case, held=3_000_000, memory=5_000_000
    )
    found = columns(measured)
    assert found == {
        "d": 16, "length": 256, "saved, MB": 3.0, "memory, MB": 5.0,
    }  # fmt: skip
    failed = columns(replace(record(status="out of memory"), case=job.case))
    assert failed.keys() == found.keys()
    assert failed["saved, MB"] is failed["memory, MB"] is None
