"""The large model of `draft_tree` in torch: rotate by depth, append, attend along the tree."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from examples import draft_tree
from torch_attn import append_kv, paged_decode
from twin_attention.contract.tree import Tree


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate heads [..., H, D] by their tokens' positions."""
    half = x.shape[-1] // 2
    frequencies = 100.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[..., None, None] * frequencies
    first, second = x.split(half, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class TorchDecoder:
    """A `draft_tree.Decoder` whose pools are written in place."""

    def __init__(
        self, toy: draft_tree.Toy, implementation: str | None = None, device: str = "cpu"
    ) -> None:
        self._implementation, self._device = implementation, device
        self._weights = {name: self._tensor(x) for name, x in toy.weights.items()}
        self._tables = self._tensor(toy.block_tables)
        shape = draft_tree.NUM_PAGES, draft_tree.PAGE_SIZE, draft_tree.HEADS_KV, draft_tree.HEAD_DIM
        self._pools = torch.zeros(
            draft_tree.LAYERS, 2, *shape, dtype=torch.float16, device=device
        ).unbind()
        self._new: list[tuple[Tensor, Tensor]] = []

    def step(self, tokens: np.ndarray, tree: Tree, lengths: np.ndarray) -> np.ndarray:
        weights, (batch, size) = self._weights, tokens.shape
        context = self._tensor(lengths)
        ends = self._tensor(tree.ends).expand(batch, size)
        # A token's position is that on its own path, wherever its key lies.
        positions = context[:, None] + self._tensor(tree.depths)
        x, self._new = weights["embedding"][self._tensor(tokens)], []
        for layer, pool in enumerate(self._pools):
            q, k, v = (torch.einsum("bti,ihd->bthd", x, weights[f"{y}{layer}"]) for y in "qkv")
            q, k, v = rotate(q, positions).half(), rotate(k, positions).half(), v.half()
            self._new.append((k, v))
            self._append(layer, k, v, context + size)
            out = paged_decode(
                q, *pool, self._tables, context + size, tree_ends=ends,
                implementation=self._implementation,
            )  # fmt: skip
            x = x + torch.einsum("bthd,hdo->bto", out.float(), weights[f"out{layer}"])
        return (x @ weights["logits"]).argmax(-1).int().cpu().numpy()

    def keep(self, order: np.ndarray, lengths: np.ndarray) -> None:
        index = self._tensor(order)[:, :, None, None]
        for layer, new in enumerate(self._new):
            k, v = (torch.take_along_dim(x, index, dim=1) for x in new)
            self._append(layer, k, v, self._tensor(lengths) + order.shape[1])

    def _append(self, layer: int, k: Tensor, v: Tensor, seq_lens: Tensor) -> None:
        append_kv(
            k, v, *self._pools[layer], self._tables, seq_lens, implementation=self._implementation
        )

    def _tensor(self, x: np.ndarray) -> Tensor:
        return torch.tensor(x, device=self._device)
