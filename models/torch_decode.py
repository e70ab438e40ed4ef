"""Greedy decoding of the PyTorch model over a paged cache; `jax_decode` is its twin."""

from __future__ import annotations

import torch
from torch import Tensor

from models.config import ModelConfig
from models.torch_attention import PagedCache
from models.torch_model import Transformer

MOST_NEW_TOKENS = 16  # of a chunk of the prompts


def make_cache(
    config: ModelConfig,
    batch: int,
    max_tokens: int,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
) -> PagedCache:
    """Return an empty cache for `batch` sequences of at most `max_tokens`."""
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
    """Return the likeliest next tokens [B, num_tokens], at least one, of prompts [B, S] int32.

    The cache is empty, with room for S + num_tokens - 1; it is not to be used any more.
    """
    for chunk in prompts.split(MOST_NEW_TOKENS, dim=1):
        logits, cache = model.decode(chunk, cache)
    tokens = [logits[:, -1:].argmax(dim=-1)]
    for _ in range(num_tokens - 1):
        logits, cache = model.decode(tokens[-1], cache)
        tokens.append(logits[:, -1:].argmax(dim=-1))
    return torch.cat(tokens, dim=1).int()
