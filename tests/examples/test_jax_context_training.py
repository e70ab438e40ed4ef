import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from examples.jax_context_training import STEPS, TOLERANCE

ROOT = Path(__file__).resolve().parents[2]


def test_four_devices_have_the_losses_of_one():
    command = [sys.executable, "-m", "examples.jax_context_training"]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    alone, together = (np.array(line.split()[2:], float) for line in run.stdout.splitlines()[1:])
    assert len(alone) == STEPS
    assert alone[0] > alone[1]
    np.testing.assert_allclose(together, alone, rtol=0, atol=TOLERANCE)
