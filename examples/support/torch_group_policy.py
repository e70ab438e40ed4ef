"""Group-relative policy optimisation in torch, over a tree or over separate sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.support.continuations import Batch
from torch_attn import flash_attention, flash_attention_varlen

Weights = dict[str, Tensor]
Step = tuple[float, dict[str, Tensor]]  # loss, and gradients by weight


def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch, implementation: str | None) -> Tensor:
    """Return attention [T, heads, head_dim] of a batch's sequences."""
    if batch.ends is None:
        offsets = batch.offsets, batch.offsets
        return flash_attention_varlen(q, k, v, *offsets, causal=True, implementation=implementation)
    q, k, v, ends = (x[None] for x in (q, k, v, batch.ends))
    return flash_attention(q, k, v, causal=True, kv_ends=ends, implementation=implementation)[0]


def log_probabilities(weights: Weights, batch: Batch, implementation: str | None) -> Tensor:
    """Return each token's log-probability given those before it, [T]."""
    x = weights["embedding"][batch.tokens] + batch.positions
    q, k, v = (torch.einsum("ti,ihd->thd", x, weights[name]) for name in "qkv")
    out = attend(q, k, v, batch, implementation)
    x = x + torch.einsum("thd,hdo->to", out, weights["out"])
    logits = (x @ weights["logits"])[batch.parents]
    return logits.log_softmax(-1).gather(-1, batch.tokens.long()[:, None])[:, 0]


def policy_loss(
    weights: Weights, batch: Batch, old: Tensor, clip: float, implementation: str | None
) -> Tensor:
    """Return an update's loss (Shao et al. 2024, without the KL term).

    Args:
        batch: continuations with their advantages.
        old: log-probabilities of the tokens when they were sampled, [T].
        clip: how far from 1 the ratio of probabilities counts.
    """
    ratio = (log_probabilities(weights, batch, implementation) - old).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    return -(batch.shares * gain).sum()


def train(
    weights: Weights, batch: Batch, steps: int, rate: float, clip: float,
    implementation: str | None = None,
) -> list[Step]:  # fmt: skip
    """Take steps of gradient descent from the weights that sampled; return their losses."""
    weights = {name: x.clone().requires_grad_() for name, x in weights.items()}
    old = log_probabilities(weights, batch, implementation).detach()
    found = []
    for _ in range(steps):
        loss = policy_loss(weights, batch, old, clip, implementation)
        gradients = torch.autograd.grad(loss, [*weights.values()])
        with torch.no_grad():
            for x, dx in zip(weights.values(), gradients, strict=True):
                x -= rate * dx
        found.append((loss.item(), dict(zip(weights, gradients, strict=True))))
    return found
