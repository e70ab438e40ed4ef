"""Models of transformers train and generate as their judge does."""

import sys

import pytest

from bench import __main__ as command
from bench.records import load
from bench.suites import hugging_face
from twin_attention.interop.parity.subjects.absent import Absent


def test_a_model_runs_on_a_cpu(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "records.jsonl"
    options = ["--device", "cpu", "--filter", "T5", "--only", "twin", "--json", str(path)]
    assert command.main(["hugging-face", *options]) == 0
    found = {r.operation: r for r in load(path)}
    assert found.keys() == {"generate", "step"}
    assert found["generate"].judged == 1
    assert found["step"].judged < 0.01


def test_without_transformers_models_are_absent(monkeypatch):
    monkeypatch.delitem(sys.modules, "bench.training.programs", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Absent, match=r"^transformers: "):
        hugging_face.jobs([None])[0].start()
