"""Cost of a problem: pairs attended, floating-point operations, bytes of device memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from twin_attention.contract.block_mask import BlockMask
from twin_attention.contract.paged_spec import DecodeSpec, PagedSpec
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec, VarlenSpec

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}


def visible_pairs(spec: AttentionSpec) -> int:
    """Count the query-key pairs that the window keeps, in one head of one sequence."""
    return int(_pairs_before(spec, 0, spec.seq_q, spec.seq_kv))


def block_sparse_pairs(spec: BlockSparseSpec, mask: BlockMask[np.ndarray]) -> int:
    """Count the pairs that the window and a block mask keep, over all heads and sequences."""
    starts = np.arange(0, spec.seq_q, spec.tile_q)[:, None]
    rows = np.minimum(spec.tile_q, spec.seq_q - starts)
    edges = np.append(np.arange(0, spec.seq_kv, spec.tile_kv), spec.seq_kv)
    of_tiles = np.diff(_pairs_before(spec, starts, rows, edges), axis=1)  # [tiles_q, tiles_kv]
    tiles, width = mask.kv_tiles, mask.kv_tiles.shape[-1]
    kept = np.arange(width) < mask.kv_counts[..., None]
    kept &= (tiles >= 0) & (tiles < of_tiles.shape[1])
    where = np.nonzero(kept)
    pairs = int(of_tiles[where[2], tiles[where]].sum())
    return spec.batch * spec.heads_q // max(1, spec.mask_batch * spec.mask_heads) * pairs


def tree_pairs(spec: AttentionSpec, kv_ends: np.ndarray) -> int:
    """Count the pairs that the keys' ends [B, Skv] keep; a window of depths hides nothing here."""
    key = np.arange(spec.seq_kv, dtype=np.int64)
    end = np.minimum(kv_ends.astype(np.int64), spec.seq_kv)
    left = spec.position_window.left
    if left is not None:
        end = np.minimum(end, key + left + 1)
    return spec.heads_q * int(np.maximum(end - np.maximum(key, spec.diagonal), 0).sum())


def range_pairs(spec: AttentionSpec, q_ranges: np.ndarray) -> int:
    """Count the pairs in the window or in ranges [B, Sq, R, 2], in all heads of all sequences."""
    position = np.arange(spec.seq_q, dtype=np.int64) + spec.diagonal
    left, right = spec.position_window.left, spec.position_window.right
    begin = np.zeros_like(position) if left is None else position - left
    end = position + 1 + (spec.seq_kv if right is None else right)
    window = np.broadcast_to(np.stack([begin, end], -1), (len(q_ranges), spec.seq_q, 2))
    seen = np.concatenate([window[:, :, None], q_ranges.astype(np.int64)], 2)
    begins, ends = np.clip(seen, 0, spec.seq_kv).transpose(3, 2, 0, 1)
    order = np.argsort(begins, axis=0)
    pairs, done = 0, np.zeros_like(begins[0])
    for start, stop in zip(*(np.take_along_axis(x, order, 0) for x in (begins, ends)), strict=True):
        pairs += int(np.maximum(stop - np.maximum(start, done), 0).sum())
        done = np.maximum(done, stop)
    return spec.heads_q * pairs


def forward_flops(spec: AttentionSpec) -> int:
    return _forward_flops(spec, spec.batch * spec.heads_q * visible_pairs(spec))


def backward_flops(spec: AttentionSpec) -> int:
    """Count the operations of the products s, dp, dv, dk, dq (2.5 forwards when D = Dv)."""
    return _backward_flops(spec, spec.batch * spec.heads_q * visible_pairs(spec))


def block_sparse_forward_flops(spec: BlockSparseSpec, mask: BlockMask[np.ndarray]) -> int:
    return _forward_flops(spec, block_sparse_pairs(spec, mask))


def block_sparse_backward_flops(spec: BlockSparseSpec, mask: BlockMask[np.ndarray]) -> int:
    return _backward_flops(spec, block_sparse_pairs(spec, mask))


def tree_forward_flops(spec: AttentionSpec, kv_ends: np.ndarray) -> int:
    return _forward_flops(spec, tree_pairs(spec, kv_ends))


def tree_backward_flops(spec: AttentionSpec, kv_ends: np.ndarray) -> int:
    return _backward_flops(spec, tree_pairs(spec, kv_ends))


def range_forward_flops(spec: AttentionSpec, q_ranges: np.ndarray) -> int:
    return _forward_flops(spec, range_pairs(spec, q_ranges))


def range_backward_flops(spec: AttentionSpec, q_ranges: np.ndarray) -> int:
    return _backward_flops(spec, range_pairs(spec, q_ranges))


def varlen_forward_flops(spec: VarlenSpec, lengths: Sequence[tuple[int, int]]) -> int:
    return sum(forward_flops(spec.sequence(*pair)) for pair in lengths)


def varlen_backward_flops(spec: VarlenSpec, lengths: Sequence[tuple[int, int]]) -> int:
    return sum(backward_flops(spec.sequence(*pair)) for pair in lengths)


def forward_bytes(spec: AttentionSpec) -> int:
    """Count the least traffic of a forward: q, k, v read once, out and lse written once."""
    return _operand_bytes(spec) + 4 * spec.batch * spec.heads_q * spec.seq_q


def backward_bytes(spec: AttentionSpec) -> int:
    """Count the least traffic of a backward: the forward's and dout read, gradients written."""
    rows = spec.batch * spec.seq_q * spec.heads_q
    dout = rows * spec.head_dim_v * ITEMSIZE[spec.dtype]
    out = dout
    return 2 * _operand_bytes(spec) - out + dout + 4 * rows


def decode_flops(spec: DecodeSpec, lengths: Sequence[int]) -> int:
    """Count the operations of a decode's products for these lengths."""
    pairs = sum(
        len(spec.visible_keys(token, length)) for length in lengths for token in range(spec.tokens)
    )
    return 2 * (spec.head_dim + spec.head_dim_v) * spec.heads_q * pairs


def cache_bytes(spec: DecodeSpec, lengths: Sequence[int]) -> int:
    """Count the bytes of keys and values that a decode sees for these lengths."""
    keys = sum(len(_keys_seen(spec, length)) for length in lengths)
    return keys * spec.heads_kv * spec.cache.columns * spec.dtype_bits // 8


def decode_bytes(spec: DecodeSpec, lengths: Sequence[int]) -> int:
    """Count the least traffic of a decode: each operand and the keys and values seen once."""
    row = (spec.head_dim + spec.head_dim_v) * ITEMSIZE[spec.dtype] + 4
    size = spec.cache.page_size
    seen = [keys for length in lengths if (keys := _keys_seen(spec, length))]
    entries = sum((keys[-1] // size) - (keys[0] // size) + 1 for keys in seen)
    return (
        spec.batch * spec.tokens * spec.heads_q * row
        + cache_bytes(spec, lengths)
        + 4 * (spec.batch + entries)
    )


def paged_flops(spec: PagedSpec, sequences: Sequence[tuple[int, int]]) -> int:
    """Count for sequences given as (new tokens, keys)."""
    return sum(decode_flops(spec.sequence(tokens), [keys]) for tokens, keys in sequences)


def paged_bytes(spec: PagedSpec, sequences: Sequence[tuple[int, int]]) -> int:
    """Count for sequences given as (new tokens, keys), with their offsets."""
    each = sum(decode_bytes(spec.sequence(tokens), [keys]) for tokens, keys in sequences)
    return each + 4 * (spec.batch + 1)


def _keys_seen(spec: DecodeSpec, length: int) -> range:
    """Return the keys that some new token of a sequence sees: neighbours' windows overlap."""
    seen = [keys for token in range(spec.tokens) if (keys := spec.visible_keys(token, length))]
    return range(seen[0].start, seen[-1].stop) if seen else range(0)


def _operand_bytes(spec: AttentionSpec) -> int:
    both = spec.head_dim + spec.head_dim_v
    rows = spec.seq_q * spec.heads_q + spec.seq_kv * spec.heads_kv
    return spec.batch * rows * both * ITEMSIZE[spec.dtype]


def _forward_flops(spec: AttentionSpec, pairs: int) -> int:
    return 2 * (spec.head_dim + spec.head_dim_v) * pairs


def _backward_flops(spec: AttentionSpec, pairs: int) -> int:
    return 2 * (3 * spec.head_dim + 2 * spec.head_dim_v) * pairs


def _pairs_before(spec: AttentionSpec, start: Any, rows: Any, edge: Any) -> Any:
    """Count the pairs of `rows` queries from `start` on with the keys before `edge`."""
    left, right = spec.position_window.left, spec.position_window.right
    position = spec.diagonal + start
    end = rows * edge if right is None else _sum_of_clamped(position + right + 1, rows, edge)
    begin = 0 if left is None else _sum_of_clamped(position - left, rows, edge)
    return end - begin


def _sum_of_clamped(start: Any, count: Any, limit: Any) -> Any:
    """Sum of min(max(start + i, 0), limit) for i in range(count)."""
    first = np.clip(-start, 0, count)
    last = np.clip(limit - start, 0, count)
    ramp = (2 * start + first + last - 1) * (last - first) // 2
    return ramp + limit * (count - last)
