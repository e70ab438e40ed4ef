from __future__ import annotations

from typing import Any, Literal, overload

import jax
import numpy as np

from pallas_attn.dispatch import Implementation
from pallas_attn.flash_ops import SPARSE, or_as_xla_says
from pallas_attn.operands import operand
from pallas_attn.switches import promoting
from twin_attention.contract.block_mask import BlockMask
from twin_attention.contract.operands import BlockSparseOperands, describe_operands
from twin_attention.contract.spec import BlockSparseSpec, Precision
from twin_attention.contract.validate.block_mask import (
    check_kept_tiles,
    check_list_values,
    check_lists,
)
from twin_attention.contract.validate.errors import fail
from twin_attention.contract.validate.names import refuse_names, without_catch_all


@overload
def block_sparse_attention(
    q: jax.Array, k: jax.Array, v: jax.Array,
    block_mask: BlockMask[jax.Array] | jax.Array, *,
    causal: bool = ..., scale: float | None = ...,
    window_size: tuple[int | None, int | None] | None = ..., softcap: float | None = ...,
    sinks: jax.Array | None = ..., deterministic: bool | None = ..., precision: Precision = ...,
    return_lse: Literal[False] = ..., implementation: Implementation | None = ...,
) -> jax.Array: ...  # fmt: skip
@overload
def block_sparse_attention(
    q: jax.Array, k: jax.Array, v: jax.Array,
    block_mask: BlockMask[jax.Array] | jax.Array, *,
    causal: bool = ..., scale: float | None = ...,
    window_size: tuple[int | None, int | None] | None = ..., softcap: float | None = ...,
    sinks: jax.Array | None = ..., deterministic: bool | None = ..., precision: Precision = ...,
    return_lse: Literal[True], implementation: Implementation | None = ...,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def block_sparse_attention(
    q: jax.Array, k: jax.Array, v: jax.Array,
    block_mask: BlockMask[jax.Array] | jax.Array, *,
    causal: bool = ..., scale: float | None = ...,
    window_size: tuple[int | None, int | None] | None = ..., softcap: float | None = ...,
    sinks: jax.Array | None = ..., deterministic: bool | None = ..., precision: Precision = ...,
    return_lse: bool, implementation: Implementation | None = ...,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
@without_catch_all
def block_sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_mask: BlockMask[jax.Array] | jax.Array,
    *more: Any,
    causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    deterministic: bool | None = None,
    precision: Precision = "ieee",
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **others: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute exact attention over the tiles that a block mask keeps; other tiles cost nothing.

    Query i sees key j if the mask keeps their tile and neither `causal` nor `window_size` hides the
    key. A query may have no tile. Kernels do not read keys and values of tiles that no query keeps.

    Pass lists if several calls share a mask: from booleans, each call makes them again.
    `check_block_mask` checks lists; no memory outside the operands is touched. Works under the
    transformations that `flash_attention` does; a `BlockMask` is a pytree.

    Args:
        q: [B, Sq, Hq, D], as in `flash_attention`.
        k: [B, Skv, Hkv, D].
        v: [B, Skv, Hkv, Dv].
        block_mask: the tiles to keep: True in [tiles_q, tiles_kv] bool, with optional axes for
            heads (1 or Hq) and, before them, sequences (1 or B); or lists, a `BlockMask`. A tile
            has 64 or 128 queries and 64 or 128 keys: tiles_q is Sq / 64 or Sq / 128 rounded up,
            tiles_kv likewise.
        causal, scale, window_size, softcap, sinks, deterministic, precision, return_lse: as in
            `flash_attention`.
        implementation: "mosaic" (forward kernels for SM90, tiles of 128 by 128), "gluon"
            (likewise), "triton", "torch_triton" (torch_attn's), "reference" or None, as in
            `flash_attention`.

    Returns:
        out [B, Sq, Hq, Dv] in q's dtype; with `return_lse` the pair (out, lse), lse [B, Hq, Sq].

    Raises:
        TypeError, ValueError, NotImplementedError: as in `flash_attention`.

    Source: Zaheer et al. 2020 (BigBird); Dao et al. 2022 (FlashAttention), section 3.3.

    Example::

        import jax
        import jax.numpy as jnp
        from pallas_attn import BlockMask, block_sparse_attention
        from twin_attention.contract.block_mask import global_tiles, local_tiles

        q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 256, 4, 64))
        kept = local_tiles(4, 4, left=1, right=0) | global_tiles(4, 4, 1)  # tiles of 64
        mask = BlockMask.of(jnp.asarray(kept))
        attention = jax.jit(lambda *operands: block_sparse_attention(*operands, causal=True))
        out = attention(q, k, v, mask)
    """
    if more or others:
        refuse_names(block_sparse_attention, more, others)
    operands = _operands(q, k, v, block_mask, sinks)
    deterministic = or_as_xla_says(deterministic)
    options = causal, scale, window_size, softcap, deterministic, precision, return_lse
    return SPARSE(operands, options, implementation)


@promoting
def _operands(
    q: Any, k: Any, v: Any, block_mask: Any, sinks: Any
) -> BlockSparseOperands[jax.Array]:
    if not isinstance(block_mask, BlockMask):
        described = operand("block_mask", block_mask), operand("q", q), operand("k", k)
        check_kept_tiles(*described)
        block_mask = BlockMask.of(block_mask)
    return BlockSparseOperands(q, k, v, *block_mask, sinks=sinks)


@promoting
def check_block_mask(block_mask: BlockMask[jax.Array]) -> None:
    """Check a mask's lists, whose contents `block_sparse_attention` does not check.

    It waits for the device: use it for debugging, not in traced code.

    Args:
        block_mask: the tiles to keep, as lists.

    Raises:
        TypeError: no `BlockMask`, or a list has the wrong type or dtype, or it has no values
            because it is traced (`jax.errors.TracerArrayConversionError`).
        ValueError: shapes that contradict each other; a count that is negative or exceeds the
            tiles; a listed tile that does not exist, is out of order, or is listed in one direction
            only. The message names the first such entry or list.

    Example::

        import jax.numpy as jnp
        from pallas_attn import BlockMask, check_block_mask

        check_block_mask(BlockMask.of(jnp.tri(4, dtype=bool)))
    """
    if not isinstance(block_mask, BlockMask):
        fail(TypeError, "block_mask", "a BlockMask", type(block_mask).__name__)
    check_lists(*describe_operands(block_mask, operand))
    check_list_values(*(np.asarray(x) for x in block_mask))


def problem_of_block_sparse(
    *, q: Any, k: Any, v: Any, block_mask: Any, sinks: Any, **options: Any
) -> tuple[BlockSparseOperands[jax.Array], BlockSparseSpec]:
    return SPARSE.problem(**_operands(q, k, v, block_mask, sinks)._asdict(), **options)
