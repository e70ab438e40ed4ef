"""Boolean masks as operands of `flash_attention`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from twin_attention.contract.validate.attention import check_broadcast


def of_mask(
    mask: jax.Array, whole: tuple[int, int, int, int], dtype: Any
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return segment ids of keys, or a bias; the other is None.

    Args:
        mask: bool, True where a query sees a key, broadcasting to `whole`, [B, H, Sq, Skv]. Ids are
            for a mask of only keys, [B, 1, 1, Skv]; a bias has 0 and -inf.
        dtype: of the bias.
    """
    check_broadcast("mask", mask.shape, whole)
    if mask.shape[1:3] == (1, 1):
        keys = jnp.broadcast_to(mask[:, 0, 0], (whole[0], whole[3]))
        return jnp.where(keys, 0, -1).astype(jnp.int32), None
    return None, jnp.where(mask, 0, -jnp.inf).astype(dtype)
