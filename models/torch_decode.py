"""Greedy decoding of the PyTorch model over a paged cache; `jax_decode` is its twin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.config import ModelConfig
from models.torch_attention import Attend
from torch_attn import append_kv, paged_decode

if TYPE_CHECKING:
    from models.torch_model import Transformer

MOST_NEW_TOKENS = 16  # of one `append_kv`


@dataclass
class PagedCache:
    """Keys and values of every layer, in pages.

    Attributes:
        k_pages, v_pages: a pool [P, page_size, Hkv, D] for each layer.
        block_tables: [B, max_pages] int32, the pages of each sequence, in every layer the same.
        seq_lens: [B] int32, tokens of each sequence in the cache.
    """

    k_pages: list[Tensor]
    v_pages: list[Tensor]
    block_tables: Tensor
    seq_lens: Tensor

    def extended(self, num_new_tokens: int) -> PagedCache:
        """Return the cache with the new tokens counted in; each layer's `attend` writes them."""
        return replace(self, seq_lens=self.seq_lens + num_new_tokens)

    def positions(self, num_new_tokens: int) -> Tensor:
        """Return the positions [B, T] of the last tokens."""
        last = torch.arange(-num_new_tokens, 0, device=self.seq_lens.device)
        return self.seq_lens[:, None] + last

    def attend(self, layer: int) -> Attend:
        """Return the attention of new tokens over the cache of a layer, which it writes first."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pages = self.k_pages[layer], self.v_pages[layer]
            k, v = k.to(pages[0].dtype), v.to(pages[1].dtype)
            pages = append_kv(k, v, *pages, self.block_tables, self.seq_lens)
            self.k_pages[layer], self.v_pages[layer] = pages
            out = paged_decode(q.to(k.dtype), *pages, self.block_tables, self.seq_lens)
            return out.to(q.dtype)

        return attend


def make_cache(
    config: ModelConfig,
    batch: int,
    max_tokens: int,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
) -> PagedCache:
    """Return an empty cache for `batch` sequences of at most `max_tokens`, float16 or bfloat16."""
    max_pages = -(-max_tokens // page_size)
    shape = (batch * max_pages, page_size, config.num_heads_kv, config.head_dim)
    options = {"dtype": dtype, "device": device}
    return PagedCache(
        k_pages=[torch.zeros(shape, **options) for _ in range(config.num_layers)],
        v_pages=[torch.zeros(shape, **options) for _ in range(config.num_layers)],
        block_tables=torch.arange(shape[0], dtype=torch.int32, device=device).reshape(batch, -1),
        seq_lens=torch.zeros(batch, dtype=torch.int32, device=device),
    )


@torch.no_grad()
def generate(model: Transformer, prompts: Tensor, num_tokens: int, cache: PagedCache) -> Tensor:
    """Return the likeliest next tokens [B, num_tokens] of prompts [B, S], one after the other.

    Args:
        model: the model.
        prompts: [B, S] int32, of one length, S at least 1.
        num_tokens: how many to add, at least 1.
        cache: an empty one with room for S + num_tokens - 1; not to be used any more.
    """
    for chunk in prompts.split(MOST_NEW_TOKENS, dim=1):
        logits, cache = model.decode(chunk, cache)
    tokens = [logits[:, -1:].argmax(dim=-1)]
    for _ in range(num_tokens - 1):
        logits, cache = model.decode(tokens[-1], cache)
        tokens.append(logits[:, -1:].argmax(dim=-1))
    return torch.cat(tokens, dim=1).int()
