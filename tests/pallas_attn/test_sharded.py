import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding

from pallas_attn import flash_attention
from pallas_attn.targets import cuda_devices

FOUR = "--xla_force_host_platform_device_count=4"


def run(*kinds, **environment):
    script = [sys.executable, "-m", "tests.pallas_attn.sharded", *kinds]
    result = subprocess.run(
        script, capture_output=True, text=True, timeout=900, env=os.environ | environment
    )
    assert result.stdout.strip().endswith("ok"), result.stderr[-3000:]


def test_each_device_computes_its_own():
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FOUR}"
    run("Auto=triton", "Explicit=None", XLA_FLAGS=flags, JAX_PLATFORMS="cpu")


def test_explicit_axes_of_one_device():
    def attend(q):
        k = q[:, :, :1]
        return flash_attention(q, k, k, causal=True, implementation="triton")

    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    q = jax.random.normal(jax.random.key(0), (2, 8, 2, 16))
    placed = jax.device_put(q, NamedSharding(mesh, jax.P("data", None, "model", None)))
    for function in (attend, jax.grad(lambda q: attend(q).sum())):
        found = function(placed)
        assert found.sharding == placed.sharding
        assert jnp.allclose(found, function(q), atol=1e-5)


@pytest.mark.skipif(len(cuda_devices()) < 2, reason="needs two NVIDIA GPUs")
def test_two_cards():
    run("Auto=None", "Explicit=None", CUDA_VISIBLE_DEVICES="0,1")
