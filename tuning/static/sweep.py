"""Check that no valid problem is refused for want of shared memory, whatever its lengths.

Pallas has static lengths, so a compiler may turn a loop of one known step into plain code, which
may take more shared memory. So each flash kernel is compiled for every combination of few steps.
Run-time lengths need only a few problems.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tuning.static.gate import (
    FRAMEWORKS,
    Problem,
    compiler,
    decode_spec,
    paged_spec,
    shared_memory_limit,
)
from tuning.static.shared_memory import only_shared_memory
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import AttentionSpec, Window
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.targets.config import find_configs, table_path

WINDOWS = (Window(), Window(right=0), Window(left=70), Window(100, 30), Window(300, 200))
# The features of the gate's problems that stand for rows: without and with capped scores.
FEATURES = ("causal", "all-options", "decode", "decode-all-options")
_STEPS_MAX = 3  # more steps make no other code
_WITH_TILES = ("flash_fwd", "flash_bwd_dq", "flash_bwd_dkdv")


@dataclass(frozen=True)
class Misfit:
    """A problem that takes more shared memory than there is; `outcome` says what fits."""

    row: Problem
    spec: AttentionSpec | DecodeSpec
    outcome: str
    refused: bool


def lengths_of(
    row: Problem, windows: Sequence[Window] = WINDOWS
) -> Sequence[AttentionSpec | DecodeSpec]:
    if isinstance(row.spec, DecodeSpec):
        return list(_decodes(row))
    if row.framework == "torch":
        spec = _flash(row, 203, 331)
        segmented = replace(spec, window=windows[-1], segmented=True)
        return [segmented, _tree(spec), *(replace(spec, window=window) for window in windows)]
    # With segment ids or ends of keys only the device knows the steps.
    segmented = replace(_flash(row, 203, 331, windows[-1]), segmented=True)
    tree = _tree(_flash(row, 203, 331))
    return [segmented, tree, *_flash_of_all_structures(row, windows)]


def sweep(row: Problem, windows: Sequence[Window] = WINDOWS) -> tuple[int, list[Misfit]]:
    """Compile a row's problems; return their number, and what misfits."""
    specs = lengths_of(row, windows)
    with only_shared_memory():
        return len(specs), [misfit for spec in specs for misfit in misfits_of(row, spec)]


def misfits_of(row: Problem, spec: AttentionSpec | DecodeSpec) -> Iterator[Misfit]:
    """Return a problem's kernels that do not fit as configured; see `only_shared_memory`."""

    def limit(kernel: str) -> int:
        return row.shared_memory or shared_memory_limit(kernel, row.target)

    card = {"shared_memory": row.shared_memory} if row.framework == "jax" else {}
    try:
        compiled = compiler(row.framework)(spec, row.target, limit, **card)
    except NotImplementedError as error:
        yield Misfit(row, spec, str(error), refused=True)
        return
    for kernel, config, _ in compiled:
        if config.num_stages < _configs(row, spec).get(kernel, config).num_stages:
            yield Misfit(row, spec, f"{kernel}: {config}", refused=False)


def _configs(row: Problem, spec: AttentionSpec | DecodeSpec) -> Mapping[str, Any]:
    return find_configs(table_path(FRAMEWORKS[row.framework], row.target), spec)


def _flash(row: Problem, seq_q: int, seq_kv: int, window: Window = WINDOWS[0]) -> AttentionSpec:
    softcap = row.spec.softcap
    case = FlashCase("", 2, seq_q, seq_kv, 4, 2, row.head_dim, dtype=row.dtype, softcap=softcap)
    return replace(case.spec, window=window)


def _tree(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, window=Window(300, 0), tree=True, depths=True)


def _flash_of_all_structures(row: Problem, windows: Sequence[Window]) -> Iterator[AttentionSpec]:
    """Return problems that give each kernel every structure, in a shuffled order."""
    configs = _configs(row, _flash(row, 1, 1))
    tiled = [configs[kernel] for kernel in _WITH_TILES]
    tiles = {size for config in tiled for size in (config.block_q, config.block_kv)}
    lengths = {tile * count + odd for tile in tiles for count in range(5) for odd in (-9, 0, 1)}
    lengths = sorted(length for length in lengths if length > 0)
    pairs = list(product(lengths, lengths))
    random.Random(0).shuffle(pairs)
    seen = set()
    for window, (seq_q, seq_kv) in product(windows, pairs):
        spec = _flash(row, seq_q, seq_kv, window)
        structures = set(_structures(spec, configs))
        if not structures <= seen:
            seen |= structures
            yield spec


def _structures(spec: AttentionSpec, configs: Mapping[str, Any]) -> Iterator[tuple]:
    """Return the static steps of each kernel's two loops."""
    from pallas_attn.kernels.library.tiles import visible_tiles  # which imports JAX

    left, right = spec.window.left, spec.window.right
    for kernel in _WITH_TILES:
        config = configs[kernel]
        blocks = config.block_q, config.block_kv
        reach = spec.seq_q, spec.seq_kv, spec.diagonal, left, right, *blocks
        if kernel == "flash_bwd_dkdv":
            blocks = config.block_kv, config.block_q
            reach = spec.seq_kv, spec.seq_q, -spec.diagonal, right, left, *blocks
        has_one_tile = reach[0] <= blocks[0]
        steps = None
        if has_one_tile or spec.window == Window():
            _, before, full, after = visible_tiles(0, *reach)
            steps = min(full, _STEPS_MAX), min(before + after, _STEPS_MAX)
        yield kernel, has_one_tile, steps, spec.window if steps is None else None


def _decodes(row: Problem) -> Iterator[DecodeSpec]:
    """Return decodes of few and many rows and keys, pages and splits, and chunks."""
    for tokens, page_size, pages, splits in (
        (1, 16, 1, 1), (1, 256, 8, 4), (2, 64, 16, None), (3, 256, 2, 1),
        (5, 16, 64, 4), (8, 1, 300, None), (16, 128, 8, 1), (16, 32, 100, 4),
    ):  # fmt: skip
        yield decode_spec(
            row.dtype, row.head_dim, 4, 2, tokens=tokens, page_size=page_size, max_pages=pages,
            window_size=None if tokens % 2 else (600, None), num_splits=splits,
            softcap=row.spec.softcap,
        )  # fmt: skip
    for page_size, pages, window in ((16, 64, None), (256, 8, (600, None)), (1, 300, None)):
        yield paged_spec(
            row.dtype, row.head_dim, page_size=page_size, max_pages=pages, window_size=window,
            num_splits=1 if window else 2, softcap=row.spec.softcap,
        )  # fmt: skip
