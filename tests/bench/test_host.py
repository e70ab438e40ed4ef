"""Tests of `python -m bench host` without a GPU: its jobs, its gate, its records in reports."""

from dataclasses import replace

import pytest
import torch

from bench import calls, timing
from bench.compare import changes
from bench.job import Subject
from bench.problems import attention_tensors, decode_tensors
from bench.records import Times
from bench.report.page import to_page
from bench.report.sections import SPEEDS, sections
from bench.suites import host
from bench.suites.host import columns, jobs
from interop.parity.cases import DecodeCase, FlashCase

OURS = {Subject(name, "sm90") for name in ("torch triton", "torch triton compiled", "jax triton")}
SDPA = {Subject(name) for name in ("SDPA", "SDPA compiled", "FA2", "cuDNN")}
ON_A_GPU = {"FA2", "cuDNN", "jax.nn cuDNN", "FlashInfer"}


@pytest.fixture
def found():
    """The jobs on a Hopper card, by case and operation."""
    return {(job.case["name"], job.operation): job for job in jobs(["sm90", "sm80"])}


def test_every_operation_beside_its_peers(found):
    flash = OURS | SDPA | {Subject("jax.nn cuDNN")}
    decode = OURS | {Subject("FlashInfer")}
    assert {key: set(job.factories) for key, job in found.items()} == {
        ("1x128x8x64-causal", "forward"): flash,
        ("1x128x8x64-causal", "both"): flash,
        ("2-sequences-1-split", "decode"): decode,
        ("2-sequences-4-splits", "decode"): decode,
        ("2-sequences", "append"): {Subject("torch triton", "sm90")},
    }


def test_the_problems(found):
    shapes = {"heads_q": 8, "heads_kv": 8, "head_dim": 64, "dtype": "bfloat16"}
    for (_, operation), job in found.items():
        own = {"batch": 1, "seq_q": 128, "seq_kv": 128, "causal": True}
        if operation in ("decode", "append"):
            own = {"lengths": (100, 120), "tokens": None, "page_size": 16}
        assert (shapes | own).items() <= job.case.items()
    splits = [job.case["num_splits"] for (_, name), job in found.items() if name == "decode"]
    assert splits == [1, 4]


def test_a_filter_is_part_of_a_name():
    assert [job.operation for job in jobs(["sm90"], "causal")] == ["forward", "both"]
    assert [job.operation for job in jobs(["sm90"], "2-seq")] == ["decode", "decode", "append"]


def test_jobs_have_the_hosts_timer_and_no_rates(found, monkeypatch):
    asked = []
    monkeypatch.setattr(timing, "time_host", lambda calls, repeats: asked.append((calls, repeats)))
    for job in found.values():
        assert job.flops == job.bytes == 0
        assert job.reads is job.writes is None
        job.time(job.operation)
    assert asked == [
        ("forward", 300), ("both", 100), ("decode", 300), ("decode", 300), ("append", 300),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "key",
    [
        ("1x128x8x64-causal", "forward"),
        ("1x128x8x64-causal", "both"),
        ("2-sequences-1-split", "decode"),
        ("2-sequences-4-splits", "decode"),
    ],
)
def test_every_implementation_passes_its_gate(found, monkeypatch, key):
    monkeypatch.setattr(host, "compiled", lambda f, **kw: calls.compiled(f, backend="eager", **kw))
    job = found[key]
    if key[1] == "decode":
        tensors = decode_tensors(DecodeCase(**job.case), "cpu")
    else:
        tensors = attention_tensors(FlashCase(**job.case), "cpu")
    check = job.check(tensors)
    for subject, factory in job.factories.items():
        if subject.implementation in ON_A_GPU:
            continue
        call = factory(tensors)
        for _ in range(2):
            assert check(call.result(call.run())) <= 1, subject


def test_an_append_is_checked_where_it_writes(found):
    job = found["2-sequences", "append"]
    tensors = decode_tensors(DecodeCase(**job.case), "cpu")
    check = job.check(tensors)
    assert check([tensors.k_pages, tensors.v_pages]) > 1
    (factory,) = job.factories.values()
    call = factory(tensors)
    pools = call.result(call.run())
    assert check(pools) == 0
    page, slot = tensors.block_tables[1, 119 // 16], 119 % 16
    assert torch.equal(pools[0][page, slot], tensors.q[1])
    for x in pools:
        x[page, slot, 7, 63] += 1
        assert check(pools) > 1
        x[page, slot] = tensors.q[1]
    assert check(pools) == 0


@pytest.fixture
def records(found, record):
    """A record of each implementation: 0.025 ms of the host, and 0.02 of peers."""
    made = []
    for job in found.values():
        for subject in job.factories:
            median = 0.025 if subject.target else 0.02
            times = Times(median, 0.9 * median, 1.1 * median)
            own = record(suite="host", operation=job.operation, times=times, tflops=None)
            name, target = subject
            made.append(replace(own, case=job.case, host=times, implementation=name, target=target))
    return made


def test_columns(records):
    assert columns(records[0]) == {
        "case": "1x128x8x64-causal", "host, us": 25.0, "ms": None, "kernels": None,
    }  # fmt: skip
    failed = columns(replace(records[0], status="failed", times=None))
    assert failed["host, us"] is None


def test_the_table_has_microseconds_and_ratios_and_nothing_of_the_device(records):
    (section,) = sections(records)
    titles, *rows = section.every
    assert titles == [
        "pass", "implementation", "case", "host, us", "spread", "best peer / this", "SDPA / this",
        "FA2 / this", "status",
    ]  # fmt: skip
    first = dict(zip(titles, rows[0], strict=True))
    assert (first["host, us"], first["FA2 / this"]) == ("25.0", "0.80")
    assert set(section.tables) == {
        SPEEDS,
        *(f"{name}, milliseconds (spread between rounds)" for name in
          ("Forward", "Both", "Decode", "Append")),
    }  # fmt: skip


@pytest.mark.filterwarnings("error")
def test_the_page_says_whose_times_they_are(records):
    page = to_page("Run", records)
    assert "All times are the host&#x27;s, not the device&#x27;s" in page
    assert "TFLOP/s over" not in page


def test_two_runs_compare(records):
    slower = [replace(r, times=Times(0.05, 0.05, 0.05), commit="later") for r in records]
    found = changes(records, slower)
    assert len(found) == len(records)
    assert found[0].relative == pytest.approx(1.0)
