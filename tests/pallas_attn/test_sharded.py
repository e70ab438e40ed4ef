import os
import subprocess
import sys

import pytest

from pallas_attn.targets import cuda_devices

FOUR = "--xla_force_host_platform_device_count=4"


def run(kind, implementation, **environment):
    script = [sys.executable, "-m", "tests.pallas_attn.sharded", kind, implementation]
    result = subprocess.run(
        script, capture_output=True, text=True, timeout=900, env=os.environ | environment
    )
    assert result.stdout.strip().endswith("ok"), result.stderr[-3000:]


@pytest.mark.parametrize(("kind", "implementation"), [("Auto", "triton"), ("Explicit", "None")])
def test_each_device_computes_its_own(kind, implementation):
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FOUR}"
    run(kind, implementation, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")


@pytest.mark.skipif(len(cuda_devices()) < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_two_cards(kind):
    run(kind, "None", CUDA_VISIBLE_DEVICES="0,1")
