"""Attention with a block mask by other libraries.

A factory takes (case, operation, tensors): a `bench.problems.SparseCase`, and torch's q, k, v and
dout [B, S, H, D].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.calls import compiled, jax_call, torch_call
from bench.job import Call
from bench.problems import SparseCase
from twin_attention.contract.block_mask import BlockMask


def flex(case: SparseCase, operation: str, tensors) -> Call:
    from torch.nn.attention.flex_attention import flex_attention

    attend = partial(
        compiled(flex_attention), block_mask=sparse_mask(case, tensors[0].device), scale=case.scale
    )
    return torch_call(attend, operation, tensors, heads_first=True)


def sparse_mask(case: SparseCase, device: Any) -> Any:
    """Return FlexAttention's mask: whole tiles, and a causal mask's edge."""
    tiles = case.tiles
    edge = np.zeros_like(tiles)
    if case.causal:
        tiles = np.tril(tiles)
        edge = tiles & np.eye(len(tiles), dtype=bool)
    size, lengths = (case.tile_q, case.tile_kv), (case.seq_q, case.seq_kv)
    visible = _causal if case.causal else None
    return flex_mask(tiles, tiles & ~edge, size, lengths, visible, device)


def flex_mask(
    kept: np.ndarray,
    whole: np.ndarray,
    tile: tuple[int, int],
    lengths: tuple[int, int],
    visible: Callable[..., Any] | None,
    device: Any,
) -> Any:
    """Return a mask of the kept tiles; `create_block_mask` would evaluate every pair.

    kept, whole: [tiles_q, tiles_kv] bool, tiles that are seen partly or wholly.
    tile, lengths: queries and keys, of a tile and of all.
    visible: which pairs of partly seen tiles are seen; None if all are whole.
    """
    import torch
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    lists = [*BlockMask.of(kept & ~whole)[:2], *BlockMask.of(whole)[:2]]
    return FlexMask.from_kv_blocks(
        *(torch.from_numpy(x).to(device) for x in lists),
        BLOCK_SIZE=tile,
        mask_mod=visible,
        seq_lengths=lengths,
    )


def jax_masked(case: SparseCase, operation: str, tensors) -> Call:
    """XLA's attention in `jax.nn` that makes a mask of pairs."""
    import jax
    import jax.numpy as jnp
    import torch

    precision = "highest" if case.dtype == "float32" else "default"

    def attend(q, k, v, tiles):
        mask = jnp.repeat(tiles, case.tile_q, axis=0)[: case.seq_q]
        mask = jnp.repeat(mask, case.tile_kv, axis=1)[:, : case.seq_kv]
        with jax.default_matmul_precision(precision):
            return jax.nn.dot_product_attention(
                q, k, v, mask=mask[None, None], scale=case.scale, is_causal=case.causal,
                implementation="xla",
            )  # fmt: skip

    *qkv, dout = tensors
    # As a constant the tiles would be folded into the compiled mask.
    tiles = torch.tensor(case.tiles, device=dout.device)
    return jax_call(attend, operation, [*qkv, tiles, dout])


def _causal(batch, head, query, key):
    return query >= key
