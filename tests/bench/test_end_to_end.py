import io
from dataclasses import replace

import pytest
from rich.console import Console

from bench import __main__ as command
from bench.job import Entry
from bench.records import Record, load
from bench.report.tables import status
from bench.report.training import phases
from bench.runner import Instruments, run_suite
from bench.sampling import Sampler
from bench.suites import end_to_end
from bench.training.case import PHASES, TrainingCase
from bench.training.job import TrainingJob
from bench.training.steps import OPERATIONS, REPEATS, WARMUPS, mean_after, observe
from models.config import make_config
from tests.bench.conftest import ORIGIN, raises

CASE = TrainingCase("tiny", 2, 64)
OURS, EAGER, SDPA = Entry("torch twin", "sm90"), Entry("torch eager"), Entry("torch sdpa")
COMPILATION = 1000.0


class Fake:
    def __init__(self, unit=1.0):
        self.unit = unit
        self.first = True

    def time_step(self):
        extra, self.first = COMPILATION * self.first, False
        times = {name: extra + i * self.unit for i, name in enumerate(PHASES, 1)}
        return times | {"step": sum(times.values())}

    def memory(self):
        return 500, dict(zip(OPERATIONS, (1000, 3000, 2000, 3000), strict=True))


def job(subject=OURS, begin=Fake, case=CASE):
    return TrainingJob(case, subject, begin, observe, OPERATIONS)


def run(*jobs, **options):
    console = Console(file=io.StringIO(), width=200)
    instruments = Instruments(lambda calls: {}, print, lambda: Sampler(None), lambda: None)
    origin = ORIGIN | {"suite": "end-to-end", "device": "NVIDIA H200 (fake)"}
    assert run_suite(jobs, origin, instruments, console, **options) == 0
    return console.file.getvalue()


@pytest.fixture
def records(tmp_path) -> list[Record]:
    """Ours, two peers of which one is out of memory, and a peer that is absent."""
    path = tmp_path / "records.jsonl"
    oom = raises(RuntimeError("CUDA out of memory.\nTried"))
    absent = raises(NotImplementedError("attention: expected a CUDA device"))
    others = job(SDPA, lambda: Fake(2.0)), job(EAGER, oom), job(Entry("jax cudnn"), absent)
    run(job(), *others, path=path)
    return load(path)


def test_flops_are_those_of_the_model():
    # 256 x 32 of the head; in each of two layers q, k, v, o, and three of the MLP; norms.
    weights = 256 * 32 + 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 128 + 2 * 32) + 32
    pairs = 2 * 2 * 64 * 65 // 2  # of each layer: sequences, heads, and what the mask keeps
    forward = 2 * weights * 2 * 64 + 2 * 4 * 16 * pairs
    counted = [CASE.flops(operation) for operation in OPERATIONS]
    assert counted == [forward, 2 * forward, 0, 3 * forward]


def test_a_mean_leaves_out_its_warmup():
    steps = [100.0, 1.0, 3.0]
    assert mean_after(steps, 1) == (2.0, pytest.approx(2**0.5))
    assert mean_after(steps, 0)[0] == pytest.approx(104 / 3)
    assert mean_after(steps, 2) is None
    assert mean_after([0.0] * REPEATS + [100.0], 0) == (0.0, 0.0)


def test_records_keep_every_step(records):
    ours = {r.operation: r for r in records if r.label == "torch twin sm90"}
    assert tuple(ours) == OPERATIONS
    backward = ours["backward"]
    assert backward.steps == (COMPILATION + 2.0, *[2.0] * (WARMUPS[-1] + REPEATS - 1))
    assert backward.times.median == 2.0
    assert backward.tflops == pytest.approx(CASE.flops("backward") / 2e-3 / 1e12)
    assert ours["optimizer"].tflops is None
    assert [r.memory for r in ours.values()] == [1000, 3000, 2000, 3000]
    assert [r.held for r in ours.values()] == [500, None, None, None]


def test_what_has_no_time_says_why(records):
    texts = {r.label: status(r) for r in records}
    assert texts == {
        "torch twin sm90": "ok", "torch sdpa": "ok", "torch eager": "OOM",
        "jax cudnn": "absent (attention: expected a CUDA device)",
    }  # fmt: skip
    assert [row[-1] for row in phases(records)] == ["status", *texts.values()]
    error = replace(records[-1], status="failed", message="ValueError: no")
    assert status(error) == "error (ValueError: no)"


def test_it_runs_on_a_cpu(monkeypatch, tmp_path):
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    monkeypatch.setattr(end_to_end, "ATTENTIONS", {"torch": ("eager", "flex"), "jax": ("xla",)})
    monkeypatch.setattr(end_to_end, "COMPILED", ())
    config = make_config("tiny", num_layers=1)
    monkeypatch.setattr(TrainingCase, "config", config)
    path = tmp_path / "records.jsonl"
    options = ["--device", "cpu", "--filter", CASE.name, "--json", str(path)]
    assert command.main(["end-to-end", *options]) == 0
    found = {(r.label, r.operation): r for r in load(path)}
    for label in ("torch eager", "jax xla"):
        for operation in OPERATIONS:
            assert found[label, operation].status == "ok"
            assert len(found[label, operation].steps) >= WARMUPS[-1] + 2
    assert "expected a CUDA device for 'flex'" in found["torch flex", "step"].message
    saved, forward, step = (
        found["jax xla", "forward"].held, found["jax xla", "forward"].memory,
        found["jax xla", "step"].memory,
    )  # fmt: skip
    parameters = 4 * config.num_parameters
    assert 0 < saved < forward
    assert step > 3 * parameters
