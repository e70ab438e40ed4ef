"""The named problems of `block_sparse_attention`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from twin_attention.interop.parity.cases import BlockSparseCase
from twin_attention.interop.parity.suites.choose import Change, choose, in_dtypes


def block_sparse_cases(suite: str = "small", pattern: str = "") -> list[BlockSparseCase]:
    return choose(suite, pattern, _small_block_sparse, _full_block_sparse, _large_block_sparse)


def _small_block_sparse() -> Iterator[BlockSparseCase]:
    base = BlockSparseCase("", batch=1, seq_q=130, seq_kv=200, head_dim=16)
    yield replace(base, name="block-sparse-fp32", seq_q=70, heads_q=4, tile_kv=128, dtype="float32")
    yield replace(
        base, name="block-sparse-all-options", batch=2, seq_kv=130, heads_kv=1, own_masks="all",
        tile_q=128, tile_kv=128, head_dim=24, head_dim_v=16, dtype="float16", window_size=(90, 20),
        softcap=20.0, sinks=True, scale=0.2,
    )  # fmt: skip


def _full_block_sparse() -> Iterator[BlockSparseCase]:
    base = BlockSparseCase("", batch=1, seq_q=130, seq_kv=200, head_dim=16)
    yield replace(base, name="block-sparse-causal", causal=True, own_masks="heads")
    base = BlockSparseCase("block-sparse-full", 2, 700, 700, 4, 2, own_masks="heads", kept=0.3)
    yield from in_dtypes(base, _full_block_sparse_changes)


def _full_block_sparse_changes() -> Iterator[Change]:
    for d, tile in product((16, 40, 64, 96, 128, 256), (64, 128)):
        sizes = {"head_dim": d, "tile_q": tile, "tile_kv": tile}
        yield f"d{d}-tile{tile}", sizes
        yield f"d{d}-tile{tile}-causal", {**sizes, "causal": True}
    yield "d192-dv128", {"head_dim": 192, "head_dim_v": 128}
    yield "tile64-128", {"tile_kv": 128, "own_masks": "all"}
    yield "tile128-64", {"tile_q": 128, "own_masks": ""}
    large = {"tile_q": 128, "tile_kv": 128}
    for seq_q, seq_kv in ((401, 900), (900, 401)):
        yield f"{seq_q}x{seq_kv}", {**large, "seq_q": seq_q, "seq_kv": seq_kv, "causal": True}
    # One tile of up to 64 rows is a tile of 64.
    for seq_q, seq_kv in ((1, 513), (513, 1), (0, 64), (64, 0)):
        yield f"{seq_q}x{seq_kv}", {"seq_q": seq_q, "seq_kv": seq_kv, "causal": True}
    yield "window", {**large, "window_size": (200, 70)}
    yield "softcap", {"softcap": 5.0, "head_dim": 128}
    yield "sinks", {**large, "sinks": True, "causal": True}
    yield "all-kept", {**large, "kept": 1.0}
    yield "none-kept", {**large, "kept": 0.0}
    yield "heads8-1", {**large, "heads_q": 8, "heads_kv": 1, "own_masks": "all"}


def _large_block_sparse() -> Iterator[BlockSparseCase]:
    # Longer lists than a step of the search reads.
    base = BlockSparseCase("", batch=1, seq_q=32768, seq_kv=32768, heads_q=4, kept=0.1)
    for d in (64, 128):
        heads = {"head_dim": d, "own_masks": "heads"}
        yield replace(base, name=f"large-block-sparse-d{d}", **heads)
        yield replace(base, name=f"large-block-sparse-d{d}-causal", causal=True, **heads)
