"""Both frameworks train a small transformer by MeanFlow (Geng et al. 2025), with forward mode.

``python -m examples.mean_flow`` prints the loss before each step, the same in both. The model
learns the mean velocity u(z, r, t) of a flow between the times r and t: its target is
``v - (t - r) du/dt``, where du/dt is the tangent of u along (v, 0, 1), and has no gradient.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

# JAX would otherwise take most of a GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import torch

import pallas_attn
import torch_attn

BATCH, TOKENS, CHANNELS, HIDDEN, HEADS, HEAD_DIM, LAYERS = 4, 24, 8, 32, 2, 16, 2
STEPS, RATE = 4, 0.02
TOLERANCE = 1e-4  # of the losses, which are between 0 and 10
SHAPES = {
    "in": (CHANNELS, HIDDEN), "times": (4, HIDDEN), "qkv": (LAYERS, 3, HIDDEN, HEADS, HEAD_DIM),
    "heads": (LAYERS, HEADS, HEAD_DIM, HIDDEN), "up": (LAYERS, HIDDEN, HIDDEN),
    "down": (LAYERS, HIDDEN, HIDDEN), "out": (HIDDEN, CHANNELS),
}  # fmt: skip


def make_problem() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return weights, and a batch: samples, noise, and times r <= t."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, HIDDEN**-0.5, shape) for name, shape in SHAPES.items()}
    weights["in"] *= 2
    r, t = np.sort(rng.uniform(size=(2, BATCH)), 0)
    x, noise = rng.normal(size=(2, BATCH, TOKENS, CHANNELS))
    batch = {"x": np.cumsum(x, 1) / TOKENS**0.5, "noise": noise, "r": r, "t": t}
    return jax.tree.map(lambda x: x.astype(np.float32), (weights, batch))


def mean_velocity(xp: Any, attend: Callable[..., Any], weights: Any, z: Any, r: Any, t: Any) -> Any:
    """Return u [B, T, channels] in the framework `xp`, jax.numpy or torch."""
    times = xp.stack([xp.cos(3 * t), xp.sin(3 * t), xp.cos(3 * (t - r)), xp.sin(3 * (t - r))], -1)
    x = z @ weights["in"] + (times @ weights["times"])[:, None]
    for i in range(LAYERS):
        q, k, v = xp.einsum("bti,nihd->nbthd", x, weights["qkv"][i])
        x = x + xp.einsum("bthd,hdo->bto", attend(q, k, v), weights["heads"][i])
        x = x + xp.tanh(x @ weights["up"][i]) @ weights["down"][i]
    return x @ weights["out"]


def loss_of(
    u: Callable[..., Any], jvp: Callable[..., Any], stop: Callable[[Any], Any], batch: Any
) -> Any:
    """Return the MeanFlow loss of u(z, r, t); v is the flow's velocity at z."""
    r, t, v = batch["r"], batch["t"], batch["noise"] - batch["x"]
    z = batch["x"] + t[:, None, None] * v
    mean, rate = jvp(u, (z, r, t), (v, 0 * r, 0 * t + 1))
    target = v - (t - r)[:, None, None] * stop(rate)
    return ((mean - target) ** 2).mean()


def train_in_torch(weights: Any, batch: Any, device: str) -> list[float]:
    weights, batch = jax.tree.map(lambda x: torch.tensor(x, device=device), (weights, batch))
    weights, losses = {name: x.requires_grad_() for name, x in weights.items()}, []
    for _ in range(STEPS):
        u = partial(mean_velocity, torch, torch_attn.flash_attention, weights)
        loss = loss_of(u, torch.func.jvp, torch.Tensor.detach, batch)
        gradients = torch.autograd.grad(loss, [*weights.values()])
        with torch.no_grad():
            for x, dx in zip(weights.values(), gradients, strict=True):
                x -= RATE * dx
        losses.append(loss.item())
    return losses


def train_in_jax(weights: Any, batch: Any) -> list[float]:
    @jax.jit
    @jax.value_and_grad
    def step(weights: Any) -> jax.Array:
        u = partial(mean_velocity, jnp, pallas_attn.flash_attention, weights)
        return loss_of(u, jax.jvp, jax.lax.stop_gradient, batch)

    losses = []
    with jax.default_matmul_precision("highest"):  # as torch multiplies float32
        for _ in range(STEPS):
            loss, gradients = step(weights)
            weights = jax.tree.map(lambda x, dx: x - RATE * dx, weights, gradients)
            losses.append(float(loss))
    return losses


def train_in_both(device: str) -> dict[str, list[float]]:
    """Return the losses of each: torch on `device`, JAX on its default device."""
    weights, batch = make_problem()
    return {
        "torch": train_in_torch(weights, batch, device),
        "jax": train_in_jax(*jax.tree.map(jnp.asarray, (weights, batch))),
    }


def main() -> int:
    print("loss before each step, the same in both:", flush=True)
    losses = train_in_both("cuda" if torch.cuda.is_available() else "cpu")
    for name, values in losses.items():
        print(f"{name:6}", *(f"{x:.6f}" for x in values))
    return 0 if np.allclose(losses["torch"], losses["jax"], rtol=0, atol=TOLERANCE) else 1


if __name__ == "__main__":
    sys.exit(main())
