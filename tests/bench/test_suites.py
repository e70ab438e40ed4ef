import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from bench import ours, problems
from bench.job import Call, Entry
from bench.peers import DECODE, FLASH, PACKED, SCORES, SPARSE, TANGENTS, TREE
from bench.problems import SparseCase, attention_job, attention_tensors, decode_job, decode_tensors
from bench.records import YARDSTICKS, Times, append
from bench.records import load as read
from bench.registry import ON_CPU, SUITES, cells, load
from bench.report.plots import of_suite
from bench.report.sections import SPEEDS, sections
from bench.report.tables import names
from bench.suites import context, eager, jvp, kvcache, packed, patterns, prefill, ranges, tree
from twin_attention.contract.cost import forward_flops
from twin_attention.interop.parity import torch_calls
from twin_attention.interop.parity.cases import (
    DecodeCase,
    DilatedCase,
    FlashCase,
    PagedCase,
    VarlenCase,
)
from twin_attention.interop.parity.subjects.absent import Absent

TARGETS = ("sm90", "sm80")
KERNELS = [name for name in SUITES if name not in (*ON_CPU, "first")]


def jobs_of(suite, name=""):
    return [job for job in load(suite).jobs(TARGETS) if name in ("", job.case["name"])]


def both(*implementations):
    return {f"{name} {target}" for name in implementations for target in TARGETS}


def on_hopper(*implementations):
    return {f"{name} sm90" for name in implementations}


PORTABLE = ("torch triton", "jax triton")
EXPLICIT = ("torch gluon", "jax mosaic")
CHUNKS = [n for n in EXPLICIT if ours.has_chunks(n, prefill.cases()[0].spec, "sm90")]
NATIVE = on_hopper("jax mosaic", *PORTABLE, "torch triton graph") | set(DECODE)
DECODES = NATIVE | both("jax mosaic", *PORTABLE)
FOREIGN_DECODES = on_hopper("jax torch_triton")
TORCH_DECODES = on_hopper("torch triton", "torch triton graph")
HOST = on_hopper(*PORTABLE, "torch triton compiled")


@pytest.mark.parametrize(
    ("suite", "name", "subjects"),
    [
        ("flash", "32x512x32x64", both(*ours.NAMES, *ours.FOREIGN_NAMES) | set(FLASH)),
        ("flash", "4x3000x16-kv4x128-causal",
         on_hopper(*ours.NAMES, "jax gluon") - on_hopper("torch triton compiled")
         | {"FA2", "FA3", "FA4", "jax FA3", "cuDNN", "tokamax Mosaic"}),
        ("flash", "12-documents-32768x16x128-causal",
         on_hopper(*PORTABLE, *EXPLICIT, *ours.FOREIGN_NAMES)
         | {"FA2 varlen", "FA3 varlen", "FA4 varlen", "jax FA3 varlen", "cuDNN padded"}),
        ("fa2", "1x4096x4096-kv8",
         both(*PORTABLE, *EXPLICIT) - {"jax triton sm80"} | {"FA2", "cuDNN"}),
        ("float32", "tf32-d128-causal", both(*PORTABLE) | {"SDPA efficient"}),
        ("eager", "fp32-d64-2048", on_hopper(*PORTABLE) | {"eager", "SDPA", "jax.nn XLA"}),
        ("packed", "equal-16384-d128",
         both(*PORTABLE, *EXPLICIT, *ours.FOREIGN_NAMES, *YARDSTICKS.values()) | set(PACKED)),
        ("kvcache", "sweep-4096", TORCH_DECODES | set(DECODE)),
        ("kvcache", "128x4096-heads-32-32", DECODES | FOREIGN_DECODES),
        ("kvcache", "64x8192-heads-32-8-64-tokens-drafts", NATIVE),
        ("kvcache", "cascade-64x8704-heads-32-8-512-pages", NATIVE | on_hopper(
            *(f"{x} cascade" for x in (*PORTABLE, "torch triton graph")))),
        ("tree", "documents-16x1024-d128", set(TREE) | on_hopper(
            *(f"{x} {y}" for x in (*PORTABLE, *EXPLICIT, "jax gluon")
              for y in ("tree", "separate", "segments")))),
        ("ranges", "spans-256-d128", set(TREE) | on_hopper(
            *PORTABLE, *EXPLICIT, "jax gluon", "torch triton bias")),
        ("scores", "bias-1x4096", set(SCORES)
         | on_hopper(*PORTABLE, *EXPLICIT, "jax gluon")),
        ("jvp", "1x4096x16x64-causal", set(TANGENTS)
         | on_hopper(*PORTABLE, *EXPLICIT, "jax gluon")),
        ("prefill", "chunks-8x4096-page16", both(*PORTABLE) | on_hopper(*CHUNKS) | {"FlashInfer"}),
        ("prefill", "single-64x8192-page16", both(*PORTABLE) | {"FlashInfer"}
         | both(*(f"{name} paged_decode" for name in (*PORTABLE, "jax mosaic")))),
        ("patterns", "random-bf16-1x32768x16", set(SPARSE) | on_hopper(
            *(f"{x} {y}" for x in ("torch", "jax") for y in ("block-sparse", "dense", "module")))),
        ("patterns", "undilated-fp32-1x512x8", on_hopper(
            *(f"{x} {y}" for x in ("torch", "jax") for y in ("dilated", "standard")))),
        ("context", "lognormal-d128-4x8192-balanced", on_hopper(*context.RANKS, *(
            f"{x} {y}" for x in ("torch", "jax") for y in ("dense", "triton dense")))),
        ("host", "1x128x8x64-causal",
         HOST | on_hopper(*EXPLICIT, "jax gluon")
         | {"SDPA", "SDPA compiled", "FA2", "cuDNN", "jax.nn cuDNN"}),
        ("host", "2-sequences-1-split", HOST | FOREIGN_DECODES
         | on_hopper("jax mosaic") | {"FlashInfer"}),
    ],
)  # fmt: skip
def test_who_is_timed(suite, name, subjects):
    found = jobs_of(suite, name)
    assert found
    for job in found:
        assert {" ".join(filter(None, subject)) for subject in job.factories} == subjects


SLOW = {"FlexAttention", "jax.nn XLA", "jax Pallas mha", "tokamax Triton"}
SLOW |= both("torch triton compiled", "jax torch_triton")


@pytest.mark.parametrize(
    ("suite", "name", "absent"),
    [
        ("flash", "4x4096x16x128", set()),
        ("flash", "4x4096x32x64", SLOW),
        ("flash", "1x16384x16x128",
         SLOW | {"eager", "jax.nn cuDNN", "jax triton sm80", "jax gluon sm80"}),
        ("patterns", "random-bf16-1x131072x16",
         on_hopper("torch dense", "torch module", "jax block-sparse", "jax dense", "jax module")
         | set(SPARSE)),
    ],
)  # fmt: skip
def test_what_takes_too_long_is_absent_and_says_where_it_is_timed(suite, name, absent):
    for job in jobs_of(suite, name):
        makers = {" ".join(filter(None, s)): make for s, make in job.factories.items()}
        left_out = {name: make for name, make in makers.items() if make.func is problems.absent}
        assert left_out.keys() == absent
        for make in left_out.values():
            with pytest.raises(Absent, match=r"^timed at \d+"):
                make([])


@pytest.mark.parametrize("suite", SUITES)
def test_no_job_is_there_twice_and_what_has_no_time_has_cells_as_well(suite, record):
    origin = {name: getattr(record(), name) for name in ("device", "versions", "commit", "date")}
    plans = (job.plan(origin | {"suite": suite}).values() for job in jobs_of(suite))
    planned = [x for plan in plans for x in plan]
    assert len({x.key for x in planned}) == len(planned) > 0
    for x in planned:
        assert "TFLOP/s" not in (found := cells(load(suite).COLUMNS, x)) or not found["TFLOP/s"]


def test_documents_are_the_same_every_time_and_fill_their_tokens():
    found = {case.name: [n for n, _ in case.lengths] for case in packed.cases()}
    assert {name: sum(lengths) for name, lengths in found.items()} == {
        name: int(name.split("-")[1]) for name in found
    }
    assert set(found["equal-16384-d64"]) == {1024}
    assert found["lognormal-65536-d64"][:3] == [199, 2575, 529]  # whatever the version of Python
    for case in packed.cases():  # the yardstick has as many pairs, or nearly
        dense = forward_flops(packed.dense_case(case).spec)
        (job, _) = jobs_of("packed", case.name)
        assert dense == pytest.approx(job.flops, rel=1e-3)


CHUNK_PAIRS = 8 * 32 * sum(range(4096 - 511, 4097))
CHUNK_BYTES = (
    2 * 2 * 8 * 512 * 32 * 128  # q and out
    + 2 * 2 * 8 * 4096 * 8 * 128  # keys and values
    + 4 * 8 * 512 * 32  # log-sum-exps
    + 4 * (8 * 4096 // 16 + 8 + 9)  # tables, lengths, offsets
)
DECODE_BYTES = 2 * (64 * 4 * 32 * 128 * 2) + 2 * 64 * 1024 * 8 * 128 * 2
DECODE_BYTES += 4 * (64 * 64 + 64) + 64 * 4 * 32 * 4


@pytest.mark.parametrize(
    ("suite", "name", "operation", "flops", "num_bytes"),
    [
        ("packed", "equal-16384-d128", "forward", 4 * 2048 * 16 * 1024 * 1025 // 2,
         4 * 2 * 2048 * 16384 + 4 * 16 * 16384),
        ("tree", "tree-8192-16x1024-d128", "forward", 4 * 128 * 16 * (
            8192 * 8193 // 2 + 16 * (8192 * 1024 + 1024 * 1025 // 2)), None),
        ("ranges", "prefix-2048-d128", "forward",
         4 * 2048 * (8192 * 8193 // 2 + 2048 * 2047 // 2), None),
        ("ranges", "diffusion-32-d128", "forward",
         4 * 2048 * 32 * 32 * (128 + 128 * 127 // 2 + 128 * 129 // 2), None),
        ("prefill", "chunks-8x4096-page16", "forward", 4 * 128 * CHUNK_PAIRS, CHUNK_BYTES),
        ("kvcache", "64x1024-heads-32-8-4-tokens", "decode", None, DECODE_BYTES),
        ("context", "causal-d128-4x8192-zigzag", "forward",
         4 * 128 * 16 * 32768 * 32769 // 2 // 4, 0),
    ],
)  # fmt: skip
def test_the_cost_is_of_the_pairs_that_are_seen(suite, name, operation, flops, num_bytes):
    (job,) = [job for job in jobs_of(suite, name) if job.operation == operation]
    assert flops in (None, job.flops)
    assert num_bytes in (None, job.bytes)
    assert job.reads is None or job.reads + job.writes == job.bytes


SMALL = FlashCase("small", 1, 32, 48, 2, 1, 16, causal=True)
PACKED_CASE = VarlenCase(
    "packed", tuple((n, n) for n in (5, 12, 1, 9)), (0, 0), heads_q=2, heads_kv=1, head_dim=16
)
SPARSE_CASE = SparseCase(
    "random-small", 2, 300, 300, 2, 2, 16, dtype="float32", tile_q=128, tile_kv=128, kept=0.6
)
DILATED_CASE = DilatedCase(
    "dilated-small", 2, 64, 64, 3, 3, 16, dtype="float32", segment_lengths=(16, 64),
    dilation_rates=(1, 4),
)  # fmt: skip
TREE_CASE = tree.tree_case(
    "tree-small", (-1, 0, 0, 2, 2, -1), (20, 13, 5, 2, 1, 9), 16, heads_q=2, heads_kv=1
)
ROOTS_CASE = tree.tree_case("roots", (-1,) * 3, (20, 1, 30), 16, heads_q=2, heads_kv=2)


def test_the_cost_of_a_small_problem():
    job = partial(attention_job, SMALL, factories={})
    forward, backward, both = map(job, ("forward", "backward", "both"))
    pairs = 2 * (32 * 16 + 32 * 33 // 2)  # query i sees i + 17 keys
    assert (forward.flops, backward.flops) == (4 * 16 * pairs, 10 * 16 * pairs)
    q, k, lse = 32 * 2 * 16 * 2, 48 * 16 * 2, 4 * 2 * 32
    assert (forward.bytes, backward.bytes) == (2 * q + 2 * k + lse, 4 * q + 4 * k + lse)
    assert both.flops == forward.flops + backward.flops
    assert both.bytes == forward.bytes + backward.bytes
    of_pattern = partial(patterns.job, target="sm90")
    kept = np.kron(SPARSE_CASE.tiles, np.ones((128, 128), bool))[:300, :300].sum()
    assert of_pattern(SPARSE_CASE, "forward").flops == 2 * 2 * 4 * 16 * kept
    assert of_pattern(SPARSE_CASE, "both").flops == 3.5 * 2 * 2 * 4 * 16 * kept
    # 4 segments of 16, and one of 64 of which 16 are kept.
    assert of_pattern(DILATED_CASE, "forward").flops == 2 * 3 * 4 * 16 * (4 * 16**2 + 16**2)


CHUNK_CASE = PagedCase(
    "chunks", lengths=(9, 40, 33), heads_q=4, heads_kv=2, head_dim=16, page_size=8, max_pages=5,
    new_tokens=(9, 20, 1),
)  # fmt: skip
DECODE_CASE = DecodeCase("decode", (5, 33), tokens=2, heads_kv=2, head_dim=16, page_size=8)


def of_segments(job):
    """Leave out what a tree has as well."""
    factories = {x: make for x, make in job.factories.items() if "segments" in x.implementation}
    return replace(job, factories=factories)


SMALL_JOBS = {
    "flash both": lambda: attention_job(SMALL, "both", ours.flash_factories(["sm80"])),
    "packed backward": lambda: attention_job(PACKED_CASE, "backward", packed.factories(["sm80"])),
    "random both": lambda: patterns.job(SPARSE_CASE, "both", "sm90"),
    "dilated both": lambda: patterns.job(DILATED_CASE, "both", "sm90"),
    "tree both": lambda: tree.job(TREE_CASE, "both", ["sm90"]),
    "roots": lambda: of_segments(tree.job(ROOTS_CASE, "forward", ["sm90"])),
    "ranges both": lambda: ranges.job(
        ranges.range_case("small", "diffusion", 7, 60, 2, 16), "both", ["sm90"]
    ),
    "tangents": lambda: jvp.job(SMALL, "jvp", ["sm90"]),
    "drafts": lambda: decode_job(DRAFTS, ours.decode_factories(["sm80"])),
    "latent": lambda: decode_job(LATENT, ours.decode_factories(["sm80"])),
    "context both": lambda: context.job(CONTEXT_CASE, "both", "sm90"),
    "shared": lambda: kvcache._shared_job(
        3, 128, 4, 2, 6, factories=ours.decode_factories(["sm90"])
    ),
    "chunks": lambda: decode_job(CHUNK_CASE, prefill.factories(CHUNK_CASE, ["sm80"])),
    "decode": lambda: decode_job(DECODE_CASE, ours.decode_factories(["sm80"])),
    "host both": lambda: jobs_of("host", "1x128x8x64-causal")[1],
    "host chunks": lambda: jobs_of("host", "2-chunks")[0],
    "eager": lambda: jobs_of("eager", "fp32-d16-128")[0],
}
CONTEXT_CASE = context.ContextCase(
    "lognormal-small", 1, 48, 48, 2, 1, 16, causal=True, ranks=3, sharding="balanced",
    documents=(20, 17, 11),
)  # fmt: skip
DRAFTS = replace(DECODE_CASE, name="drafts", lengths=(9, 33), tokens=7, tree="drafts")
LATENT = DecodeCase("latent", (9, 33), 1, 4, 1, 32, 16, page_size=16, latent=True)
ON_A_GPU = {"FA2", "cuDNN", "jax.nn cuDNN", "FlashInfer", "FlexAttention"}
ON_A_GPU |= {f"{x} {y}" for x in ("torch", "jax") for y in ("ring", "gather")}  # on several
ON_A_GPU |= {"jax dense", "jax triton dense"}


@pytest.mark.parametrize("name", SMALL_JOBS)
def test_our_calls_are_right_every_time_and_the_gate_sees_what_is_wrong(name, monkeypatch):
    real = torch_calls.compiled
    monkeypatch.setattr(torch_calls, "compiled", partial(real, backend="eager"))
    monkeypatch.setattr(patterns, "AT_LENGTHS", {})
    monkeypatch.setattr(eager, "JAX_LENGTHS", {16: (128,), 32: (), 64: ()})
    job = SMALL_JOBS[name]()
    tensors = job.inputs("cpu")
    check, ran = job.check(tensors), set()
    for subject, factory in job.factories.items():
        words = set(subject.implementation.split())
        is_peer = subject.target is None and not name.startswith(("host", "eager"))
        if (
            is_peer
            or subject.implementation in ON_A_GPU
            or words & {"gluon", "mosaic", "torch_triton"}
        ):
            continue
        call = factory(tensors)
        ran.add(subject)
        for _ in range(2):
            result = call.run()
        if call.result is None:
            assert words & {"dense", "module"}
            continue
        arrays = call.result(result)
        assert check(arrays) <= 1, subject
        for wrong in range(len(arrays)):
            assert check([x + (i == wrong) for i, x in enumerate(arrays)]) > 1, subject
    assert len(ran) >= 2


@pytest.mark.parametrize(
    ("module", "case", "name"),
    [
        (patterns, SPARSE_CASE, "torch dense"),
        (patterns, SPARSE_CASE, "jax module"),
        (packed, PACKED_CASE, "torch triton dense"),
    ],
)
def test_what_computes_something_else_is_checked_by_itself(monkeypatch, module, case, name):
    monkeypatch.setattr(patterns, "AT_LENGTHS", {})
    monkeypatch.setattr(module, "attention_check", lambda *_: lambda arrays: 2.0)
    if module is packed:
        factory = partial(packed.factories(["sm90"])[Entry(name, "sm90")], case, "forward")
    else:
        factory = patterns.job(case, "forward", "sm90").factories[Entry(name, "sm90")]
    with pytest.raises(ValueError, match="its error is 2 times the budget"):
        factory(attention_tensors(case, "cpu"))


def test_an_append_is_checked_where_it_writes():
    (job,) = jobs_of("host", "2-sequences")
    tensors = job.inputs("cpu")
    check = job.check(tensors)
    assert check([tensors.k_pages, tensors.v_pages]) > 1
    (factory,) = job.factories.values()
    call = factory(tensors)
    pools = call.result(call.run())
    page, slot = tensors.block_tables[1, 119 // 16], 119 % 16
    assert torch.equal(pools[0][page, slot], tensors.q[1])
    for x in pools:
        assert check(pools) == 0
        x[page, slot, 7, 63] += 1
        assert check(pools) > 1
        x[page, slot] = tensors.q[1]


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


def test_the_pool_does_not_grow_with_the_capacity_and_unused_slots_are_poisoned():
    case = DecodeCase("case", lengths=(100, 100), tokens=1, page_size=16, max_pages=64)
    tensors = decode_tensors(case, "cpu")
    used = tensors.block_tables[:, :7]
    assert tensors.block_tables.shape == (2, 64)
    assert (tensors.block_tables[:, 7:] == -1).all()
    assert tensors.k_pages.shape == (17, 16, 2, 64)
    assert used.unique().numel() == 14
    assert (used.diff() != 1).any()
    assert tensors.k_pages.isnan().flatten(1).any(1).sum() == 5  # 3 spare ones, 2 that end early


@pytest.mark.parametrize(
    ("suite", "name", "wanted"),
    [
        ("flash", "4x4096x16x128-causal",
         {"B": 4, "causal": "yes", "TFLOP/s": 100.0, "host, us": 50.0}),
        ("fa2", "4x1024x4096-kv8", {"causal": "no", "SM clock, MHz": 1755.0, "power, W": 620.5}),
        ("eager", "d16-256", {"batch": 8, "saved, MB": 3.0, "memory, MB": 5.0}),
        ("packed", "lognormal-16384-d64", {"documents": 15, "tokens": 16384, "longest": 3209}),
        ("prefill", "mixed-64x8192-page16",
         {"sequences": 64, "chunks": 8, "new tokens": 8 * 512 + 56, "GB/s": 2000.0}),
        ("kvcache", "64x8192-heads-32-8-int8",
         {"heads": "32/8", "cache": "int8", "table, keys": 8192, "CPU time, us": 50.0,
          "CPU noise": "10.0%", "GPU time, us": 250.0, "GPU noise": "4.0%",
          "Gelem/s": pytest.approx(2 * 64 * 8192 * 8 * 128 / 0.25e-3 / 1e9)}),
        ("kvcache", "64x8192-heads-32-8-64-tokens-drafts", {"T": 64, "tree": "drafts"}),
        ("tree", "tree-8192-16x1024-d128",
         {"tokens": 24576, "heads": 16, "memory, MB": 5.0, "10^12 pairs/s": pytest.approx(
             16 * (8192 * 8193 // 2 + 16 * (8192 * 1024 + 1024 * 1025 // 2)) / 0.25e-3 / 1e12)}),
        ("context", "lognormal-d128-4x8192-balanced",
         {"ranks": 4, "tokens of a rank": 8192, "layout": "balanced", "documents": 28, "D": 128}),
    ],
)  # fmt: skip
def test_cells(record, suite, name, wanted):
    measured = record(
        times=Times(0.25, 0.2, 0.3, 0.24, 0.26), host=Times(0.05, 0.05, 0.05, 0.04, 0.05),
        held=3_000_000, memory=5_000_000, bytes_per_second=2e12,
        gpu={"sm_mhz": 1755.0, "watts": 620.5},
    )  # fmt: skip
    found = cells(load(suite).COLUMNS, replace(measured, case=jobs_of(suite, name)[0].case))
    assert found | wanted == found


def records_of(suite, record, path):
    made = [
        record(
            suite=suite, operation=job.operation, implementation=subject.implementation,
            target=subject.target, times=Times(3.0, 3.0, 3.0), tflops=job.flops / 3e9 or None,
            bytes_per_second=job.bytes / 3e-3 or None,
        )
        for job in jobs_of(suite)
        for subject in job.factories
    ]  # fmt: skip
    cases = [job.case for job in jobs_of(suite) for _ in job.factories]
    found = [replace(r, case=case) for r, case in zip(made, cases, strict=True)]
    found[0] = replace(found[0], status="failed", message="RuntimeError: no", times=None)
    append(path, found)
    return read(path)


@pytest.mark.parametrize("suite", KERNELS)
def test_a_page_tells_cases_apart_and_shows_what_failed(suite, record, tmp_path):
    records = records_of(suite, record, tmp_path / "records.jsonl")
    apart = names(records)[1]
    assert len(set(apart.values())) == len(apart) or suite == "kvcache"
    (section,) = sections(records)
    assert section.title == SUITES[suite].title
    titles, failed, *_ = section.every
    assert failed[titles.index("status")] in ("failed", "error (RuntimeError: no)")
    if suite in ("patterns", "tree", "ranges", "context", "scores"):
        first = getattr(load(suite), "SHARES" if suite in ("context", "scores") else "GAINS")
        assert next(iter(section.tables)) == first
    else:
        assert not any("dense sm90" in row[1] for row in section.tables[SPEEDS][1:])
        assert section.tables["Without a time"][1][2:4] == ["failed", "RuntimeError: no"]
    if suite == "host":  # nothing of the device
        assert not any("TFLOP/s" in heading for heading in section.tables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as a layout that does not fit its figure
        few = [r for r in records if r.target != "sm80"]
        assert list(of_suite(few, section.peaks))
