"""A model trains on what it sampled, at exactly the probabilities with which it was sampled.

``python -m examples.on_policy`` samples with paged decoding in a running batch, then trains on the
packed sequences, in torch and in JAX. It prints the largest difference of log-probabilities.

Attention has the same bits by `batch_invariant`. The model's own sums add halves of an array to
each other: operations on single elements round alike in every shape.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

# JAX would otherwise take most of a GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import torch

import pallas_attn
import torch_attn
from examples.continuous_batching import Request, serve
from examples.support.toy_model import HEAD_DIM, HEADS_KV, HEADS_Q, HIDDEN, make_toy

RATE, SLOTS, PAGE_SIZE, MAX_PAGES = 0.5, 2, 4, 4
PROMPTS = ((b"\x03\x01\x04", 4), (b"\x07", 7), (b"\x02\x07", 3))
Weights = dict[str, Any]
Attend = Callable[[Any, Any, Any], Any]


class Framework(NamedTuple):
    attn: Any
    kernels: str
    arrays: Any  # the module
    array: Callable[[Any], Any]  # from NumPy's
    half: Callable[[Any], Any]
    gradient: Callable[..., tuple[Any, Weights]]  # of a loss that also returns other values
    product: Callable[[Any, Any], Any]  # of x [T, I] and w [I, O]


class Token(NamedTuple):
    """A token of a sequence, the one sampled after it, and its log-probability."""

    token: int
    sampled: int
    log_probability: float


def gradient_in_torch(loss: Callable[[Weights], Any], weights: Weights) -> tuple[Any, Weights]:
    weights = {name: x.detach().requires_grad_() for name, x in weights.items()}
    value, found = loss(weights)
    gradients = torch.autograd.grad(value, [*weights.values()])
    return found, dict(zip(weights, gradients, strict=True))


def gradient_in_jax(loss: Callable[[Weights], Any], weights: Weights) -> tuple[Any, Weights]:
    return jax.grad(loss, has_aux=True)(weights)[::-1]


def total(x: Any) -> Any:
    """Add up [T, I, O] along I, a power of two, by adding its halves."""
    while (half := x.shape[1] // 2) > 0:
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


total_in_jax = jax.jit(total)
FRAMEWORKS = {
    "torch": Framework(
        torch_attn, "triton", torch,
        partial(torch.tensor, device="cuda" if torch.cuda.is_available() else "cpu"),
        torch.Tensor.half, gradient_in_torch,
        lambda x, w: total(x[:, :, None] * w),
    ),
    "jax": Framework(
        pallas_attn, "torch_triton", jnp, jnp.asarray, lambda x: x.astype(jnp.float16),
        gradient_in_jax, lambda x, w: total_in_jax(x[:, :, None] * w),
    ),
}  # fmt: skip


def log_probabilities(weights: Weights, tokens: Any, attend: Attend, on: Framework) -> Any:
    """Return the next tokens' log-probabilities [T, VOCABULARY]."""
    x = weights["embedding"][tokens]
    squares = on.product(x * x, on.arrays.ones_like(x[0])[:, None])
    normed = x / on.arrays.sqrt(squares / HIDDEN + 1e-5)
    q, k, v = (
        on.half(on.product(normed, weights[name].reshape(HIDDEN, -1))).reshape(-1, heads, HEAD_DIM)
        for name, heads in (("q", HEADS_Q), ("k", HEADS_KV), ("v", HEADS_KV))
    )
    out = attend(q, k, v).reshape(len(tokens), -1)
    x = x + on.product(out, weights["out"].reshape(-1, HIDDEN))
    logits = on.product(x, weights["logits"])
    sums = on.product(on.arrays.exp(logits), on.arrays.ones_like(logits[0])[:, None])
    return logits - on.arrays.log(sums)


def sample(weights: Weights, rng: np.random.Generator, on: Framework) -> list[list[Token]]:
    """Answer `PROMPTS` in a running batch; return the tokens of each sequence."""
    tables = on.array(rng.permutation(SLOTS * MAX_PAGES).reshape(SLOTS, -1).astype(np.int32))
    slots = np.zeros((SLOTS * MAX_PAGES, PAGE_SIZE, HEADS_KV, HEAD_DIM), np.float16)
    pools = [on.array(slots), on.array(slots)]
    sequences: list[list[Token]] = []
    running: list[list[Token]] = [[] for _ in range(SLOTS)]

    def step(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        seq_lens = on.array(lengths + 1)

        def attend(q: Any, k: Any, v: Any) -> Any:
            found = on.attn.append_kv(k, v, *pools, tables, seq_lens)
            pools[:] = pools if on.arrays is torch else found  # torch writes in place
            return on.attn.paged_decode(
                q, *pools, tables, seq_lens, batch_invariant=True, implementation=on.kernels
            )

        found = log_probabilities(weights, on.array(tokens), attend, on)
        table = np.array(found.tolist(), np.float32)
        sampled = (table + rng.gumbel(size=table.shape)).argmax(-1)
        for slot in range(SLOTS):
            if lengths[slot] == 0:  # a request begins
                running[slot] = []
                sequences.append(running[slot])
            new = sampled[slot]
            running[slot].append(Token(tokens[slot], new, table[slot, new]))
        return sampled

    serve([Request(*x) for x in PROMPTS], SLOTS, step)
    return sequences


def train(weights: Weights, sequences: list[list[Token]], on: Framework) -> tuple[Weights, float]:
    """Prefer even tokens in a step of gradient descent on packed sequences.

    Return the weights, and the largest difference from the log-probabilities of sampling.
    """
    tokens, sampled, before = zip(*chain(*sequences), strict=True)
    tokens, sampled = (on.array(np.array(x, np.int32)) for x in (tokens, sampled))
    offsets = on.array(np.array([0, *accumulate(map(len, sequences))], np.int32))
    attend = partial(
        on.attn.flash_attention_varlen, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, causal=True,
        batch_invariant=True, implementation=on.kernels,
    )  # fmt: skip

    def loss(weights: Weights) -> tuple[Any, Any]:
        found = log_probabilities(weights, tokens, attend, on)
        found = found[on.arrays.arange(len(tokens)), sampled]
        return (found * (2.0 * (sampled % 2) - 1)).mean(), found

    found, gradients = on.gradient(loss, weights)
    difference = np.abs(np.array(found.tolist(), np.float32) - np.array(before)).max()
    return {name: x - RATE * gradients[name] for name, x in weights.items()}, float(difference)


def differences(on: Framework, rounds: int) -> list[float]:
    """Return the largest difference in each round of sampling and training."""
    weights: Weights = {name: on.array(x) for name, x in make_toy().weights.items()}
    rng, found = np.random.default_rng(7), []
    for _ in range(rounds):
        weights, difference = train(weights, sample(weights, rng, on), on)
        found.append(difference)
    return found


def main() -> int:
    print("largest difference of log-probabilities between sampling and training, by round:")
    found = {name: differences(on, rounds=2) for name, on in FRAMEWORKS.items()}
    for name, values in found.items():
        print(f"{name:5}", *values)
    with_matmul = FRAMEWORKS["torch"]._replace(product=lambda x, w: x.to(w.dtype) @ w)
    others = differences(with_matmul, rounds=1)
    print("torch with torch.matmul in the model:", *others)
    return int(any(chain(*found.values())) or not any(others))


if __name__ == "__main__":
    sys.exit(main())
