"""Random ranges of keys."""

from __future__ import annotations

from random import Random

import torch

# Ranges of a query, by kind.
KINDS = {"": 0, "prefix": 1, "spans": 1, "both": 2, "any": 2}
SPANS = 3  # of a sequence, about


def make_ranges(kind: str, seq_q: int, seq_kv: int, random: Random) -> torch.Tensor:
    """Make the ranges [Sq, R, 2] of one sequence, whose last query stands at its last key.

    They are a prefix, spans of neighbours, both, or any, which may lie outside.
    """
    prefix = (0, random.randint(0, seq_kv))
    spans, end = [], 0
    while end < seq_kv:
        start, end = end, end + random.randint(1, 1 + 2 * seq_kv // SPANS)
        spans += [(start, min(end, seq_kv))] if random.random() < 0.5 else []
    extremes = (-(2**31), -1, 0, seq_kv + 9, 2**31 - 1)

    def any_key() -> int:
        wild = random.random() < 0.1
        return random.choice(extremes) if wild else random.randint(0, seq_kv)

    ranges = []
    for position in range(seq_kv - seq_q, seq_kv):
        own = (position, position)
        span = next((x for x in spans if x[0] <= position < x[1]), own)
        of_kinds = {"prefix": [prefix], "spans": [span], "both": [prefix, span]}
        ranges.append(of_kinds.get(kind) or [(any_key(), any_key()) for _ in range(KINDS[kind])])
    return torch.tensor(ranges, dtype=torch.int32).view(seq_q, KINDS[kind], 2)
