"""Block masks: which tiles of the scores block-sparse attention computes.

A mask is an array of booleans, True for a tile that is kept: ``[tiles_q, tiles_kv]``, with leading
axes if heads or sequences have masks of their own. A tile is 64 or 128 queries by 64 or 128 keys,
by lengths and the number of tiles. The last tile may be cut off.

Kernels take the mask as lists, a `BlockMask`, so only kept tiles cost anything. Causal masks and
windows apply within them.

The functions below make NumPy masks, which ``|`` and ``&`` combine. They count in tiles: tile i of
the queries stands at tile ``i + tiles_kv - tiles_q`` of the keys.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from array_api_compat import array_namespace

from twin_attention.contract.validate.block_mask import check_mask, check_tiles
from twin_attention.contract.validate.errors import fail, type_name
from twin_attention.contract.validate.operands import Operand

X = TypeVar("X")
Y = TypeVar("Y")


class BlockMask(NamedTuple, Generic[X]):
    """The tiles that a block mask keeps, as lists: one framework's int32 arrays, on one device.

    Bm is 1 or B, and Hm is 1 or Hq: one mask for all sequences or heads, or one for each. Each list
    increases. This is not checked on the device: other lists give other results, but no memory
    outside the operands is read. Entries past a list's count never matter.

    Args:
        kv_counts: [Bm, Hm, tiles_q], how many tiles of keys each tile of queries keeps.
        kv_tiles: [Bm, Hm, tiles_q, width], which ones; width is at least the largest count.
        q_counts: [Bm, Hm, tiles_kv], how many tiles of queries keep each tile of keys.
        q_tiles: [Bm, Hm, tiles_kv, width], which ones.

    Example::

        import numpy as np
        from torch_attn import BlockMask

        mask = BlockMask.of(np.tri(4, dtype=bool))  # of a torch.Tensor or a jax.Array as well
        assert mask.kv_counts.tolist() == [[[1, 2, 3, 4]]]
    """

    kv_counts: X
    kv_tiles: X
    q_counts: X
    q_tiles: X

    @staticmethod
    def of(kept: Y) -> BlockMask[Y]:
        """Return a mask's lists, as arrays of its own library. The mask can be traced.

        Args:
            kept: [tiles_q, tiles_kv], [Hm, tiles_q, tiles_kv] or [Bm, Hm, tiles_q, tiles_kv] bool.

        Raises:
            TypeError: `kept` is no array of booleans.
            ValueError: another number of dimensions.
        """
        array: Any = kept
        try:
            xp = array_namespace(array)
        except TypeError:
            fail(TypeError, "kept", "an array of booleans", type_name(kept))
        check_mask(Operand("kept", tuple(array.shape), str(array.dtype).removeprefix("torch.")))
        array = xp.reshape(array, (*(1,) * (4 - array.ndim), *array.shape))

        def lists(kept: Any) -> tuple[Any, Any]:
            dropped = xp.astype(xp.logical_not(kept), xp.int32)
            return (
                xp.sum(1 - dropped, axis=-1, dtype=xp.int32),
                xp.astype(xp.argsort(dropped, axis=-1, stable=True), xp.int32),
            )

        return BlockMask(*lists(array), *lists(xp.matrix_transpose(array)))


def local_tiles(tiles_q: int, tiles_kv: int, left: int, right: int) -> np.ndarray:
    """Return the band in which each tile sees `left` tiles before its own and `right` after.

    Returns:
        [tiles_q, tiles_kv] bool.
    """
    check_tiles(tiles_q=tiles_q, tiles_kv=tiles_kv, left=left, right=right)
    ahead = _tiles_ahead(tiles_q, tiles_kv)
    return (ahead >= -left) & (ahead <= right)


def strided_tiles(tiles_q: int, tiles_kv: int, stride: int) -> np.ndarray:
    """Return the mask in which each tile sees its own tile and every `stride`-th from there.

    Source: Child et al. 2019 (Sparse Transformers), section 4.3.

    Returns:
        [tiles_q, tiles_kv] bool.
    """
    check_tiles(tiles_q=tiles_q, tiles_kv=tiles_kv)
    check_tiles(least=1, stride=stride)
    return _tiles_ahead(tiles_q, tiles_kv) % stride == 0


def global_tiles(tiles_q: int, tiles_kv: int, num_tiles: int) -> np.ndarray:
    """Return the mask in which the first `num_tiles` see all tiles, and all tiles see them.

    Source: Zaheer et al. 2020 (BigBird), section 2.

    Returns:
        [tiles_q, tiles_kv] bool.
    """
    check_tiles(tiles_q=tiles_q, tiles_kv=tiles_kv, num_tiles=num_tiles)
    query, key = np.ogrid[:tiles_q, :tiles_kv]
    return (query < num_tiles) | (key < num_tiles)


def random_tiles(tiles_q: int, tiles_kv: int, num_tiles: int, seed: int) -> np.ndarray:
    """Return a random mask: each tile of queries sees `num_tiles` tiles of keys, or all if fewer.

    Returns:
        [tiles_q, tiles_kv] bool, the same for the same seed.
    """
    check_tiles(tiles_q=tiles_q, tiles_kv=tiles_kv, num_tiles=num_tiles, seed=seed)
    rank = np.random.default_rng(seed).random((tiles_q, tiles_kv)).argsort(1).argsort(1)
    return rank < num_tiles


def document_tiles(q_ids: np.ndarray, kv_ids: np.ndarray, tile_q: int, tile_kv: int) -> np.ndarray:
    """Return the mask of tiles that share a document.

    If documents begin at multiples of a tile, this mask does what segment ids do. Otherwise a query
    also sees neighbouring documents in its tiles.

    Args:
        q_ids: [Sq] or [B, Sq], the document of each query; a negative number is padding.
        kv_ids: [Skv] or [B, Skv], the same for the keys.
        tile_q, tile_kv: sizes of a tile.

    Returns:
        [tiles_q, tiles_kv] bool, or [B, 1, tiles_q, tiles_kv].
    """
    check_tiles(least=1, tile_q=tile_q, tile_kv=tile_kv)
    q_ids, kv_ids = np.asarray(q_ids), np.asarray(kv_ids)
    if q_ids.ndim not in (1, 2) or q_ids.shape[:-1] != kv_ids.shape[:-1]:
        fail(ValueError, "kv_ids", f"q_ids' batch {q_ids.shape[:-1]} of 1 axis", kv_ids.shape[:-1])
    if q_ids.ndim == 2:
        pairs = zip(q_ids, kv_ids, strict=True)
        return np.stack([document_tiles(*pair, tile_q, tile_kv) for pair in pairs])[:, None]
    documents = np.unique(q_ids[q_ids >= 0])

    def has(ids: np.ndarray, tile: int) -> np.ndarray:
        """Return which documents have tokens in each tile, [tiles, documents]."""
        ids = np.pad(ids, (0, -len(ids) % tile), constant_values=-1).reshape(-1, tile)
        found = np.zeros((len(ids), len(documents)), bool)
        for n, document in enumerate(documents):
            found[:, n] = (ids == document).any(1)
        return found

    return has(q_ids, tile_q) @ has(kv_ids, tile_kv).T


def _tiles_ahead(tiles_q: int, tiles_kv: int) -> np.ndarray:
    """Return how many tiles each tile of keys is ahead of each tile of queries."""
    query, key = np.ogrid[:tiles_q, :tiles_kv]
    return key - (query + tiles_kv - tiles_q)
