import importlib
import json
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "setup_env.py"


@pytest.mark.skipif(sys.platform == "win32", reason="the fake Python is a shell script")
def test_an_active_environment_is_not_made_from_itself(tmp_path):
    """In an activated .venv `make` finds its Python first; the one that made it has to run."""
    environment, python = tmp_path / "env", tmp_path / "python"
    venv.create(environment, symlinks=True)
    python.write_text('#!/bin/sh\necho "asked: $@"\n')
    python.chmod(0o755)
    stamp = environment / "twin-attention.json"
    stamp.write_text(json.dumps({"key": "of another time", "extras": [], "python": str(python)}))
    arguments = [str(SCRIPT), "--venv", str(environment), "test"]
    active = str(environment / "bin" / "python")
    run = subprocess.run([active, *arguments], capture_output=True, text=True, timeout=60)
    assert run.stdout == f"asked: {' '.join(arguments)}\n", run.stderr
    assert stamp.exists()


def test_an_environment_of_somebody_else_stays(tmp_path):
    environment = tmp_path / "env"
    venv.create(environment, symlinks=True)
    (environment / "kept").touch()
    command = [sys.executable, str(SCRIPT), "--venv", str(environment), "test"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "holds an environment that this has not made" in run.stderr
    assert (environment / "kept").exists()


@pytest.mark.parametrize("driver", [None, "/usr/bin/nvidia-smi"], ids=["cpu", "gpu"])
def test_without_a_gpu_pytorchs_cpu_build_is_tried_first(driver, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    setup_env, runs = importlib.import_module("setup_env"), []

    def run(command, **_):
        runs.append(command)
        return SimpleNamespace(returncode=int(setup_env.CPU_INDEX in command))  # out of reach

    monkeypatch.setattr(setup_env, "which", lambda name: driver)
    monkeypatch.setattr(setup_env.subprocess, "run", run)
    setup_env.install_pinned(
        tmp_path, SCRIPT.with_name("constraints-py312.txt"), ["torch>=2.11", "rich>=13"]
    )
    *first, last = runs
    assert [command[-1] for command in first] == ["torch"] * (driver is None)
    assert last[-2:] == ["torch>=2.11", "rich>=13"]
