"""Training with devices that share documents, in JAX."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples import jax_context_training
from examples.jax_context_training import SIZE, STEPS, TOLERANCE

ROOT = Path(__file__).resolve().parents[2]


def test_four_devices_have_the_losses_of_one():
    command = [sys.executable, "-m", "examples.jax_context_training"]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    alone, together = (np.array(line.split()[2:], float) for line in run.stdout.splitlines())
    assert len(alone) == STEPS
    assert alone[0] > alone[1]
    np.testing.assert_allclose(together, alone, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("other", "code"), [(0, 0), (1, 1)])
def test_the_command_prints_the_losses_and_says_whether_they_agree(
    other, code, monkeypatch, capsys
):
    monkeypatch.setattr(jax_context_training.jax.config, "update", lambda name, value: None)
    monkeypatch.setattr(jax_context_training.jax, "make_mesh", lambda *args, **kwargs: None)
    monkeypatch.setattr(jax_context_training, "train_on_one_device", lambda: [2.0, 1.0])
    monkeypatch.setattr(jax_context_training, "train_on_devices", lambda mesh: [2.0, 1.0 + other])
    assert jax_context_training.main() == code
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed] == [["one", "device"], [f"{SIZE}", "devices"]]
