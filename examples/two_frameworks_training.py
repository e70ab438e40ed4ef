"""One model trains in PyTorch and in JAX with the same kernels, in Gluon.

``python -m examples.two_frameworks_training`` gives both frameworks the same weights and text, and
prints the losses before each step. If a framework cannot launch the kernels, it prints why, and the
reference runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

# JAX would otherwise take most of a GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import pallas_attn
import torch_attn
from examples.text_model import DOCS, batches
from models import jax_model, torch_model
from models.config import ModelConfig
from models.weights import copy_to_jax

STEPS, RATE = 20, 0.05  # so the loss falls smoothly: weights rounded otherwise move it by 0.001
CONFIG = ModelConfig(256, 128, 256, num_layers=2, num_heads=2, num_heads_kv=1)
KERNELS = ("gluon", "reference")
TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}  # of the losses, from 5.6 to about 4


def choose(framework: str, q: Any, k: Any) -> str:
    """Return the first of `KERNELS` that a framework runs; print why others do not run.

    The framework is "jax" or "torch"; q and k are its tensors [B, S, heads, D].
    """
    api = {"jax": pallas_attn, "torch": torch_attn}[framework]
    for name in KERNELS:
        try:
            said = api.explain(api.flash_attention, q, k, k, causal=True, implementation=name)
        except NotImplementedError as error:
            print(f"{framework}: no {name}: {error}")
            continue
        if said.backward is None:  # it has the kernels of the gradients as well
            print(f"{framework}: {str(said).splitlines()[0]}")
            return name
        print(f"{framework}: no {name}: {said.backward}")
    raise AssertionError("the reference runs everywhere")


def train_in_torch(
    model: torch_model.Transformer, stretches: Iterable[np.ndarray]
) -> tuple[str, list[float]]:
    """Take a step of gradient descent on each batch [B, S + 1]; return what ran, and the losses
    before.
    """
    device, dtype = model.embed.weight.device, model.compute_dtype
    q, k = (
        torch.zeros(1, 64, heads, CONFIG.head_dim, device=device, dtype=dtype)
        for heads in (CONFIG.num_heads, CONFIG.num_heads_kv)
    )
    name = choose("torch", q, k)
    model.attend = partial(torch_attn.flash_attention, causal=True, implementation=name)
    losses = []
    for batch in stretches:
        loss = torch_model.next_token_loss(model, torch.tensor(batch, device=device))
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        with torch.no_grad():
            for x, dx in zip(model.parameters(), gradients, strict=True):
                x -= RATE * dx
        losses.append(loss.item())
    return name, losses


def train_in_jax(
    model: jax_model.Transformer, stretches: Iterable[np.ndarray], dtype: str
) -> tuple[str, list[float]]:
    """Do the same in JAX; dtype is the attention's."""
    q, k = (
        jnp.zeros((1, 64, heads, CONFIG.head_dim), dtype)
        for heads in (CONFIG.num_heads, CONFIG.num_heads_kv)
    )
    name = choose("jax", q, k)
    model.attend = partial(pallas_attn.flash_attention, causal=True, implementation=name)

    @nnx.jit
    def step(model: jax_model.Transformer, tokens: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(jax_model.next_token_loss)(model, tokens)
        weights = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda x, dx: x - RATE * dx, weights, gradients))
        return loss

    with jax.default_matmul_precision("highest"):  # as torch multiplies float32
        return name, [step(model, jnp.asarray(batch)).item() for batch in stretches]


def train_in_both(steps: int = STEPS) -> tuple[dict[str, list[float]], float]:
    """Train from the same weights on the same text.

    Return each framework's losses, by its name and its kernels', and how much they may differ.
    """
    on_gpu = torch.cuda.is_available()
    dtype = "bfloat16" if on_gpu else "float32"  # of Gluon's kernels, and of a CPU's
    torch.manual_seed(0)
    of_torch = torch_model.Transformer(
        CONFIG, device="cuda:0" if on_gpu else "cpu", compute_dtype=getattr(torch, dtype)
    )
    of_jax = jax_model.Transformer(CONFIG, compute_dtype=jnp.dtype(dtype))
    copy_to_jax(of_torch, of_jax)
    text = b"".join(page.read_bytes() for page in sorted(DOCS.glob("*.md")))
    stretches = [*batches(text, steps)]
    found = {}
    for framework, train in (
        ("torch", partial(train_in_torch, of_torch)),
        ("jax", partial(train_in_jax, of_jax, dtype=dtype)),
    ):
        name, losses = train(stretches=stretches)
        found[f"{framework} {name}"] = losses
    return found, TOLERANCE[dtype]


def main() -> int:
    print("loss before each step, in PyTorch and in JAX with the same kernels:", flush=True)
    losses, tolerance = train_in_both()
    for name, values in losses.items():
        print(f"{name:16}", *(f"{x:.4f}" for x in values))
    first, second = losses.values()
    return 0 if np.allclose(first, second, rtol=0, atol=tolerance) else 1


if __name__ == "__main__":
    sys.exit(main())
