from __future__ import annotations

from typing import Any

import numpy as np

from twin_attention.contract.operands import BlockSparseOperands
from twin_attention.contract.spec import (
    TILE_SIZES,
    WINDOW_UNLIMITED,
    BlockSparseSpec,
    FlashOptions,
    tile_size,
)
from twin_attention.contract.validate.errors import fail
from twin_attention.contract.validate.operands import (
    Operand,
    check_device,
    check_dtype,
    check_qkv,
    check_sinks,
)
from twin_attention.contract.validate.options import check_integer


def check_block_sparse_attention(
    operands: BlockSparseOperands[Operand], options: FlashOptions
) -> BlockSparseSpec:
    check_qkv(operands, ("[B, Sq, Hq, D]", "[B, Skv, Hkv, D]", "[B, Skv, Hkv, Dv]"))
    q, k = operands.q, operands.k
    of_queries, of_keys = operands.kv_counts, operands.q_counts
    lists = of_queries, operands.kv_tiles, of_keys, operands.q_tiles
    for x in lists:
        check_device(x, q)
    check_lists(*lists)
    _check_mask_axes(of_queries, of_queries.shape[:2], q)
    _check_number_of_tiles(of_queries, of_queries.shape[2], q.shape[1], "queries")
    _check_number_of_tiles(of_keys, of_keys.shape[2], k.shape[1], "keys")
    check_sinks(operands)
    return BlockSparseSpec.of(operands, q.dtype, options)


def check_lists(kv_counts: Operand, kv_tiles: Operand, q_counts: Operand, q_tiles: Operand) -> None:
    """Contents are not checked."""
    lists = ((kv_counts, kv_tiles), (q_counts, q_tiles))
    for counts, tiles in lists:
        for x in (counts, tiles):
            check_dtype(x, "int32")
        if len(counts.shape) != 3:
            expected = "3 dimensions [B or 1, Hq or 1, tiles]"
            fail(ValueError, counts.name, expected, f"shape {counts.shape}")
    if q_counts.shape[:2] != kv_counts.shape[:2]:
        expected = f"kv_counts' masks {kv_counts.shape[:2]}"
        fail(ValueError, q_counts.name, expected, q_counts.shape[:2])
    is_empty = 0 in (kv_counts.shape[2], q_counts.shape[2])
    for counts, tiles in lists:
        if tiles.shape[:-1] != counts.shape or (tiles.shape[-1] == 0 and not is_empty):
            expected = f"shape ({', '.join(map(str, counts.shape))}, width) and a width from 1 on"
            fail(ValueError, tiles.name, expected, tiles.shape)


def check_list_values(
    kv_counts: np.ndarray, kv_tiles: np.ndarray, q_counts: np.ndarray, q_tiles: np.ndarray
) -> None:
    """Check the contents of lists, in both directions; name the first wrong entry or list."""
    of_queries = _kept_by_lists("kv", kv_counts, kv_tiles, q_counts.shape[2])
    of_keys = _kept_by_lists("q", q_counts, q_tiles, kv_counts.shape[2]).swapaxes(2, 3)
    for b, h, query, key in np.argwhere(of_queries != of_keys)[:1]:
        lists = (("kv_tiles", query, key), ("q_tiles", key, query))
        (has, row, tile), (lacks, other, _) = lists if of_queries[b, h, query, key] else lists[::-1]
        expected = f"tile {row} in it, as {has}[{b}, {h}, {row}] has tile {tile}"
        fail(ValueError, f"{lacks}[{b}, {h}, {other}]", expected, "none")


def _kept_by_lists(of: str, counts: np.ndarray, tiles: np.ndarray, limit: int) -> np.ndarray:
    """Check the lists of one direction; return the tiles that they keep, of `limit` in each."""
    most = min(tiles.shape[-1], limit)
    for where in np.argwhere((counts < 0) | (counts > most))[:1]:
        name = f"{of}_counts{where.tolist()}"
        fail(ValueError, name, f"a count from 0 to {most}", counts[tuple(where)])
    listed = np.arange(tiles.shape[-1]) < counts[..., None]
    least = np.zeros(tiles.shape, np.int64)
    least[..., 1:] = tiles[..., :-1].astype(np.int64) + 1
    for where in np.argwhere(listed & ((tiles < least) | (tiles >= limit)))[:1]:
        tile, first = int(tiles[tuple(where)]), int(least[tuple(where)])
        expected = f"a tile from 0 to {limit - 1}"
        if 0 <= tile < limit:  # it exists, and comes too early
            expected = f"a tile after {first - 1}"
        fail(ValueError, f"{of}_tiles{where.tolist()}", expected, tile)
    kept = np.zeros((*counts.shape, limit), bool)
    *rows, _ = entries = np.nonzero(listed)
    kept[(*rows, tiles[entries])] = True
    return kept


def check_kept_tiles(kept: Operand, q: Operand, k: Operand) -> None:
    """Check a block mask of booleans; q and k are not checked."""
    check_mask(kept)
    check_device(kept, q)
    if len(q.shape) == len(k.shape) == 4:
        *masks, tiles_q, tiles_kv = (1,) * (4 - len(kept.shape)) + kept.shape
        _check_mask_axes(kept, tuple(masks), q)
        _check_number_of_tiles(kept, tiles_q, q.shape[1], "queries")
        _check_number_of_tiles(kept, tiles_kv, k.shape[1], "keys")


def check_mask(kept: Operand) -> None:
    check_dtype(kept, "bool")
    if not 2 <= len(kept.shape) <= 4:
        expected = "2 to 4 dimensions [B or 1, Hq or 1, tiles_q, tiles_kv]"
        fail(ValueError, kept.name, expected, f"shape {kept.shape}")


def check_tiles(least: int = 0, **numbers: Any) -> None:
    """Refuse numbers of tiles that are not integers or less than `least`."""
    for name, value in numbers.items():
        check_integer(name, value, least, WINDOW_UNLIMITED)


def _check_mask_axes(x: Operand, masks: tuple[int, ...], q: Operand) -> None:
    batch, _, heads, _ = q.shape
    if masks[0] not in (1, batch):
        fail(ValueError, x.name, f"masks of 1 or {batch} sequences", masks[0])
    if masks[1] not in (1, heads):
        fail(ValueError, x.name, f"masks of 1 or {heads} heads", masks[1])


def _check_number_of_tiles(x: Operand, tiles: int, length: int, what: str) -> None:
    if tile_size(length, tiles) is None:
        fits = dict.fromkeys(-(-length // size) for size in TILE_SIZES)
        expected = f"{' or '.join(map(str, fits))} tiles for {length} {what}"
        fail(ValueError, x.name, expected, tiles)
