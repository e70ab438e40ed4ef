"""Problems of attention by patterns, and their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from interop.parity.cases import BlockSparseCase, DilatedCase, FlashCase
from twin_attention.contract.block_mask import (
    BlockMask,
    global_tiles,
    local_tiles,
    random_tiles,
)

C = TypeVar("C", bound=FlashCase)

TILE, SEED = 128, 0
KEPT = 0.1  # share of the tiles of a random mask
BAND, GLOBAL = 8, 1  # tiles that a tile of queries sees up to its own, and tiles that all see
DILATIONS = {2048: 1, 4096: 2, 8192: 4, 16384: 8, 32768: 16}  # LongNet's rates of segments
SHORT_DILATIONS = {128: 1, 256: 2, 512: 4}
LENGTHS, SHORTER = (32768, 65536, 131072), (4096, 16384)  # of bfloat16
FLOAT_SHAPES = ((1, 512, 8), (2, 1024, 16))  # batch, length and heads


@dataclass(frozen=True)
class SparseCase(BlockSparseCase):
    """One call of `block_sparse_attention` with a mask of a pattern.

    Attributes:
        pattern: "random" for about `kept` of the tiles, the diagonal's among them, without a causal
            mask; "local" for a causal band and global tiles.
    """

    pattern: str = "random"

    @cached_property
    def mask(self) -> BlockMask[np.ndarray]:
        """Return the lists of the tiles that are kept."""
        return BlockMask.of(self.tiles)

    @property
    def tiles(self) -> np.ndarray:
        """Return the tiles that are kept, [tiles_q, tiles_kv] bool."""
        *_, q, kv = self.mask_shape
        if self.pattern == "local":
            return local_tiles(q, kv, left=BAND - 1, right=0) | global_tiles(q, kv, GLOBAL)
        others = max(0, round(self.kept * kv) - 1)
        return local_tiles(q, kv, left=0, right=0) | random_tiles(q, kv, others, SEED)


def pattern_cases() -> Iterator[SparseCase | DilatedCase]:
    """Yield every pattern at every shape, those of float32 with rates of 1 as well."""
    for shape in _shapes():
        rates = DILATIONS if shape.dtype == "bfloat16" else SHORT_DILATIONS
        lengths = tuple(length for length in rates if length <= shape.seq_q)
        yield _of_shape(
            DilatedCase, f"dilated-{shape.name}", shape, segment_lengths=lengths,
            dilation_rates=tuple(rates[length] for length in lengths),
        )  # fmt: skip
        if rates is SHORT_DILATIONS:
            yield _of_shape(
                DilatedCase, f"undilated-{shape.name}", shape, segment_lengths=lengths,
                dilation_rates=(1,) * len(lengths),
            )  # fmt: skip
        for pattern in ("random", "local"):
            yield _of_shape(
                SparseCase, f"{pattern}-{shape.name}", shape, tile_q=TILE, tile_kv=TILE, kept=KEPT,
                pattern=pattern, causal=pattern == "local",
            )  # fmt: skip


def dense_case(case: FlashCase) -> FlashCase:
    """Return the problem of the same shape without a pattern."""
    return FlashCase(**{x.name: getattr(case, x.name) for x in fields(FlashCase)})


def _shapes() -> Iterator[FlashCase]:
    """Yield the shapes in order of worth, as a run may be cut off."""
    yield from map(_of_length, LENGTHS)
    for b, n, h in FLOAT_SHAPES:
        yield FlashCase(f"fp32-{b}x{n}x{h}", b, n, n, h, h, 64, dtype="float32")
    yield from map(_of_length, SHORTER)


def _of_length(n: int) -> FlashCase:
    return FlashCase(f"bf16-1x{n}x16", 1, n, n, 16, 16, 128)


def _of_shape(kind: type[C], name: str, shape: FlashCase, **of_pattern: Any) -> C:
    fields_of: dict[str, Any] = vars(shape) | {"name": name} | of_pattern
    return kind(**fields_of)
