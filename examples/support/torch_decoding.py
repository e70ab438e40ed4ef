"""A decoding loop in torch: append the token's key and value, attend, sample the next one."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_attn import append_kv, paged_decode


def project(weights: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return embeddings of tokens, [..., hidden], and q, k, v, [..., heads, head_dim]."""
    x = weights["embedding"][tokens]
    q, k, v = (torch.einsum("...i,ihd->...hd", x, weights[name]).half() for name in "qkv")
    return x, q, k, v


def prefill(
    weights: dict[str, Tensor],
    prompts: Tensor,
    pool: tuple[Tensor, Tensor],
    block_tables: Tensor,
    seq_lens: Tensor,
    implementation: str | None = None,
) -> None:
    """Write prompts [B, T], padded on the left, to their sequences' pages in place.

    Padding stands before position 0, where `append_kv` writes nothing. (One layer needs no
    attention here: keys and values follow from the tokens.)
    """
    _, _, k, v = project(weights, prompts)
    append_kv(k, v, *pool, block_tables, seq_lens, implementation=implementation)


def generate(
    weights: dict[str, Tensor],
    tokens: Tensor,
    pool: tuple[Tensor, Tensor],
    block_tables: Tensor,
    seq_lens: Tensor,
    noise: Tensor,
    implementation: str | None = None,
) -> Tensor:
    """Continue sequences by a token for each row of `noise`; return the new tokens, [B, N].

    The pool is written in place.

    Args:
        tokens: [B], the last token of each sequence, not yet in the cache.
        pool: k_pages and v_pages, [P, page_size, heads, head_dim].
        block_tables: [B, max_pages].
        seq_lens: [B], tokens in the cache.
        noise: [N, B, vocabulary], added to the logits.
    """
    sampled = []
    for gumbel in noise:
        seq_lens = seq_lens + 1
        x, q, k, v = project(weights, tokens)
        append_kv(k, v, *pool, block_tables, seq_lens, implementation=implementation)
        attended = paged_decode(q, *pool, block_tables, seq_lens, implementation=implementation)
        x = x + torch.einsum("bhd,hdo->bo", attended.float(), weights["out"])
        tokens = (x @ weights["logits"] + gumbel).argmax(-1)
        sampled.append(tokens)
    return torch.stack(sampled, dim=1)
