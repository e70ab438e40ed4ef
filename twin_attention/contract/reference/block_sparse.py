from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device

from twin_attention.contract.operands import BlockSparseOperands
from twin_attention.contract.reference.formulas import backward, forward
from twin_attention.contract.reference.visibility import visibility
from twin_attention.contract.spec import BlockSparseSpec

Array = Any


def block_sparse_forward(
    operands: BlockSparseOperands, spec: BlockSparseSpec, dtype: Any
) -> tuple[Array, ...]:
    """Compute out and lse; the mask is made of the lists of tiles of keys."""
    xp = array_namespace(operands.q)
    return forward(xp, operands, spec, _kept_keys(xp, operands, spec), dtype)


def block_sparse_backward(
    dout: Array,
    dlse: Array | None,
    operands: BlockSparseOperands,
    spec: BlockSparseSpec,
    dtype: Any,
) -> BlockSparseOperands[Array]:
    """Lists have no gradients."""
    xp = array_namespace(operands.q)
    seen = _kept_keys(xp, operands, spec)
    dq, dk, dv, dsinks, *_ = backward(xp, dout, dlse, operands, spec, seen, dtype)
    return BlockSparseOperands(dq, dk, dv, None, None, None, None, dsinks)


def _kept_keys(xp: Any, operands: BlockSparseOperands, spec: BlockSparseSpec) -> Array:
    """Return the mask [Bm, Hm, Sq, Skv] of the keys in the window and in kept tiles."""
    counts, tiles, on = operands.kv_counts, operands.kv_tiles, device(operands.q)
    listed = xp.arange(tiles.shape[-1], device=on) < counts[..., None]
    tile = xp.arange(operands.q_counts.shape[-1], device=on)
    kept = xp.any((tiles[..., None] == tile) & listed[..., None], axis=-2)
    query = xp.arange(spec.seq_q, device=on) // spec.tile_q
    key = xp.arange(spec.seq_kv, device=on) // spec.tile_kv
    kept = xp.take(xp.take(kept, query, axis=2), key, axis=3)
    seen = visibility(xp, spec, on)
    return kept if seen is None else kept & seen
