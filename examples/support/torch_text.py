"""Train the PyTorch model on text; decode over its paged cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch

from examples.continuous_batching import Step
from models.config import ModelConfig
from models.torch_decode import make_cache
from models.torch_model import Transformer, next_token_loss


def make_model(config: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # sharing out tiny operations takes longer than they do
    return Transformer(config, device="cuda" if torch.cuda.is_available() else "cpu")


def train(model: Transformer, batches: Iterable[np.ndarray], rate: float) -> Iterator[float]:
    """Take a step of AdamW on each batch [B, S + 1]; return the losses before them."""
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    for batch in batches:
        loss = next_token_loss(model, torch.tensor(batch, device=model.embed.weight.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def make_step(model: Transformer, slots: int, max_tokens: int) -> Step:
    """Return a function that feeds each slot a token and returns the likeliest next ones."""
    device = model.embed.weight.device
    cache = make_cache(model.config, slots, max_tokens, dtype=torch.float16, device=device)

    @torch.no_grad()
    def step(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        nonlocal cache
        cache = replace(cache, seq_lens=torch.tensor(lengths, device=device))
        logits, cache = model.decode(torch.tensor(tokens, device=device)[:, None], cache)
        return logits[:, -1].argmax(dim=-1).cpu().numpy()

    return step
