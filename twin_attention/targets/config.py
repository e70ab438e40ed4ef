"""The tables of tuned kernel configurations: one TOML file per framework and target.

A file holds, for each kernel, rows such as ::

    [[flash_fwd]]
    dtype_bits = 16     # of k and v: 16 for float16 and bfloat16, 32 for float32, 8 for a
                        # quantised cache
    head_dim = 128      # the padded head size that the row is for
    block_q = 128
    block_kv = 64
    num_warps = 8
    num_stages = 3

A row with ``softcap = true`` is for capped scores only, which need more registers; one with
``wide = true`` is for a `paged_decode` of more than 32 query rows a kv head, one with
``short = true`` for one of few sequences whose keys are too few to be split, and with
``crowded = true`` for one of about as many sequences and kv heads as can be worked on at once, or
of a few times as many in 8 bits. Each stands in for the plain row there. Kernels read the table;
nothing is tuned at run time.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from twin_attention.contract.spec import (
    KEYS_OF_ONE_SPLIT,
    SPLITS_MAX,
    AttentionSpec,
    DecodeSpec,
    MergeSpec,
    PagedCache,
)
from twin_attention.contract.validate import fail

VARIANTS = ("softcap", "wide", "short", "crowded")
Spec = AttentionSpec | DecodeSpec | MergeSpec | PagedCache


@dataclass(frozen=True)
class KernelConfig:
    """Tile sizes in rows of q and of k/v, warps a program, and depth of the load pipeline."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


def padded_head_dim(head_dim: int) -> int:
    """The power of two that a tile's head dimension is padded to, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def block_rows(spec: DecodeSpec, config: KernelConfig) -> int:
    """Rows of a program of `paged_decode`: a power of two from 16 to the configured block_q."""
    rows = spec.tokens * spec.group_size
    return min(config.block_q, max(16, 1 << (rows - 1).bit_length()))


def tiles_ahead(config: KernelConfig) -> int:
    """Tiles of keys, and of values, that a program of `paged_decode` has on their way.

    Two stages of the pipeline each: the table's entries are loaded before the keys.
    """
    return max(1, (config.num_stages - 1) // 2)


def programs_at_once(head_dim: int, config: KernelConfig) -> int:
    """Programs of `paged_decode` a multiprocessor that keep enough of memory's bytes on their way.

    A program of a small head size asks for less at a time. One of a larger size with many query
    rows is the fastest alone: two hardly fit shared memory, and on an A100 they do not.
    """
    size = padded_head_dim(head_dim)
    if tiles_ahead(config) == 1:
        programs = 3
    elif config.block_q <= 32 or size <= 64:
        programs = 2
    else:
        programs = 1
    return programs * max(1, 128 // size)


def choose_splits(spec: DecodeSpec, config: KernelConfig, multiprocessors: int) -> int:
    """In how many parts `paged_decode` works on a sequence's keys: what was asked for, or enough
    that all multiprocessors have work.

    It follows from shapes alone. Each part takes its share of a sequence's real length, so more
    parts than a short sequence needs cost little. Where a table's capacity gives some parts nothing
    to do, there are fewer.
    """
    if spec.num_splits is not None:
        return spec.num_splits
    if spec.reach <= KEYS_OF_ONE_SPLIT:
        return 1
    tiles = -(-spec.tokens * spec.group_size // block_rows(spec, config))
    programs = spec.batch * spec.heads_kv * tiles
    resident = programs_at_once(max(spec.head_dim, spec.head_dim_v), config) * multiprocessors
    visits = -(-spec.reach // config.block_kv)
    share = -(-visits // max(1, min(resident // programs, SPLITS_MAX)))
    return -(-visits // share)


def find_configs(path: Path, spec: Spec) -> dict[str, KernelConfig]:
    """The configuration of each of the problem's kernels in one table."""
    bits = spec.dtype_bits
    head_dim = padded_head_dim(max(spec.head_dim, spec.head_dim_v))
    return {
        kernel: rows.get((bits, head_dim, spec.variant)) or rows[bits, head_dim, ""]
        for kernel, rows in load_table(path).items()
        if kernel in spec.kernels
    }


def compile_to_fit(
    kernel: str,
    compile: Callable[[KernelConfig], Any],
    config: KernelConfig,
    target: str,
    limit: float,
) -> tuple[KernelConfig, Any]:
    """Compile a kernel, with fewer stages of its pipeline where shared memory is too small.

    How much a configuration takes depends on more than its table knows. Where a compiler sees that
    a loop has one step, the tiles of that step have buffers of their own, beside the pipeline of
    the loop that follows.

    Args:
        kernel: its name, for the error message.
        compile: compiles it with a configuration; the result has Triton's ``metadata.shared``.
        config: the configuration to start from.
        target: instruction set that it is compiled for, for the error message.
        limit: bytes of shared memory that a block may have.

    Returns:
        The configuration that fits, and what was compiled with it.

    Raises:
        NotImplementedError: not even one stage fits.
    """
    compiled = compile(config)
    while compiled.metadata.shared > limit:
        if config.num_stages == 1:
            expected = f"at most {limit} bytes of shared memory on {target}"
            fail(NotImplementedError, kernel, expected, f"{compiled.metadata.shared} with {config}")
        config = replace(config, num_stages=config.num_stages - 1)
        compiled = compile(config)
    return config, compiled


@cache
def load_table(path: Path) -> dict[str, dict[tuple[int, int, str], KernelConfig]]:
    """Read one table: kernel, then (dtype bits, padded head size, variant), to configuration.

    The variant is one of `VARIANTS`, or "".
    """
    table: dict[str, dict[tuple[int, int, str], KernelConfig]] = {}
    for kernel, rows in tomllib.loads(path.read_text()).items():
        table[kernel] = {
            (row.pop("dtype_bits"), row.pop("head_dim"), _variant(row)): KernelConfig(**row)
            for row in rows
        }
    return table


def _variant(row: dict[str, Any]) -> str:
    """Take what a row is for out of it."""
    return next((name for name in VARIANTS if row.pop(name, False)), "")
