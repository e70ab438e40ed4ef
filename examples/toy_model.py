"""A language model of one attention layer with random weights, and prompts to continue."""

from __future__ import annotations

import numpy as np

VOCABULARY, HIDDEN = 64, 32
HEADS_Q, HEADS_KV, HEAD_DIM = 4, 2, 16
MAX_PAGES, NUM_PAGES, PAGE_SIZE = 8, 32, 4
POOL_SHAPE = (NUM_PAGES, PAGE_SIZE, HEADS_KV, HEAD_DIM)
# In the cache at first: the prompts, but for the last token of each.
PROMPT_LENGTHS = (3, 14, 9)
NEW_TOKENS = 12


def make_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The weights by name: embedding, q, k, v, out, logits."""
    shapes = {
        "embedding": (VOCABULARY, HIDDEN),
        "q": (HIDDEN, HEADS_Q, HEAD_DIM),
        "k": (HIDDEN, HEADS_KV, HEAD_DIM),
        "v": (HIDDEN, HEADS_KV, HEAD_DIM),
        "out": (HEADS_Q, HEAD_DIM, HIDDEN),
        "logits": (HIDDEN, VOCABULARY),
    }
    normal = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return {
        name: x if name == "embedding" else x / np.float32(HIDDEN**0.5)
        for name, x in normal.items()
    }


def make_prompts(rng: np.random.Generator) -> np.ndarray:
    """The tokens of all prompts, [B, T + 1], padded on the left to the longest."""
    return rng.integers(VOCABULARY, size=(len(PROMPT_LENGTHS), max(PROMPT_LENGTHS) + 1))


def make_block_tables(rng: np.random.Generator) -> np.ndarray:
    """Which pages of the pool each sequence has, [B, MAX_PAGES], in no order."""
    count = len(PROMPT_LENGTHS) * MAX_PAGES
    return rng.permutation(NUM_PAGES)[:count].reshape(-1, MAX_PAGES).astype(np.int32)


def make_noise(rng: np.random.Generator) -> np.ndarray:
    """What chance adds to the logits of each new token, [NEW_TOKENS, B, VOCABULARY].

    The largest sum of a logit and Gumbel noise is a sample of the softmax (Maddison et al. 2014),
    so that with the same noise both frameworks sample the same tokens.
    """
    return rng.gumbel(size=(NEW_TOKENS, len(PROMPT_LENGTHS), VOCABULARY)).astype(np.float32)
