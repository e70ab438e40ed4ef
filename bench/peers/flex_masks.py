"""FlexAttention's masks, made from the tiles that are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from twin_attention.contract.block_mask import BlockMask

if TYPE_CHECKING:
    import numpy as np


def flex_mask(
    kept: np.ndarray,
    whole: np.ndarray,
    tile: tuple[int, int],
    lengths: tuple[int, int],
    visible: Callable[..., Any] | None,
    device: Any,
) -> Any:
    """Return a mask of the kept tiles. `create_block_mask` would evaluate every pair for it.

    Args:
        kept, whole: [tiles_q, tiles_kv] bool, tiles of which something or all is seen.
        tile: queries and keys of a tile.
        lengths: queries and keys.
        visible: which pairs of the other kept tiles are seen, or None if all kept ones are whole.
        device: where the mask lies.
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
