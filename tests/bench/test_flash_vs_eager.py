"""What `python -m bench flash-vs-eager` times, and a case of it without a GPU."""

from dataclasses import replace

from bench.job import Subject
from bench.report.limits import limits
from bench.report.tables import every
from bench.statistics import Times
from bench.suites import flash_vs_eager
from bench.suites.flash_job import flash_tensors
from bench.suites.flash_vs_eager import columns, jobs
from interop.parity.cases import FlashCase

TORCH = {Subject("torch triton", "sm90"), Subject("eager"), Subject("SDPA")}
JAX = {Subject("jax triton", "sm90"), Subject("jax.nn XLA")}


def test_every_operation_of_every_case():
    found = jobs(["sm90", "sm80"])
    cases = {tuple(job.case[n] for n in ("dtype", "head_dim", "seq_q")) for job in found}
    lengths = [128 << n for n in range(9)]
    assert {length for dtype, d, length in cases if (dtype, d) == ("float32", 64)} == set(lengths)
    assert {(dtype, d) for dtype, d, _ in cases} == {
        (dtype, d) for dtype in ("bfloat16", "float32") for d in (16, 32, 64)
    }
    assert [job.operation for job in found] == ["forward", "backward", "both"] * len(cases)
    for job in found:
        assert (job.case["batch"], job.case["heads_q"], job.case["causal"]) == (1, 1, True)
        assert job.case["seq_kv"] == job.case["seq_q"]


def test_jax_compiles_at_few_lengths_of_every_head_size():
    with_jax = set()
    for job in jobs(["sm90", "sm80"]):
        assert set(job.makers) in (TORCH, TORCH | JAX)
        if set(job.makers) > TORCH:
            with_jax.add((job.case["head_dim"], job.case["seq_q"]))
    assert with_jax == {(16, 2048), (32, 2048), (64, 2048), (64, 32768)}


def test_a_filter_is_part_of_a_name():
    assert {job.case["name"] for job in jobs(["sm80"], "fp32-d16-20")} == {"fp32-d16-2048"}


def test_every_implementation_passes_its_gate(monkeypatch):
    monkeypatch.setattr(flash_vs_eager, "JAX_LENGTHS", {16: (128,)})
    *_, job = jobs(["sm90"], "fp32-d16-128")
    assert job.operation == "both"
    assert set(job.makers) == TORCH | JAX
    tensors = flash_tensors(FlashCase(**job.case), "cpu")
    check = job.check(tensors)
    for subject, make in job.makers.items():
        call = make(tensors)
        assert check(call.result(call.run())) < 1, subject


def test_the_table_shows_speed_ups(record):
    case = jobs(["sm90"], "bf16-d64-128")[0].case
    fast = replace(record(), case=case)
    eager = replace(fast, implementation="eager", target=None, times=Times(5.0, 4.9, 5.1))
    failed = replace(fast, implementation="SDPA", target=None, status="failed", times=None)
    titles, *rows = every([fast, eager, failed], columns, limits([fast]))
    assert [row[titles.index("eager / this")] for row in rows] == ["2.50", "1.00", ""]


def test_columns(record):
    case = jobs(["sm90"], "bf16-d64-128")[0].case
    found = columns(replace(record(), case=case))
    assert found == {"length": 128, "d": 64, "dtype": "bfloat16"}
