"""The transformer in PyTorch; `jax_model` is its twin."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import INIT_STD, NORM_EPS, ModelConfig, check_dtypes
from models.torch_attention import Attend, PagedCache, choose_attention

Rotary = tuple[Tensor, Tensor]


class Transformer(nn.Module):
    """A decoder-only transformer, weights normal with `INIT_STD` by torch's generator.

    Args:
        config: the shape.
        attention: "twin" (this project's), "eager", "sdpa", "cudnn" or "flex".
        device, dtype: of parameters; device None is the CPU.
        compute_dtype: of matrix products and attention, by autocast; None is `dtype`. The residual
            stream keeps `dtype`; norms, rotations and the loss compute in float32.

    Raises:
        ValueError: an unknown attention or dtype.
        NotImplementedError: an attention that the device lacks for this dtype and head dimension.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: str = "twin",
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device or "cpu")
        self.config = config
        self.compute_dtype = compute_dtype or dtype
        check_dtypes(*(str(x).removeprefix("torch.") for x in (dtype, self.compute_dtype)))
        self.attend = choose_attention(attention, config, device, self.compute_dtype)
        # No buffer: `.to(bfloat16)` would round it.
        self.frequencies = torch.tensor(config.rotary_frequencies, device=device)
        options = {"device": device, "dtype": dtype}
        self.embed = nn.Embedding(config.vocab_size, config.d_model, **options)
        self.layers = nn.ModuleList(Block(config, options) for _ in range(config.num_layers))
        self.norm = make_norm(config, options)
        if not config.tied_head:
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=False, **options)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, S, vocab_size] of tokens [B, S]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        with self.autocast():
            x, rotary = self.embed(tokens), self.rotary(positions)
            for layer in self.layers:
                x = layer(x, rotary, self.attend)
            return self.logits(x)

    def decode(self, tokens: Tensor, cache: PagedCache) -> tuple[Tensor, PagedCache]:
        """Return the logits [B, T, vocab_size] of T new tokens, at most 64, and the extended cache.

        The given cache is not to be used any more.
        """
        cache = cache.extended(tokens.shape[1])
        with self.autocast():
            x, rotary = self.embed(tokens), self.rotary(cache.positions(tokens.shape[1]))
            for i, layer in enumerate(self.layers):
                x = layer(x, rotary, cache.attend(i))
            return self.logits(x), cache

    def autocast(self) -> AbstractContextManager:
        weight = self.embed.weight
        if weight.dtype == self.compute_dtype:
            return nullcontext()
        return torch.autocast(weight.device.type, self.compute_dtype)

    def rotary(self, positions: Tensor) -> Rotary:
        """Return cosine and sine, [..., S, 1, head_dim / 2] in float32, of positions [..., S]."""
        angles = positions[..., None, None] * self.frequencies.to(positions.device)
        return angles.cos(), angles.sin()

    def logits(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return F.linear(x, self.embed.weight) if self.config.tied_head else self.head(x)


class Block(nn.Module):
    """Attention and MLP, each on the normalised residual stream and added to it."""

    def __init__(self, config: ModelConfig, options: dict) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, options)
        self.attention = Attention(config, options)
        self.mlp_norm = make_norm(config, options)
        self.mlp = SwiGLU(config, options) if config.mlp == "swiglu" else GELU(config, options)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, attend)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Projections around a given attention, with rotary positions in q and k."""

    def __init__(self, config: ModelConfig, options: dict) -> None:
        super().__init__()
        d_model, self.head_dim = config.d_model, config.head_dim
        d_kv = config.num_heads_kv * config.head_dim
        self.q_proj = nn.Linear(d_model, d_model, bias=False, **options)
        self.k_proj = nn.Linear(d_model, d_kv, bias=False, **options)
        self.v_proj = nn.Linear(d_model, d_kv, bias=False, **options)
        self.o_proj = nn.Linear(d_model, d_model, bias=False, **options)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)
        q = rotate(self.q_proj(x).reshape(heads), rotary)
        k = rotate(self.k_proj(x).reshape(heads), rotary)
        v = self.v_proj(x).reshape(heads)
        return self.o_proj(attend(q, k, v).reshape(x.shape))


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) · up(x))``. Source: Shazeer 2020."""

    def __init__(self, config: ModelConfig, options: dict) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False, **options)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False, **options)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GELU(nn.Module):
    """``down(gelu(up(x)))``."""

    def __init__(self, config: ModelConfig, options: dict) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False, **options)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


def make_norm(config: ModelConfig, options: dict) -> nn.Module:
    norm = nn.RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return norm(config.d_model, eps=NORM_EPS, **options)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate each pair of dimensions i and i + D/2 of x [B, S, H, D]. Source: Su et al. 2021."""
    cos, sin = rotary
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def next_token_loss(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of each of tokens [B, S + 1] but the first."""
    logits = model(tokens[:, :-1])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().long())
