import pytest
import torch

pytest.importorskip("flax")

import jax
import jax.numpy as jnp

from models import jax_attention, jax_model, torch_attention, torch_model
from models.config import make_config
from tests.models.pairs import TINY

MODERN = TINY["modern"]
NARROW = make_config("tiny", num_heads=4, num_heads_kv=4)


@pytest.mark.parametrize(
    ("side", "names"),
    [(torch_model, "twin, eager, sdpa, cudnn, flex"), (jax_model, "twin, cudnn, xla")],
    ids=["torch", "jax"],
)
def test_unknown_names(side, names):
    with pytest.raises(ValueError, match=f"attention: expected one of {names}, got 'flash'"):
        side.Transformer(MODERN, "flash")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them")
@pytest.mark.parametrize(
    ("side", "name", "dtype"),
    [
        (torch_model, "cudnn", torch.bfloat16), (torch_model, "flex", torch.bfloat16),
        (jax_model, "cudnn", jnp.bfloat16),
    ],
)  # fmt: skip
def test_attentions_of_a_gpu_alone(side, name, dtype):
    expected = f"attention: expected a CUDA device for '{name}', got cpu"
    with pytest.raises(NotImplementedError, match=expected):
        side.Transformer(MODERN, name, dtype=dtype)


@pytest.mark.parametrize("side", [torch_model, jax_model], ids=["torch", "jax"])
def test_head_dimensions_without_kernels(side):
    with pytest.raises(NotImplementedError, match="q: expected a head dimension from 16 to 512"):
        side.Transformer(NARROW, "twin")


def test_cudnn_takes_no_float32(monkeypatch):
    """As on a GPU, where the dtype is the first reason left."""
    message = "attention: expected float16 or bfloat16 for 'cudnn', got float32"
    with pytest.raises(NotImplementedError, match=message):
        torch_attention.choose_attention("cudnn", MODERN, torch.device("cuda"), torch.float32)

    class Device:
        platform = "gpu"

    monkeypatch.setattr(jax, "local_devices", lambda: [Device])
    with pytest.raises(NotImplementedError, match=message):
        jax_attention.choose_attention("cudnn", MODERN, jnp.float32)
