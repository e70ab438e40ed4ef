"""Both frameworks update a policy by 16 continuations of a prompt: as a tree, and one by one.

``python -m examples.group_policy`` prints the loss of each step, the same four times. The tree has
the prompt only once.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

# JAX would otherwise take most of a GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
import torch

from examples.support import jax_group_policy, torch_group_policy
from examples.support.continuations import make_batches
from examples.support.toy_model import make_toy

STEPS, RATE, CLIP = 4, 0.5, 0.2
TOLERANCE = 1e-5  # of losses and gradients, whose largest are about 0.1


class Update(NamedTuple):
    """One training: its losses before each step, and each step's gradients by weight."""

    losses: list[float]
    gradients: list[dict[str, np.ndarray]]


def update_in_both(device: str, implementation: str | None = None) -> dict[str, Update]:
    """Return the steps of each training: torch on `device`, JAX on its default device."""
    weights, found = make_toy().weights, {}
    for kind, batch in zip(("tree", "separate"), make_batches(), strict=True):
        given = weights, batch
        options = STEPS, RATE, CLIP, implementation
        tensors = jax.tree.map(lambda x: torch.tensor(x, device=device), given)
        found[f"torch {kind}"] = torch_group_policy.train(*tensors, *options)
        arrays = jax.tree.map(jax.numpy.asarray, given)
        found[f"jax {kind}"] = jax_group_policy.train(*arrays, *options)
    return {name: _in_numpy(steps) for name, steps in found.items()}


def are_equal(updates: dict[str, Update]) -> bool:
    first, *others = updates.values()
    pairs = [(x.losses, first.losses) for x in others]
    for other in others:
        for a, b in zip(other.gradients, first.gradients, strict=True):
            pairs += [(a[name], b[name]) for name in b]
    return all(np.allclose(a, b, rtol=0, atol=TOLERANCE) for a, b in pairs)


def _in_numpy(steps: list) -> Update:
    losses = [loss for loss, _ in steps]
    gradients = [
        {name: np.asarray(x.cpu() if isinstance(x, torch.Tensor) else x) for name, x in dx.items()}
        for _, dx in steps
    ]
    return Update(losses, gradients)


def main() -> int:
    print("loss before each step; all four trainings must agree:", flush=True)
    updates = update_in_both("cuda" if torch.cuda.is_available() else "cpu")
    for name, update in updates.items():
        print(f"{name:16}", *(f"{x:.6f}" for x in update.losses))
    return 0 if are_equal(updates) else 1


if __name__ == "__main__":
    sys.exit(main())
