"""What `python -m bench kvcache` times, and a case of it without a GPU."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from bench import ours
from bench.job import Call, Subject
from bench.peers import DECODE
from bench.problems import decode_job, decode_tensors
from bench.records import Times
from bench.suites import kvcache
from interop.parity.cases import DecodeCase

PEERS = {Subject(name) for name in DECODE}
PALLAS = {Subject(name, "sm90") for name in ("jax mosaic", "jax triton")}
NATIVE = {Subject(name, "sm90") for name in ("torch triton", "torch triton graph")} | PALLAS
SM80 = {Subject(name, "sm80") for name in ("jax mosaic", "torch triton", "jax triton")}


@pytest.fixture(scope="module")
def jobs():
    """The suite's jobs on a Hopper card, by name."""
    found = kvcache.jobs(["sm90", "sm80"])
    by_name = {job.case["name"]: job for job in found}
    assert len(by_name) == len(found)
    return by_name


def test_the_sweep_runs_with_narrow_and_with_wide_tables(jobs):
    for n in range(5, 16):
        narrow, wide = jobs[f"sweep-{1 << n}"], jobs[f"sweep-{1 << n}-wide"]
        assert narrow.case["max_pages"] == max(1, (1 << n) // 256)
        assert wide.case["max_pages"] * wide.case["page_size"] == 1 << 20
        same = {"name": "", "max_pages": 0}
        assert narrow.case | same == wide.case | same
        assert (narrow.bytes, narrow.flops) == (wide.bytes, wide.flops)


def test_implementations(jobs):
    assert set(jobs["sweep-8192"].factories) == NATIVE | SM80 | PEERS
    assert set(jobs["sweep-4096"].factories) == NATIVE - PALLAS | PEERS
    assert set(jobs["sweep-8192-wide"].factories) == NATIVE
    assert set(jobs["sweep-4096-wide"].factories) == NATIVE - PALLAS
    assert set(jobs["128x4096-heads-32-32"].factories) == NATIVE | SM80 | PEERS
    assert set(jobs["128x4096-heads-32-32-4-tokens"].factories) == NATIVE | PEERS
    assert set(jobs["128x4096-heads-32-32-int8"].factories) == NATIVE | PEERS
    for variant in ("16-tokens", "d64", "d256"):
        assert set(jobs[f"64x8192-heads-32-8-{variant}"].factories) == NATIVE | SM80 | PEERS


def test_8_bit_caches_are_of_cases_with_more_than_a_gibibyte(jobs):
    quantized = [job for job in jobs.values() if job.case["kv_dtype"]]
    assert {job.case["kv_dtype"] for job in quantized} == {"int8", "float8_e4m3fn"}
    for job in quantized:
        in_float16 = jobs[job.case["name"].removesuffix(f"-{job.case['kv_dtype']}")]
        assert in_float16.bytes > 2**30
        assert job.bytes == pytest.approx(in_float16.bytes / 2, rel=0.02)


def test_reads_and_writes(jobs):
    job = jobs["64x1024-heads-32-8-4-tokens"]
    q, cache, tables = 64 * 4 * 32 * 128 * 2, 2 * 64 * 1024 * 8 * 128 * 2, 4 * (64 * 64 + 64)
    assert (job.reads, job.writes) == (q + cache + tables, q + 64 * 4 * 32 * 4)
    assert job.bytes == job.reads + job.writes


def test_the_gate_takes_what_the_twins_give():
    case = DecodeCase("wide", (20, 20), tokens=1, dtype="float16", max_pages=64)
    job = decode_job(case, ours.decode_factories(["sm90"]))
    tensors = decode_tensors(case, "cpu")
    check = job.check(tensors)
    for twin in ("torch triton", "jax triton"):
        call = job.factories[Subject(twin, "sm90")](tensors)
        (out,) = call.result(call.run())
        assert check([out]) < 1, twin
        assert check([out + 1]) > 1, twin


def test_a_graph_is_captured_once_and_replayed(monkeypatch):
    done = []

    @contextmanager
    def capture(graph, **options):
        done.append("capture")
        yield
        done.append("captured")

    class Graph:
        replay = staticmethod(lambda: done.append("replay"))

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    call = Call(lambda: done.append("run") or len(done), lambda n: (n,))
    graph = kvcache._graph(lambda case, tensors: call, "case", "tensors")
    assert done == ["run", "capture", "run", "captured"]
    assert graph.result(graph.run()) == graph.result(graph.run()) == (3,)
    assert done[4:] == ["replay", "replay"]


def test_columns(jobs, record):
    job = jobs["64x8192-heads-32-8-int8"]
    fields = {"case": job.case, "reads": job.reads, "writes": job.writes, "operation": "decode"}
    found = kvcache.columns(
        replace(
            record(),
            **fields,
            times=Times(0.25, 0.2, 0.3, 0.24, 0.26),
            host=Times(0.05, 0.05, 0.05, 0.04, 0.05),
        )
    )
    assert found == {
        "sequences": 64, "KV length": 8192, "T": 1, "heads": "32/8", "cache": "int8", "page": 16,
        "table, keys": 8192, "reads, MB": job.reads / 1e6, "writes, MB": job.writes / 1e6,
        "CPU time, us": 50.0, "CPU noise": "10.0%", "GPU time, us": 250.0, "GPU noise": "4.0%",
        "Gelem/s": pytest.approx(2 * 64 * 8192 * 8 * 128 / 0.25e-3 / 1e9), "ms": None,
        "host, us": None,
    }  # fmt: skip
    failed = kvcache.columns(replace(record(status="failed"), **fields))
    assert failed.keys() == found.keys()
    assert failed["GPU time, us"] is failed["GPU noise"] is failed["Gelem/s"] is None
