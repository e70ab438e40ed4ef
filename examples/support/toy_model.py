"""A language model of one attention layer with random weights, and prompts to continue."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

VOCABULARY, HIDDEN = 64, 32
HEADS_Q, HEADS_KV, HEAD_DIM = 4, 2, 16
NUM_PAGES, PAGE_SIZE, MAX_PAGES = 32, 4, 8
POOL_SHAPE = (NUM_PAGES, PAGE_SIZE, HEADS_KV, HEAD_DIM)
NEW_TOKENS = 12
# With this seed the largest sum leads by more than rounding can change.
SEED = 19


class Toy(NamedTuple):
    """The model, the prompts and the noise.

    Attributes:
        weights: embedding, q, k, v, out and logits.
        prompts: [B, T], padded on the left.
        seq_lens: [B], lengths of the prompts.
        last_tokens: [B], the token after each prompt, with which decoding begins.
        block_tables: [B, MAX_PAGES], shuffled pages.
        noise: [NEW_TOKENS, B, VOCABULARY], Gumbel noise: the largest sum with a logit samples the
            softmax (Maddison et al. 2014), in both frameworks alike.
    """

    weights: dict[str, np.ndarray]
    prompts: np.ndarray
    seq_lens: np.ndarray
    last_tokens: np.ndarray
    block_tables: np.ndarray
    noise: np.ndarray


def make_toy() -> Toy:
    rng = np.random.default_rng(SEED)
    shapes = {
        "q": (HIDDEN, HEADS_Q, HEAD_DIM),
        "k": (HIDDEN, HEADS_KV, HEAD_DIM),
        "v": (HIDDEN, HEADS_KV, HEAD_DIM),
        "out": (HEADS_Q, HEAD_DIM, HIDDEN),
        "logits": (HIDDEN, VOCABULARY),
    }
    weights = {name: rng.normal(0, HIDDEN**-0.5, shape) for name, shape in shapes.items()}
    weights["embedding"] = rng.normal(0, 1, (VOCABULARY, HIDDEN))
    seq_lens = np.array([3, 14, 9], np.int32)
    batch = len(seq_lens)
    return Toy(
        weights={name: x.astype(np.float32) for name, x in weights.items()},
        prompts=rng.integers(VOCABULARY, size=(batch, seq_lens.max()), dtype=np.int32),
        seq_lens=seq_lens,
        last_tokens=rng.integers(VOCABULARY, size=batch, dtype=np.int32),
        block_tables=rng.permutation(NUM_PAGES)[: batch * MAX_PAGES]
        .reshape(batch, MAX_PAGES)
        .astype(np.int32),
        noise=rng.gumbel(size=(NEW_TOKENS, batch, VOCABULARY)).astype(np.float32),
    )
