"""Causal attention of the PyTorch model: by name, and over a paged cache.

Functions take q [B, S, Hq, D] and k, v [B, S, Hkv, D], and return [B, S, Hq, D].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from torch_attn import append_kv, explain, flash_attention, paged_decode
from twin_attention.contract.validate.errors import fail

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def twin(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run this project's kernels; on a CPU their reference."""
    return flash_attention(q, k, v, causal=True)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute ``softmax(q kᵀ / sqrt(D)) v`` with all scores in memory."""
    q, k, v = heads_first(q, k, v)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(2, 3)) * q.shape[3] ** -0.5
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return (weights @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run the backend of `scaled_dot_product_attention` that torch chooses."""
    q, k, v = heads_first(q, k, v)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out.transpose(1, 2)


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run compiled FlexAttention; each new length compiles."""
    attend, mask_of = _flex()
    grouped = q.shape[2] != k.shape[2]
    mask = mask_of(q.shape[1], q.device)
    return attend(*heads_first(q, k, v), block_mask=mask, enable_gqa=grouped).transpose(1, 2)


@cache
def _flex() -> tuple[Callable[..., Tensor], Callable]:
    """Return compiled FlexAttention, and its mask as a function of length and device."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(batch, head, query, key):
        return query >= key

    @cache
    def mask_of(length: int, device: torch.device):
        return create_block_mask(visible, None, None, length, length, device)

    return torch.compile(flex_attention), mask_of


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


ATTENTIONS: dict[str, Attend] = {
    "twin": twin, "eager": eager, "sdpa": sdpa, "cudnn": cudnn, "flex": flex,
}  # fmt: skip


def choose_attention(
    name: str, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Attend:
    """Return the attention of a name, if this machine runs it for the model.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: a head dimension, dtype or device that it does not take.
    """
    if name not in ATTENTIONS:
        fail(ValueError, "attention", f"one of {', '.join(ATTENTIONS)}", repr(name))
    if name == "twin":
        shape = (1, 1, config.num_heads, config.head_dim)
        q = torch.empty(shape, dtype=dtype, device=device)
        explain(flash_attention, q, q, q, causal=True)
    if name in ("cudnn", "flex") and device.type != "cuda":
        fail(NotImplementedError, "attention", f"a CUDA device for {name!r}", device.type)
    if name == "cudnn":
        if dtype not in (torch.float16, torch.bfloat16):
            got = str(dtype).removeprefix("torch.")
            fail(NotImplementedError, "attention", "float16 or bfloat16 for 'cudnn'", got)
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            expected = "compute capability 8.0 or newer for 'cudnn'"
            fail(NotImplementedError, "attention", expected, "{}.{}".format(*capability))
    return ATTENTIONS[name]


@dataclass
class PagedCache:
    """Keys and values of every layer, in pages.

    Attributes:
        k_pages, v_pages: a pool [P, page_size, Hkv, D] for each layer.
        block_tables: [B, max_pages] int32, shared by the layers.
        seq_lens: [B] int32, tokens of each sequence in the cache.
    """

    k_pages: list[Tensor]
    v_pages: list[Tensor]
    block_tables: Tensor
    seq_lens: Tensor

    def extended(self, num_new_tokens: int) -> PagedCache:
        """Return the cache with longer sequences; each layer's `attend` writes the tokens."""
        return replace(self, seq_lens=self.seq_lens + num_new_tokens)

    def positions(self, num_new_tokens: int) -> Tensor:
        """Return the positions [B, T] of the last tokens."""
        last = torch.arange(-num_new_tokens, 0, device=self.seq_lens.device)
        return self.seq_lens[:, None] + last

    def attend(self, layer: int) -> Attend:
        """Return the attention of new tokens over a layer's cache, which it writes first."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pages = self.k_pages[layer], self.v_pages[layer]
            k, v = k.to(pages[0].dtype), v.to(pages[1].dtype)
            pages = append_kv(k, v, *pages, self.block_tables, self.seq_lens)
            self.k_pages[layer], self.v_pages[layer] = pages
            out = paged_decode(q.to(k.dtype), *pages, self.block_tables, self.seq_lens)
            return out.to(q.dtype)

        return attend
