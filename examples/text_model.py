"""Train a tiny model on this project's documentation, then serve it with continuous batching.

``python -m examples.text_model`` prints the loss, and how requests of several lengths are answered.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
from rich.progress import track

from examples.continuous_batching import FRAMEWORKS, answer_requests
from models.config import make_config

BATCH, LENGTH, RATE = 16, 64, 3e-3
DOCS = Path(__file__).parents[1] / "docs"


def batches(text: bytes, steps: int) -> Iterator[np.ndarray]:
    """Return random stretches of a text for each step: [BATCH, LENGTH + 1] int32."""
    rng = np.random.default_rng(0)
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    for _ in range(steps):
        starts = rng.integers(0, len(tokens) - LENGTH, BATCH)
        yield tokens[starts[:, None] + np.arange(LENGTH + 1)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=FRAMEWORKS, nargs="?", default="torch")
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args(argv)
    side = import_module(f"examples.support.{arguments.framework}_text")
    text = b"".join(page.read_bytes() for page in sorted(DOCS.glob("*.md")))

    model = side.make_model(make_config("tiny"))
    training = side.train(model, batches(text, arguments.steps), RATE)
    losses = list(track(training, f"training in {arguments.framework}", arguments.steps))
    print(f"loss {losses[0]:.2f} nats per byte before, {losses[-1]:.2f} at the end")
    answer_requests(side, model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
