import json
import subprocess
import sys
import venv
from pathlib import Path

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
