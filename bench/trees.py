"""Trees of segments, such as prompts with continuations, and their paths as packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from twin_attention.contract.spec import AttentionSpec
from twin_attention.contract.tree import tree_of
from twin_attention.interop.parity.cases import FlashCase

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TreeCase(FlashCase):
    """One causal call of `flash_attention` over one tree of segments.

    parents: of each segment, in depth-first order; -1 for a root.
    """

    parents: tuple[int, ...] = (-1,)
    segment_lengths: tuple[int, ...] = (128,)

    @property
    def spec(self) -> AttentionSpec:
        return replace(super().spec, tree=True)

    @property
    def has_roots_alone(self) -> bool:
        return set(self.parents) == {-1}

    @cached_property
    def ends(self) -> np.ndarray:
        """Return the end of each token's descendants, [1, S] int32."""
        return tree_of(self.parents, self.segment_lengths).ends[None]

    @cached_property
    def segment_ids(self) -> np.ndarray:
        segments = np.arange(len(self.segment_lengths), dtype=np.int32)
        return np.repeat(segments, self.segment_lengths)[None]

    @cached_property
    def paths(self) -> list[np.ndarray]:
        """Return the tokens from a root to each leaf: the sequences that the tree stands for."""
        starts = [0, *accumulate(self.segment_lengths)]
        tokens = [np.arange(*span) for span in pairwise(starts)]
        found = []
        for segment in sorted(set(range(len(self.parents))) - set(self.parents)):
            path = []
            while segment >= 0:
                path.append(tokens[segment])
                segment = self.parents[segment]
            found.append(np.concatenate(path[::-1]))
        return found


def separate(case: TreeCase, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Copy a tree's paths out of q, k, v and dout [1, S, H, D], one after the other.

    Return them, packed, and the paths' offsets. dout is 0 except at one copy of each token, so that
    the gradients are the tree's.
    """
    import torch

    device = tensors[0].device
    tokens = torch.from_numpy(np.concatenate(case.paths)).to(device)
    *qkv, dout = (x[0, tokens] for x in tensors)
    is_first = torch.zeros(len(tokens), dtype=torch.bool, device=device)
    is_first[_first_copies(case, device)] = True
    offsets = [0, *accumulate(map(len, case.paths))]
    own = [*qkv, dout * is_first[:, None, None]]
    return own, torch.tensor(offsets, dtype=torch.int32, device=device)


def joined(case: TreeCase, results: Sequence[Tensor]) -> list[Tensor]:
    import torch

    out, *gradients = results
    tokens = torch.from_numpy(np.concatenate(case.paths)).to(out.device)
    found = [out[_first_copies(case, out.device)]]
    for x in gradients:
        total = x.new_zeros(case.seq_q, *x.shape[1:], dtype=torch.float32)
        found.append(total.index_add_(0, tokens, x.float()).to(x.dtype))
    return [x[None] for x in found]


def separate_pairs(case: TreeCase) -> int:
    return case.heads_q * sum(len(path) * (len(path) + 1) // 2 for path in case.paths)


def _first_copies(case: TreeCase, device: Any) -> Tensor:
    import torch

    _, first = np.unique(np.concatenate(case.paths), return_index=True)
    return torch.from_numpy(first).to(device)
