"""Continuous batching: requests enter a running batch as others leave it.

``python -m examples.continuous_batching`` serves a tiny model with random weights and prints when
each request was in the batch. `examples.text_model` trains the model first.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from models.config import make_config

FRAMEWORKS = ("torch", "jax")
SLOTS = 2
PROMPTS = (b"The kernel", b"A row of the ", b"`flash_attention` is", b"q, k")
# From each slot's next token and its number of tokens in the cache, both [slots] int32, the
# likeliest token after it [slots].
Step = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass
class Request:
    """A prompt of at least one token, and how many tokens to add, at least one.

    It is in the batch from the step `served[0]` to `served[1]`.
    """

    prompt: bytes
    num_tokens: int
    answer: list[int] = field(default_factory=list)
    served: tuple[int, int] = (-1, -1)

    def token(self, position: int) -> int:
        """Return the token at a position of prompt and answer."""
        if position < len(self.prompt):
            return self.prompt[position]
        return self.answer[position - len(self.prompt)]


def serve(requests: Sequence[Request], slots: int, step: Step) -> int:
    """Answer all requests, at most `slots` at once; return the number of steps.

    Each step feeds every slot one token, so a request begins while others go on. It reuses a slot's
    pages: what they hold past a sequence's length does not matter.
    """
    waiting = deque(requests)
    running: list[Request | None] = [None] * slots
    lengths = np.zeros(slots, np.int32)
    steps = 0
    while waiting or any(running):
        for slot in range(slots):
            if running[slot] is None and waiting:
                running[slot], lengths[slot] = waiting.popleft(), 0
        tokens = np.zeros(slots, np.int32)
        for slot, request in enumerate(running):
            if request is None:
                lengths[slot] = 0  # an empty slot writes its first place again and again
            else:
                tokens[slot] = request.token(lengths[slot])
        likeliest = step(tokens, lengths)
        lengths += 1
        for slot, request in enumerate(running):
            if request is None:
                continue
            request.served = steps if request.served[0] < 0 else request.served[0], steps
            if lengths[slot] >= len(request.prompt):
                request.answer.append(int(likeliest[slot]))
            if len(request.answer) == request.num_tokens:
                running[slot] = None
        steps += 1
    return steps


def answer_requests(side: Any, model: Any) -> None:
    """Serve `PROMPTS` with the model of a side, and print when each was in the batch."""
    requests = [Request(p, 12 * (i + 1)) for i, p in enumerate(PROMPTS)]
    longest = max(len(r.prompt) + r.num_tokens for r in requests)
    steps = serve(requests, SLOTS, side.make_step(model, SLOTS, longest))
    for request in requests:
        first, last = request.served
        answer = bytes(request.answer).decode("utf-8", errors="replace")
        print(f"steps {first:2} to {last:2}: {request.prompt.decode()!r} -> {answer!r}")
    alone = sum(len(r.prompt) + r.num_tokens - 1 for r in requests)
    print(f"{len(requests)} requests in {steps} steps, {alone} one after the other")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=FRAMEWORKS, nargs="?", default="torch")
    side = import_module(f"examples.support.{parser.parse_args(argv).framework}_text")
    answer_requests(side, side.make_model(make_config("tiny")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
