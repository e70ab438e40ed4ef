"""Both frameworks train a toy model on packed documents, and on the documents one by one.

``python -m examples.packed_training`` prints the four losses before each step, all the same.
"""

from __future__ import annotations

import os
import sys
from functools import partial

# JAX would otherwise take most of a GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
import torch

from examples.support import jax_packed_training, torch_packed_training
from examples.support.packed_documents import make_documents
from examples.support.toy_model import make_toy

STEPS, RATE = 5, 0.5
TOLERANCE = 1e-4  # of the losses, which are between 0 and 10


def train_in_both(device: str, implementation: str | None = None) -> dict[str, list[float]]:
    """Return the losses of each training: torch on `device`, JAX on its default device."""
    weights, packed = make_toy().weights, make_documents()
    given = jax.tree.map(lambda x: torch.tensor(x, device=device), (weights, packed))
    train = partial(torch_packed_training.train, *given, steps=STEPS, rate=RATE)
    losses = {
        "torch packed": train(
            loss=partial(torch_packed_training.packed_loss, implementation=implementation)
        ),
        "torch one by one": train(loss=torch_packed_training.loss_one_by_one),
    }
    given = jax.tree.map(jax.numpy.asarray, (weights, packed))
    train = partial(jax_packed_training.train, *given, steps=STEPS, rate=RATE)
    one_by_one = partial(
        jax_packed_training.loss_one_by_one, offsets=tuple(packed.offsets.tolist())
    )
    losses["jax packed"] = train(
        loss=partial(jax_packed_training.packed_loss, implementation=implementation)
    )
    losses["jax one by one"] = train(loss=one_by_one)
    return losses


def main() -> int:
    print("loss before each step; all four trainings must agree:", flush=True)
    losses = train_in_both("cuda" if torch.cuda.is_available() else "cpu")
    for name, values in losses.items():
        print(f"{name:16}", *(f"{x:.6f}" for x in values))
    first, *others = losses.values()
    return 0 if all(np.allclose(x, first, rtol=0, atol=TOLERANCE) for x in others) else 1


if __name__ == "__main__":
    sys.exit(main())
