"""Training on documents in torch, packed and one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.support.packed_documents import NO_TARGET, Packed
from torch_attn import flash_attention, flash_attention_varlen

Weights = dict[str, Tensor]
Loss = Callable[[Weights, Packed], Tensor]


def logits_of(weights: Weights, tokens: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    """Return logits [T, vocabulary]; `attend` takes q, k, v [T, heads, head_dim]."""
    x = weights["embedding"][tokens]
    q, k, v = (torch.einsum("ti,ihd->thd", x, weights[name]) for name in "qkv")
    x = x + torch.einsum("thd,hdo->to", attend(q, k, v), weights["out"])
    return x @ weights["logits"]


def packed_loss(weights: Weights, packed: Packed, implementation: str | None = None) -> Tensor:
    """Return the mean loss of tokens with a target, with one call of attention."""
    attend = partial(
        flash_attention_varlen,
        cu_seqlens_q=packed.offsets,
        cu_seqlens_kv=packed.offsets,
        causal=True,
        implementation=implementation,
    )
    logits = logits_of(weights, packed.tokens, attend)
    return cross_entropy(logits, packed.targets.long(), ignore_index=NO_TARGET)


def loss_one_by_one(weights: Weights, packed: Packed) -> Tensor:
    """Return the same loss with a call of attention per document."""

    def attend(*qkv: Tensor) -> Tensor:
        return flash_attention(*(x[None] for x in qkv), causal=True)[0]

    total = torch.zeros((), device=packed.tokens.device)
    for begin, end in pairwise(packed.offsets.tolist()):
        logits = logits_of(weights, packed.tokens[begin:end], attend)
        targets = packed.targets[begin:end].long()
        total = total + cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="sum")
    return total / (packed.targets != NO_TARGET).sum()


def train(weights: Weights, packed: Packed, loss: Loss, steps: int, rate: float) -> list[float]:
    """Take steps of gradient descent; return the loss before each."""
    weights = {name: x.clone().requires_grad_() for name, x in weights.items()}
    losses = []
    for _ in range(steps):
        value = loss(weights, packed)
        gradients = torch.autograd.grad(value, [*weights.values()])
        with torch.no_grad():
            for x, dx in zip(weights.values(), gradients, strict=True):
                x -= rate * dx
        losses.append(value.item())
    return losses
