import pytest
import torch

from bench.job import Entry
from bench.records import load
from bench.registry import cells
from bench.report.tables import to_csv
from bench.suites import memory
from bench.training.case import PHASES, TrainingCase
from bench.training.job import TrainingJob
from bench.training.timeline import (
    CATEGORIES,
    Event,
    Owned,
    add_point,
    empty_timeline,
    peak,
    shortened,
    timeline_of,
    totals,
)
from bench.training.torch_memory import events_of
from bench.training.torch_training import TorchTraining
from tests.bench.conftest import raises
from tests.bench.test_end_to_end import Fake, run

TRACE = [
    {"action": "segment_alloc", "addr": 0x1000, "size": 2**21, "stream": 0},
    {"action": "alloc", "addr": 0x1000, "size": 64, "stream": 0},
    {"action": "free_requested", "addr": 0x1000, "size": 64, "stream": 0},
    {"action": "free_completed", "addr": 0x1000, "size": 64, "stream": 0},
]
PARAMETER, MOMENT, TOKENS, A, B, C = range(1, 7)
OWNED = Owned(parameters={PARAMETER: 10}, optimizer={MOMENT: 20}, gradients={C: 10})
START = {PARAMETER: 10, MOMENT: 20, TOKENS: 1}
EVENTS = {
    # A's address is first a temporary's, then an activation's.
    "forward": [Event(A, 100), Event(A, -100), Event(A, 40), Event(B, 7), Event(B, -7)],
    # A gradient stays; what was at B is temporary; the activation ends. 99 began before.
    "backward": [Event(B, 5), Event(C, 10), Event(A, -40), Event(B, -5), Event(99, -3)],
    "optimizer": [Event(B, 8), Event(C, -10), Event(B, -8)],
}


def test_only_allocations_and_completed_frees_of_a_snapshot_count():
    assert events_of(TRACE) == [Event(0x1000, 64), Event(0x1000, -64)]


def test_categories_of_a_handmade_step():
    timeline = timeline_of(START, EVENTS, OWNED)
    phases = [*["forward"] * 6, *["backward"] * 4, *["optimizer"] * 3]
    assert timeline["phase"] == phases
    assert set(timeline["parameters"]) == {10}
    assert set(timeline["optimizer state"]) == {20}
    assert timeline["saved activations"] == [0, 0, 0, *[40] * 5, *[0] * 5]
    assert timeline["gradients"] == [*[0] * 7, *[10] * 4, 0, 0]
    assert timeline["other"] == [1, 101, 1, 1, 8, 1, 6, 6, 6, 1, 9, 9, 1]
    assert totals(timeline)[0] == 31
    assert peak(timeline) == {
        "parameters": 10, "optimizer state": 20, "gradients": 0, "saved activations": 0,
        "other": 101,
    }  # fmt: skip


def test_a_shortened_timeline_keeps_the_peak_and_every_phase():
    timeline = timeline_of(START, EVENTS, OWNED)
    short = shortened(timeline, most=3)
    assert len(short["phase"]) < len(timeline["phase"])
    assert list(dict.fromkeys(short["phase"])) == list(PHASES)
    assert peak(short) == peak(timeline)
    assert shortened(timeline) == timeline


def test_a_step_of_torch_on_a_cpu():
    case = TrainingCase("tiny", 2, 64, "float32")
    training = TorchTraining(case, "eager", "cpu", compiled=False)
    training.time_step()
    timeline = training.timeline()
    parameters = 4 * case.config.num_parameters
    steps = 4 * len(training.parameters)  # a count of AdamW's for each
    assert set(timeline["parameters"]) == {parameters}
    assert set(timeline["optimizer state"]) == {2 * parameters + steps}
    assert max(timeline["gradients"]) == parameters
    assert timeline["gradients"][-1] == 0
    # Each layer keeps its softmax's weights, two heads of 64 x 64 for each sequence, and more.
    assert max(timeline["saved activations"]) > 2 * 4 * 2 * 2 * 64 * 64
    left = timeline["phase"].index("optimizer")
    assert timeline["saved activations"][left] == 0
    assert timeline["other"][left - 1] == 0
    before = torch.cat([p.detach().flatten() for p in training.parameters])
    training.timeline()  # a whole step: the parameters move
    after = torch.cat([p.detach().flatten() for p in training.parameters])
    assert not torch.equal(before, after)


@pytest.fixture
def records(tmp_path):

    class WithTimeline(Fake):
        def timeline(self):
            return timeline_of(START, EVENTS, OWNED)

    def job(name, begin):
        case = TrainingCase("tiny", 2, 64)
        return TrainingJob(case, Entry(name), begin, memory.observe, ("step",))

    path = tmp_path / "records.jsonl"
    oom = raises(RuntimeError("CUDA out of memory."))
    run(job("torch twin", WithTimeline), job("torch eager", oom), path=path)
    return load(path)


def test_a_record_keeps_the_timeline_and_its_peak(records):
    ours, eager = records
    assert ours.timeline == timeline_of(START, EVENTS, OWNED)
    assert ours.memory == 131
    assert len(ours.steps) == 3
    assert eager.status == "out of memory"
    (rows,) = memory.tables(records).values()
    assert rows[0] == ["case", "implementation", *CATEGORIES, "all", "status"]
    assert [row[-1] for row in rows] == ["status", "ok", "OOM"]
    assert cells(memory.COLUMNS, ours)["memory, MB"] == 131e-6
    assert "saved activations" not in to_csv(records)


def test_a_step_of_jax_is_what_its_programs_take(monkeypatch):
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    from bench.training.jax_training import JaxTraining

    training = JaxTraining.__new__(JaxTraining)
    training.params, training.moments = torch.zeros(5), torch.zeros(10)
    made = {"forward": torch.zeros(3), "backward": torch.zeros(2), "optimizer": torch.zeros(5)}
    for phase, result in made.items():
        monkeypatch.setattr(training, phase, lambda result=result: result)

    class Program:
        temporaries, results = 7, 20

    training.programs = dict.fromkeys(PHASES, Program)
    expected = empty_timeline()
    there = {"parameters": 20, "optimizer state": 40}
    for phase, rest in (
        ("forward", {}),
        ("forward", {"saved activations": 12, "other": 7}),
        ("forward", {"saved activations": 12}),
        ("backward", {"saved activations": 12, "gradients": 8, "other": 7}),
        ("backward", {"gradients": 8}),
        ("optimizer", {"gradients": 8, "other": 27}),
        ("optimizer", {}),
    ):
        add_point(expected, phase, there | rest)
    assert training.timeline() == expected
