"""Random trees of tokens: the ends of keys, and depths."""

from __future__ import annotations

from random import Random

import torch

BRANCHES = 6  # of a nested tree, about


def make_tree(kind: str, seq_q: int, seq_kv: int, random: Random) -> dict[str, torch.Tensor]:
    """Make kv_ends [Skv], q_depths [Sq] and kv_depths [Skv] of one sequence.

    The tree is "nested", depth-first, or "any", of arbitrary ends and depths. The last query stands
    at the last key.
    """
    if kind == "nested":
        ends, kv_depths = _nested(seq_kv, random)
        positions = range(seq_kv - seq_q, seq_kv)
        q_depths = [kv_depths[p] if p >= 0 else 0 for p in positions]
    else:
        extremes = (-(2**31), -1, 0, 2**31 - 1)
        ends = [
            random.choice(extremes) if random.random() < 0.1 else random.randint(j - 3, seq_kv + 9)
            for j in range(seq_kv)
        ]
        q_depths, kv_depths = (
            [random.randint(0, max(size, 1)) for _ in range(size)] for size in (seq_q, seq_kv)
        )
    found = {"kv_ends": ends, "q_depths": q_depths, "kv_depths": kv_depths}
    return {name: torch.tensor(x, dtype=torch.int32) for name, x in found.items()}


def _nested(size: int, random: Random) -> tuple[list[int], list[int]]:
    """Return ends and depths of a tree: a token follows its predecessor or an ancestor of that."""
    ends, depths, path = [size] * size, [], []
    for token in range(size):
        if path and random.random() * size < BRANCHES:
            kept = random.randint(0, len(path) - 1)
            for left in path[kept:]:
                ends[left] = token
            path = path[:kept]
        depths.append(len(path))
        path.append(token)
    return ends, depths
