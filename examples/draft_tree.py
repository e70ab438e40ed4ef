"""Speculative decoding with trees of drafts: several tokens a step, the same as greedy decoding's.

``python -m examples.draft_tree``: a cheap model, here the large one without attention, proposes a
tree of drafts. The large model computes all of them in one step and keeps those that it would have
chosen (Miao et al. 2024, SpecInfer).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from twin_attention.contract.tree import Tree, tree_of

VOCABULARY, HIDDEN, LAYERS = 48, 32, 2
HEADS_Q, HEADS_KV, HEAD_DIM = 4, 2, 16
NUM_PAGES, PAGE_SIZE, MAX_PAGES = 52, 4, 16  # room for 16 steps that keep 3 tokens each
NEW_TOKENS = 16
# The last token, two drafts after it, and two after each of those.
PARENTS = (-1, 0, 1, 1, 0, 4, 4)
# With this seed the largest logit leads by more than rounding can change.
SEED = 4


class Toy(NamedTuple):
    """A language model with random weights, and prompts to continue.

    Attributes:
        weights: embedding and logits; of each layer q, k, v and out.
        prompts: [B, S] tokens.
        block_tables: [B, MAX_PAGES], shuffled pages.
    """

    weights: dict[str, np.ndarray]
    prompts: np.ndarray
    block_tables: np.ndarray


class Decoder(Protocol):
    """The large model and its cache in one framework."""

    def step(self, tokens: np.ndarray, tree: Tree, lengths: np.ndarray) -> np.ndarray:
        """Return the likeliest token after each new one; keep the new keys in the cache.

        Args:
            tokens: [B, T], a tree of new tokens for each sequence.
            tree: of all sequences, [T] arrays.
            lengths: [B], keys in the cache that stay.
        """
        ...

    def keep(self, order: np.ndarray, lengths: np.ndarray) -> None:
        """Reorder the last step's new tokens in the cache, [B, T]."""
        ...


def make_toy() -> Toy:
    """Make the same model and prompts each time."""
    rng = np.random.default_rng(SEED)
    shapes = {"embedding": (VOCABULARY, HIDDEN), "logits": (HIDDEN, VOCABULARY)}
    for layer in range(LAYERS):
        shapes |= {
            f"q{layer}": (HIDDEN, HEADS_Q, HEAD_DIM),
            f"k{layer}": (HIDDEN, HEADS_KV, HEAD_DIM),
            f"v{layer}": (HIDDEN, HEADS_KV, HEAD_DIM),
            f"out{layer}": (HEADS_Q, HEAD_DIM, HIDDEN),
        }
    weights = {name: rng.normal(0, HIDDEN**-0.5, shape) for name, shape in shapes.items()}
    weights["embedding"] *= HIDDEN**0.5
    for layer in range(LAYERS):
        weights[f"out{layer}"] *= 0.5  # so that drafts without attention are often right
    tables = rng.permutation(NUM_PAGES)[: 3 * MAX_PAGES].reshape(3, MAX_PAGES)
    return Toy(
        {name: x.astype(np.float32) for name, x in weights.items()},
        rng.integers(VOCABULARY, size=(3, 9), dtype=np.int32),
        tables.astype(np.int32),
    )


def draft(weights: dict[str, np.ndarray], last: np.ndarray, parents: Sequence[int]) -> np.ndarray:
    """Return trees of drafts [B, T] whose roots are `last` [B].

    A token's n-th child is its n-th likeliest successor without attention.
    """
    tokens = np.empty((len(last), len(parents)), np.int32)
    children = np.zeros(len(parents), int)
    for t, parent in enumerate(parents):
        if parent < 0:
            tokens[:, t] = last
            continue
        logits = weights["embedding"][tokens[:, parent]] @ weights["logits"]
        tokens[:, t] = np.argsort(-logits, axis=-1)[:, children[parent]]
        children[parent] += 1
    return tokens


def accept(tokens: np.ndarray, likeliest: np.ndarray, parents: Sequence[int]) -> list[int]:
    """Return the path of drafts that greedy decoding takes, from the root.

    `likeliest` [T] is the large model's token after each of `tokens` [T].
    """
    path = [0]
    for t, parent in enumerate(parents):
        if parent == path[-1] and tokens[t] == likeliest[parent]:
            path.append(t)
    return path


def decode(
    toy: Toy, decoder: Decoder, num_tokens: int, parents: Sequence[int] = PARENTS
) -> tuple[np.ndarray, int]:
    """Continue the prompts; return the new tokens [B, num_tokens] and the number of steps.

    ``parents=(-1,)`` means no drafts: one token a step.
    """
    batch, size = toy.prompts.shape
    lengths = np.zeros(batch, np.int32)
    last = decoder.step(toy.prompts, tree_of(range(-1, size - 1)), lengths)[:, -1]
    lengths += size
    answers = [[int(token)] for token in last]
    tree, steps = tree_of(parents), 0
    while min(map(len, answers)) < num_tokens:
        tokens = draft(toy.weights, last, parents)
        likeliest = decoder.step(tokens, tree, lengths)
        paths = [accept(*x, parents) for x in zip(tokens, likeliest, strict=True)]
        # The accepted tokens' keys must follow those before them.
        rest = [[t for t in range(len(parents)) if t not in path] for path in paths]
        decoder.keep(np.array([a + b for a, b in zip(paths, rest, strict=True)]), lengths)
        for b, path in enumerate(paths):
            answers[b] += [*tokens[b, path[1:]].tolist(), int(likeliest[b, path[-1]])]
            last[b], lengths[b] = answers[b][-1], lengths[b] + len(path)
        steps += 1
    return np.array([answer[:num_tokens] for answer in answers]), steps


def main() -> int:
    from examples.support.jax_drafting import JaxDecoder
    from examples.support.torch_drafting import TorchDecoder

    print("greedy decoding and trees of drafts must give the same tokens:", flush=True)
    toy, found = make_toy(), []
    for name, make in (("torch", TorchDecoder), ("jax", JaxDecoder)):
        for kind, parents in (("greedy", (-1,)), ("drafts", PARENTS)):
            tokens, steps = decode(toy, make(toy), NEW_TOKENS, parents)
            print(f"{name:5} {kind}: {NEW_TOKENS - 1} tokens a sequence in {steps} steps")
            found.append(tokens)
    return 0 if all(np.array_equal(found[0], x) for x in found) else 1


if __name__ == "__main__":
    sys.exit(main())
