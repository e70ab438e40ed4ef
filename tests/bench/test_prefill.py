"""The jobs of `python -m bench prefill`, and its calls without a GPU."""

import warnings
from dataclasses import replace

import pytest

from bench import ours
from bench.job import Subject
from bench.problems import decode_job, decode_tensors
from bench.records import Times, append, load
from bench.report.plots import of_suite
from bench.report.sections import sections
from bench.suites import prefill
from bench.suites.prefill import cases, columns, jobs
from interop.parity.cases import PagedCase

TARGETS = ["sm90", "sm80"]
PORTABLE = {Subject(name, t) for name in ("torch triton", "jax triton") for t in TARGETS}
EXPLICIT = {
    Subject(name, "sm90")
    for name in ("torch gluon", "jax mosaic")
    if ours.has_chunks(name, cases()[0].spec, "sm90")
}
DECODE = {Subject(f"{name} paged_decode", t) for name, t in ours.decode_factories(TARGETS)}
SMALL = PagedCase(
    "small", lengths=(9, 40, 33), heads_q=4, heads_kv=2, head_dim=16, page_size=8, max_pages=5,
    new_tokens=(9, 20, 1),
)  # fmt: skip
SINGLE = replace(SMALL, name="single", new_tokens=(1, 1, 1))


def test_the_grid():
    *chunks, mixed, single = cases()
    assert [(c.page_size, c.lengths) for c in chunks] == [
        (page_size, (length,) * 8)
        for page_size in (16, 64)
        for length in (4096, 8192, 16384, 32768)
    ]
    assert all(case.new_tokens == (512,) * 8 for case in chunks)
    assert mixed.new_tokens == (512,) * 8 + (1,) * 56
    assert single.new_tokens == (1,) * 64
    assert mixed.lengths == single.lengths == (8192,) * 64
    assert len({case.name for case in cases()}) == 10
    for case in cases():
        assert (case.heads_q, case.heads_kv, case.head_dim, case.dtype) == (32, 8, 128, "bfloat16")
        assert case.max_pages * case.page_size == case.lengths[0]


def test_every_subject_and_paged_decode_beside_single_tokens():
    *found, single = jobs(TARGETS)
    for job in found:
        assert job.operation == "forward"
        assert set(job.factories) == PORTABLE | EXPLICIT | {Subject("FlashInfer")}
    assert single.operation == "decode"
    assert set(single.factories) == PORTABLE | {Subject("FlashInfer")} | DECODE
    assert [job.case["name"] for job in jobs(TARGETS, "8x4096")] == [
        "chunks-8x4096-page16", "chunks-8x4096-page64",
    ]  # fmt: skip


def test_the_cost():
    first = jobs(TARGETS, "chunks-8x4096-page16")[0]
    pairs = 8 * 32 * sum(range(4096 - 511, 4097))
    assert first.flops == 4 * 128 * pairs
    q, cache, lse = 2 * 8 * 512 * 32 * 128, 2 * 2 * 8 * 4096 * 8 * 128, 4 * 8 * 512 * 32
    ints = 8 * 4096 // 16 + 8 + 9
    assert first.bytes == 2 * q + cache + lse + 4 * ints


@pytest.mark.parametrize("case", [SMALL, SINGLE], ids=lambda case: case.name)
def test_our_calls_are_right_every_time_and_the_gate_sees_what_is_wrong(case):
    job = decode_job(case, prefill._factories(case, ["sm80"]))
    tensors = decode_tensors(case, "cpu")
    check = job.check(tensors)
    names = [name for name, target in job.factories if target and "mosaic" not in name]
    assert len(names) == (4 if case is SINGLE else 2)
    for name in names:
        call = job.factories[Subject(name, "sm80")](tensors)
        for _ in range(2):
            (out,) = call.result(call.run())
            assert out.shape == tensors.q.shape
            assert check([out]) <= 1, name
        assert check([out + 1]) > 1, name


def test_columns_tables_and_plots_of_its_records(record, tmp_path):
    found = [
        replace(
            record(), suite="prefill", case=job.case, operation=job.operation,
            implementation=name, target=target, times=Times(2.0, 1.9, 2.1), tflops=100.0,
            bytes_per_second=2e12,
        )
        for job in jobs(["sm90"])
        for name, target in job.factories
    ]  # fmt: skip
    append(tmp_path / "records.jsonl", found)
    records = load(tmp_path / "records.jsonl")
    mixed = next(r for r in records if r.case["name"].startswith("mixed"))
    assert columns(mixed) == {
        "sequences": 64, "chunks": 8, "new tokens": 8 * 512 + 56, "KV length": 8192, "page": 16,
        "TFLOP/s": 100.0, "GB/s": 2000.0,
    }  # fmt: skip
    (section,) = sections(records)
    forward, decode = (section.tables[x] for x in ("Forward, TFLOP/s", "Decode, GB/s"))
    assert forward[0][1:] == [
        *sorted(map(" ".join, EXPLICIT), reverse=True), "torch triton sm90", "jax triton sm90",
        "FlashInfer",
    ]  # fmt: skip
    assert "torch triton paged_decode sm90" in decode[0]
    assert (len(forward), len(decode)) == (10, 2)
    assert len({row[0] for row in forward}) == 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pictures = list(of_suite(records, section.peaks))
    titles = [picture.title for picture in pictures]
    assert [title.partition(" (")[0] for title in titles] == [
        "Forward: TFLOP/s over length", "Forward: TFLOP/s by case", "Forward: peer's time / ours",
        "Decode: GB/s by case", "Decode: peer's time / ours",
    ]  # fmt: skip
    panels = [axes.get_title(loc="left") for axes in pictures[0].figure.axes]
    assert panels == [
        f"D 128, 32/8 heads, 8 sequences, 4096 new tokens, pages of {size}, bfloat16"
        for size in (16, 64)
    ]
