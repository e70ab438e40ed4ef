"""A prompt and continuations of it with rewards, as a tree and as separate sequences."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from examples.support.toy_model import HIDDEN, VOCABULARY
from twin_attention.contract.tree import tree_of

PROMPT, CONTINUATIONS = 24, 16
SEED = 5


class Batch(NamedTuple):
    """Tokens of a policy's update: arrays of NumPy, or of a framework.

    Attributes:
        tokens: [T] int32.
        positions: [T, HIDDEN] float32, sines of each token's position in its sequence.
        parents: [T] int32, the token whose logits predict each one; 0 if there is none.
        advantages: [T] float32, of each token's continuation.
        shares: [T] float32, weights in the loss: equal for continuations, and for the tokens of
            one; 0 for the prompt.
        ends: [T] int32, in a tree the end of each token's descendants.
        offsets: [N + 1] int32, the bounds of separate sequences.
    """

    tokens: Any
    positions: Any
    parents: Any
    advantages: Any
    shares: Any
    ends: Any = None
    offsets: Any = None


def make_batches() -> tuple[Batch, Batch]:
    """Return the same continuations each time, as a tree, and as sequences that repeat the prompt.

    An advantage is the reward, normalised within the group (Shao et al. 2024).
    """
    rng = np.random.default_rng(SEED)
    lengths = rng.integers(2, 12, CONTINUATIONS)
    rewards = rng.normal(size=CONTINUATIONS)
    advantages = (rewards - rewards.mean()) / rewards.std()

    tree = tree_of([-1] + [0] * CONTINUATIONS, [PROMPT, *lengths])
    nodes = np.repeat(np.arange(CONTINUATIONS + 1), [PROMPT, *lengths])
    whole = Batch(
        tokens=rng.integers(VOCABULARY, size=len(nodes), dtype=np.int32),
        positions=_sines(tree.depths),
        parents=tree.parents,
        advantages=np.array([0, *advantages], np.float32)[nodes],
        shares=np.array([0, *(1 / (CONTINUATIONS * lengths))], np.float32)[nodes],
        ends=tree.ends,
    )

    prompt = np.arange(PROMPT)
    bounds = PROMPT + np.array([0, *accumulate(lengths)])
    paths = [np.concatenate([prompt, np.arange(*own)]) for own in pairwise(bounds)]
    offsets = np.array([0, *accumulate(map(len, paths))], np.int32)
    rows = np.concatenate(paths)
    starts = np.repeat(offsets[:-1], np.diff(offsets))
    separate = Batch(
        tokens=whole.tokens[rows],
        positions=whole.positions[rows],
        parents=np.maximum(np.arange(len(rows), dtype=np.int32) - 1, starts),
        advantages=whole.advantages[rows],
        shares=whole.shares[rows],
        offsets=offsets,
    )
    return whole, separate


def _sines(depths: np.ndarray) -> np.ndarray:
    """Return positions of depths [T] (Vaswani et al. 2017), [T, HIDDEN] float32."""
    rates = 100.0 ** (-np.arange(HIDDEN // 2) / (HIDDEN // 2))
    angles = depths[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
