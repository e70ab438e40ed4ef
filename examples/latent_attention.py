"""Latent attention (MLA): training expands the keys, decoding does not, and the numbers are equal.

``python -m examples.latent_attention``: a layer of DeepSeek's sizes trains with a key and a value
for each head. Then it decodes its sequence from a pool with one latent a token, in both frameworks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# JAX would otherwise take most of a GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch
from torch import Tensor

import pallas_attn
from torch_attn import append_kv, flash_attention, paged_decode
from twin_attention.interop.exchange import to_jax, to_torch

HEADS, NOPE, ROPE, LATENT, VALUE, WIDTH, TOKENS = 4, 128, 64, 512, 128, 96, 40
PAGE_SIZE, TOLERANCE = 16, 3e-3
OPTIONS: Any = {"value_dim": LATENT, "scale": (NOPE + ROPE) ** -0.5}


class LatentAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.down = torch.nn.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.key_up = torch.nn.Parameter(torch.randn(LATENT, HEADS, NOPE) * LATENT**-0.5)
        self.value_up = torch.nn.Parameter(torch.randn(LATENT, HEADS, VALUE) * LATENT**-0.5)
        self.out = torch.nn.Linear(HEADS * VALUE, WIDTH, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q in two parts [S, H, ...], latents [S, R] and the keys that all heads share."""
        q, q_rope = self.q(x).unflatten(-1, (HEADS, -1)).split((NOPE, ROPE), -1)
        latent, k_rope = self.down(x).split((LATENT, ROPE), -1)
        return q, rotate(q_rope), latent, rotate(k_rope[:, None])

    def forward(self, x: Tensor) -> Tensor:
        """Attend with a key and a value for each head, made from the latents."""
        q, q_rope, latent, k_rope = self.project(x)
        k, v = (torch.einsum("sr,rhd->shd", latent, x) for x in (self.key_up, self.value_up))
        q = torch.cat([q, q_rope], -1)
        k = torch.cat([k, k_rope.expand(-1, HEADS, -1)], -1)
        out = flash_attention(*(x.half()[None] for x in (q, k, v)), causal=True)
        return self.out(out[0].float().flatten(1))

    def absorb(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys [S, heads, R + ROPE] whose products are those of `forward`."""
        q, q_rope, latent, k_rope = self.project(x)
        q = torch.einsum("shd,rhd->shr", q, self.key_up)
        keys = torch.cat([latent[:, None], k_rope], -1)
        return torch.cat([q, q_rope], -1).half(), keys.half()

    def of_latents(self, out: Tensor) -> Tensor:
        """Return the layer's result from attention's, [S, H, R]."""
        return self.out(torch.einsum("shr,rhd->shd", out.float(), self.value_up).flatten(1))


def rotate(x: Tensor) -> Tensor:
    """Rotate pairs of [S, heads, ROPE] by their positions."""
    place = torch.arange(len(x), device=x.device)[:, None, None]
    angle = place / 1e4 ** torch.linspace(0, 1, ROPE // 2, device=x.device)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def train(layer: LatentAttention, x: Tensor) -> list[float]:
    """Return the losses of a few steps."""
    optimizer, target = torch.optim.SGD(layer.parameters(), 0.3), torch.roll(x, 1, 0)
    losses = []
    for _ in range(4):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def decode(layer: LatentAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the layer's results token by token in torch, and of all tokens at once in JAX."""
    q, keys = layer.absorb(x)
    pages = -(-TOKENS // PAGE_SIZE)
    pool = keys.new_empty(pages, PAGE_SIZE, 1, LATENT + ROPE)
    table = torch.arange(pages, dtype=torch.int32, device=x.device)[None]
    outs = []
    for t in range(TOKENS):
        length = torch.tensor([t + 1], dtype=torch.int32, device=x.device)
        append_kv(keys[t : t + 1], None, pool, None, table, length)
        outs.append(paged_decode(q[t : t + 1], pool, None, table, length, **OPTIONS))
    offsets = torch.tensor([0, TOKENS], dtype=torch.int32, device=x.device)
    q, pool, table, length, offsets = map(to_jax, (q, pool, table, length, offsets))
    in_jax = pallas_attn.paged_attention(q, pool, None, table, length, offsets, **OPTIONS)
    return layer.of_latents(torch.cat(outs)), layer.of_latents(to_torch(in_jax))


def largest_differences(device: str) -> tuple[float, float]:
    """Return how far decoding in torch and in JAX is from the trained form, of its largest number.

    Raise AssertionError if training does not lower the loss.
    """
    torch.manual_seed(0)
    layer, x = LatentAttention().to(device), torch.randn(TOKENS, WIDTH).to(device)
    losses = train(layer, x)
    assert losses[-1] < losses[0], losses
    want = layer(x).detach()
    in_torch, in_jax = (float((y - want).abs().max() / want.abs().max()) for y in decode(layer, x))
    return in_torch, in_jax


def main() -> int:
    print("decoded from latents, how far from the trained form:", flush=True)
    found = largest_differences("cuda" if torch.cuda.is_available() else "cpu")
    for side, difference in zip(("torch", "jax"), found, strict=True):
        print(f"{side:5} {difference:.1e}")
    return 0 if max(found) < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
