"""Tests of what `python -m bench patterns` times, its gates, its peers and its tables."""

from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from bench.job import Absent, Subject
from bench.peers import SPARSE
from bench.peers.sparse_peers import sparse_mask
from bench.problems import SparseCase, attention_tensors
from bench.records import Times
from bench.report.markdown import summary
from bench.report.plots import of_suite
from bench.report.sections import sections
from bench.report.tables import names
from bench.runner import Instruments, measure
from bench.suites import patterns
from bench.suites.patterns import cases as pattern_cases
from bench.suites.patterns import columns, jobs, tables
from bench.timing import Timing
from interop.parity.cases import DilatedCase
from interop.parity.sides import leaves

TARGETS = ["sm90", "sm80"]
SPARSE_CASE = SparseCase(
    "random-small", 2, 300, 300, 2, 2, 16, dtype="float32", tile_q=128, tile_kv=128, kept=0.6
)
LOCAL_CASE = replace(SPARSE_CASE, name="local-small", pattern="local", causal=True)
DILATED_CASE = DilatedCase(
    "dilated-small", 2, 64, 64, 3, 3, 16, dtype="float32", segment_lengths=(16, 64),
    dilation_rates=(1, 4),
)  # fmt: skip
TIMES = Times(2.0, 1.9, 2.1)


def job_of(case, operation):
    return patterns.job(case, operation, "sm90")


@pytest.fixture
def at_all_lengths(monkeypatch):
    """Every implementation at these short lengths as well."""
    monkeypatch.setattr(patterns, "AT_LENGTHS", {})


def test_the_masks():
    cases = [case for case in pattern_cases() if isinstance(case, SparseCase)]
    assert len(cases) == 14
    for case in cases:
        assert (np.tril(case.tiles) if case.causal else case.tiles).diagonal().all()
        assert case.causal == (case.pattern == "local")
        assert case.mask_shape[2:] == case.tiles.shape == (-(-case.seq_q // 128),) * 2
        if case.seq_q >= 4096 and not case.causal:
            assert 0.09 < case.tiles.mean() < 0.105
    long = next(case for case in cases if case.name == "local-bf16-1x131072x16")
    seen = np.tril(long.tiles)[100]
    assert np.flatnonzero(seen).tolist() == [0, *range(93, 101)]


def test_the_dilations_fit():
    cases = [case for case in pattern_cases() if isinstance(case, DilatedCase)]
    assert sum(case.name.startswith("undilated") for case in cases) == 2
    for case in cases:
        assert all(case.seq_q % length == 0 for length in case.segment_lengths)
        assert set(case.dilation_rates) == {1} or case.dilation_rates[1] == 2
    (longest,) = (case for case in cases if case.seq_q == 131072)
    assert (longest.segment_lengths[-1], longest.dilation_rates[-1]) == (32768, 16)


def test_every_subject_at_every_case():
    found = jobs(TARGETS)
    assert [job.operation for job in found] == ["forward", "both"] * (len(found) // 2)
    assert found[0].case["seq_q"] == 32768  # what counts most comes first
    assert len(found) == 2 * len({job.case["name"] for job in found}) == 46
    for job in found:
        pattern = job.title.partition("-")[0]
        kinds = ("dilated", "standard") if "dilated" in pattern else ("block-sparse", "dense")
        kinds += ("module",) if pattern in ("random", "dilated") else ()
        ours = {Subject(" ".join(name), "sm90") for name in product(("torch", "jax"), kinds)}
        peers = set() if "dilated" in pattern else {Subject(name) for name in SPARSE}
        assert set(job.factories) == ours | peers
    assert {job.case["name"] for job in jobs(TARGETS, "l-bf16-1x4")} == {"local-bf16-1x4096x16"}
    longest = jobs(TARGETS, "random-bf16-1x131072")[0]
    with pytest.raises(Absent, match=r"timed at 1024, 16384, .* tokens only"):
        longest.factories[Subject("torch dense", "sm90")]([])


def test_flops_are_those_of_the_pattern():
    forward, both = (job_of(SPARSE_CASE, operation).flops for operation in ("forward", "both"))
    of_pairs = np.kron(SPARSE_CASE.tiles, np.ones((128, 128), bool))[:300, :300]
    assert forward == 2 * 2 * 4 * 16 * of_pairs.sum()
    assert both == 3.5 * forward
    # 4 segments of 16, and one of 64 of which 16 are kept.
    assert job_of(DILATED_CASE, "forward").flops == 2 * 3 * 4 * 16 * (4 * 16**2 + 16**2)


@pytest.mark.usefixtures("at_all_lengths")
@pytest.mark.parametrize("operation", ["forward", "both"])
@pytest.mark.parametrize("case", [SPARSE_CASE, LOCAL_CASE, DILATED_CASE], ids=lambda x: x.name)
def test_our_calls_are_right_and_the_gate_sees_what_is_wrong(case, operation):
    job, tensors = job_of(case, operation), attention_tensors(case, "cpu")
    check = job.check(tensors)
    for subject, factory in job.factories.items():
        if subject.implementation == "FlexAttention":
            continue  # without a compiler it does not read its tiles
        call = factory(tensors)
        found = call.run()
        assert (call.planned is None) == subject.implementation.startswith("torch")
        assert call.planned is None or call.planned() > tensors[0].nbytes
        if call.result is None:
            assert subject.implementation.endswith((" dense", " module"))
            gradients = 5 if "module" in subject.implementation else 3  # of x and of weights
            assert len(leaves(found)) == 1 + gradients * (operation == "both")
            continue
        arrays = call.result(found)
        assert len(arrays) == (1 if operation == "forward" else 4)
        assert check(arrays) <= 1, subject
        for wrong in range(len(arrays)):
            assert check([x + 0.01 * (i == wrong) for i, x in enumerate(arrays)]) > 1


@pytest.mark.usefixtures("at_all_lengths")
@pytest.mark.parametrize("name", ["torch dense", "torch module", "jax module"])
def test_what_computes_something_else_is_checked_by_itself(monkeypatch, name):
    monkeypatch.setattr(patterns, "attention_check", lambda *_: lambda arrays: 2.0)
    factory = job_of(SPARSE_CASE, "forward").factories[Subject(name, "sm90")]
    tensors = attention_tensors(SPARSE_CASE, "cpu")
    with pytest.raises(ValueError, match="its error is 2 times the budget"):
        factory(tensors)


@pytest.mark.parametrize("case", [SPARSE_CASE, LOCAL_CASE], ids=lambda x: x.name)
def test_the_mask_of_flex_attention(case):
    mask = sparse_mask(case, "cpu")
    kept = np.tril(case.tiles) if case.causal else case.tiles
    assert (mask.to_dense()[0, 0].bool().numpy() == kept).all()
    edges = len(kept) if case.causal else 0
    assert mask.kv_num_blocks.sum() == edges
    assert mask.full_kv_num_blocks.sum() == kept.sum() - edges
    assert mask.seq_lengths == (300, 300)
    if case.causal:
        position = torch.tensor([0, 5, 5]), torch.tensor([1, 5, 4])
        assert mask.mask_mod(0, 0, *position).tolist() == [False, True, True]


class NoSampler(nullcontext):
    """Samples nothing."""

    def summary(self):
        return None


@pytest.mark.usefixtures("at_all_lengths")
def test_a_row_out_of_memory_leaves_the_others(monkeypatch, origin):
    def exhausted(*_):
        raise MemoryError("Out of memory while trying to allocate 68719476736 bytes")

    def broken(*_):
        raise RuntimeError("no kernel\nfor this")

    peers = {"jax.nn XLA": exhausted, "FlexAttention": broken}
    monkeypatch.setattr(patterns, "SPARSE", peers)
    job = job_of(LOCAL_CASE, "forward")
    job = replace(job, inputs=partial(job.inputs, "cpu"))
    timing = Timing(TIMES, TIMES, TIMES, kernels=("k",))
    instruments = Instruments(
        lambda calls: dict.fromkeys(calls, timing), lambda x: x, lambda: None, lambda: None
    )
    records = measure(job, job.plan(origin), instruments, NoSampler(), print)
    found = {record.implementation: columns(record) for record in records}
    assert found["jax.nn XLA"]["status"] == "OOM"
    assert found["FlexAttention"]["status"] == "error (RuntimeError: no kernel)"
    assert found["torch block-sparse"]["status"] == found["jax block-sparse"]["status"] == "ok"
    assert found["jax block-sparse"]["memory, MB"] > 0  # as planned: the timer saw none
    assert found["torch block-sparse"]["tokens/s"] == 2 * 300 / 2e-3


def record_of(record, case, name, ms=None, operation="forward", **fields):
    target = None if name in SPARSE else "sm90"
    times = {"times": Times(ms, ms, ms)} if ms else {}
    made = record(operation=operation, implementation=name, target=target, **fields | times)
    return replace(made, suite="patterns", case=asdict(case))


def test_a_page_tells_patterns_apart(record):
    records = [
        record_of(record, case, name, 2.0, tflops=9.0)
        for case in pattern_cases()
        for name in ("torch block-sparse", "torch dense", "FlexAttention")
    ]
    apart = names(records)[1]
    assert len(set(apart.values())) == len(apart) == 23
    (section,) = sections(records)
    assert section.title == patterns.TITLE
    assert [picture.title for picture in of_suite(records, section.peaks)]
    assert f"{patterns.GAINS}:" in summary("run", records)["run.md"]


def test_the_tables(record):
    case, twice = (replace(DILATED_CASE, name=f"dilated-{n}", batch=1, seq_q=n) for n in (64, 128))
    sparse = partial(record_of, record, SPARSE_CASE)
    records = [
        sparse("torch block-sparse", 2.0, memory=3_000_000),
        sparse("torch dense", 15.0),
        sparse("jax block-sparse", 2.5),
        sparse("FlexAttention", 3.0),
        sparse("jax.nn XLA", status="out of memory", message="MemoryError: no"),
        sparse("jax dense", status="absent", message="timed at 1024 tokens only"),
        record_of(record, case, "torch dilated", 1.0, "both"),
        record_of(record, case, "torch standard", 1.5, "both"),
        record_of(record, twice, "torch dilated", 2.1, "both"),
    ]
    found = tables(records)
    assert list(found) == [patterns.GAINS, patterns.DOUBLINGS, "Forward", "Forward and backward"]
    assert found[patterns.GAINS] == [
        ["case", "pass", "implementation", "dense / this", "standard / this",
         "FlexAttention / this", "jax.nn XLA / this"],
        ["random-small", "forward", "torch block-sparse sm90", "7.50", "", "1.50", "OOM"],
        ["random-small", "forward", "jax block-sparse sm90", "", "", "1.20", "OOM"],
        ["dilated-64", "forward and backward", "torch dilated sm90", "", "1.50", "", ""],
        ["dilated-128", "forward and backward", "torch dilated sm90", "", "", "", ""],
    ]  # fmt: skip
    assert found[patterns.DOUBLINGS][1:] == [
        ["dilated", "forward and backward", "torch dilated sm90", "64", "2.10"]
    ]
    titles, first, *_, last = found["Forward"]
    assert titles == [
        "implementation", "pattern", "dtype", "batch", "length", "heads", "ms", "memory, MB",
        "tokens/s", "TFLOP/s", "status",
    ]  # fmt: skip
    assert first == ["torch block-sparse sm90", "random", "float32", "2", "300", "2", "2.00",
                     "3.00", "300000", "100", "ok"]  # fmt: skip
    assert (last[0], last[6:]) == ("jax.nn XLA", ["", "", "", "", "OOM"])
