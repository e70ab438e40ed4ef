"""The tables of tuned kernel configurations: one TOML file per package, family and target.

A file holds for each kernel its columns and its rows::

    [flash_fwd]
    columns = ["dtype_bits", "head_dim", "when", "block_q", "block_kv", "num_warps", "num_stages"]
    rows = [
      [16,  64, "softcap",  64, 64, 4, 3],
      [16,  64,        "", 128, 64, 4, 3],
    ]

A problem takes the first row that serves it. The columns `KEYS` say which problems a row serves; a
missing column serves all values:

- ``dtype_bits``: bits of an element of k and v; 8 for a quantised cache.
- ``head_dim``: the largest head dimension.
- ``when``: conditions of `twin_attention.targets.conditions`, joined by " and ", each possibly
  after "not "; "" always holds.

The other columns are fields of the kernel's configuration (`twin_attention.targets.kernels`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec, MergeSpec
from twin_attention.contract.validate.errors import fail
from twin_attention.contract.validate.options import check_choice
from twin_attention.targets.collector import collector_paused
from twin_attention.targets.conditions import CONDITIONS
from twin_attention.targets.kernels import (
    FAMILY_KERNELS,
    KERNELS,
    FlashConfig,
    Kernel,
    KernelConfig,
    Spec,
)

PACKAGES = ("torch_attn", "pallas_attn")
KEYS = ("dtype_bits", "head_dim", "when")
HEAD_DIMS = (16, 32, 64, 128, 256, 512)  # padded head dimensions


def padded_head_dim(head_dim: int) -> int:
    """Return the power of two that a tile's head dimension is padded to, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


@dataclass(frozen=True)
class Row:
    """A row of a kernel's table; key: its values in the table's columns that are `KEYS`."""

    key: tuple[tuple[str, Any], ...]
    config: KernelConfig

    def serves(self, spec: Spec) -> bool:
        return all(_matches(column, value, spec) for column, value in self.key)


def _matches(column: str, value: Any, spec: Any) -> bool:
    if column == "dtype_bits":
        return spec.dtype_bits == value
    if column == "when":
        return not value or all(_holds(condition, spec) for condition in value.split(" and "))
    sizes = (spec.head_dim_v,) if isinstance(spec, MergeSpec) else (spec.head_dim, spec.head_dim_v)
    return max(sizes) <= value


def _holds(condition: str, spec: Any) -> bool:
    return CONDITIONS[condition.removeprefix("not ")](spec) != condition.startswith("not ")


def parse_table(text: str, kernels: Mapping[str, Kernel] = KERNELS) -> dict[str, tuple[Row, ...]]:
    """Read the text of a table: the rows of each kernel, in order."""
    table = {}
    for name, content in tomllib.loads(text).items():
        _check_name("kernel", name, kernels)
        columns, kernel = content["columns"], kernels[name]
        keys = tuple(column for column in KEYS if column in columns)
        if tuple(columns) != keys + kernel.fields:
            expected = f"columns, some of {KEYS}, then {kernel.fields}"
            fail(ValueError, name, expected, columns)
        rows = []
        for row in content["rows"]:
            if len(row) != len(columns):
                fail(ValueError, name, f"rows of {columns}", row)
            key = dict(zip(keys, row, strict=False))
            for condition in filter(None, key.get("when", "").split(" and ")):
                _check_name("when", condition.removeprefix("not "), CONDITIONS)
            rows.append(Row(tuple(key.items()), kernel.config(*row[len(keys) :])))
        table[name] = tuple(rows)
    return table


@cache
def load_table(path: Path, folder: str = "portable") -> dict[str, tuple[Row, ...]]:
    return parse_table(path.read_text(), FAMILY_KERNELS[folder])


def table_path(package: str, target: str, folder: str = "portable") -> Path:
    """Return the file with a family's configurations for "sm80" or "sm90"."""
    found = find_spec(package)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "configs" / folder / f"{target}.toml"


def find_configs(path: Path, spec: Spec, folder: str = "portable") -> dict[str, KernelConfig]:
    """Find the configuration of each kernel that runs for a problem in one table."""
    kernels = FAMILY_KERNELS[folder]
    rows = {
        kernel: next((row for row in rows if row.serves(spec)), None)
        for kernel, rows in load_table(path, folder).items()
        if isinstance(spec, kernels[kernel].spec)
    }
    # A nondeterministic backward without a row of its own runs as a deterministic one.
    any_order = {kernel for kernel in rows if kernels[kernel].deterministic is False}
    in_order = {kernel for kernel in rows if kernels[kernel].deterministic is True}
    runs_in_order = isinstance(spec, AttentionSpec) and (
        spec.deterministic or not any(rows[kernel] for kernel in any_order)
    )
    found = {}
    for kernel, row in rows.items():
        if kernel not in (any_order if runs_in_order else in_order):
            if row is None and kernels[kernel].optional:
                continue
            if row is None:
                fail(LookupError, f"{kernel} in {path}", "a row that serves the problem", spec)
            found[kernel] = row.config
    return found


class Change(NamedTuple):
    """Numbers in place of a kernel's own; hashable, to key caches of traced code."""

    package: str | None
    kernel: str
    numbers: tuple[tuple[str, int], ...]


_changes: tuple[Change, ...] = ()
_read: tuple[set[str], ...] = ()


def current_configs(
    package: str, target: str, spec: Spec, folder: str = "portable"
) -> Mapping[str, Any]:
    """Return the configuration of each of a problem's kernels, as changed by `use_configs`.

    No tile is larger than a block mask's: kernels walk a mask in whole tiles.
    """
    configs = _shipped(package, target, spec, folder)
    for read in _read:
        read.update(configs)
    for change in _changes:
        if change.package in (None, package) and change.kernel in configs:
            numbers = dict(change.numbers)
            if numbers.keys() <= vars(configs[change.kernel]).keys():
                new = replace(configs[change.kernel], **numbers)
                configs = {**configs, change.kernel: new}
    if isinstance(spec, BlockSparseSpec):
        return {kernel: _within_tiles(config, spec) for kernel, config in configs.items()}
    return configs


def _within_tiles(config: KernelConfig, spec: Spec) -> KernelConfig:
    if not (isinstance(spec, BlockSparseSpec) and isinstance(config, FlashConfig)):
        return config
    return replace(
        config,
        block_q=min(config.block_q, spec.tile_q),
        block_kv=min(config.block_kv, spec.tile_kv),
    )


@lru_cache(maxsize=1024)
def _shipped(package: str, target: str, spec: Spec, folder: str) -> Mapping[str, Any]:
    return find_configs(table_path(package, target, folder), spec, folder)


def smaller_configs(
    package: str, target: str, spec: Spec, folder: str, kernel: str, config: KernelConfig
) -> tuple[KernelConfig, ...]:
    """Return the rows that serve the problem after its own, to try if `config` does not fit.

    A changed configuration has none. With `batch_invariant` a block keeps its number of keys.
    """
    rows = load_table(table_path(package, target, folder), folder)[kernel]
    own, *others = (_within_tiles(row.config, spec) for row in rows if row.serves(spec))
    if isinstance(spec, AttentionSpec | DecodeSpec) and spec.batch_invariant:
        others = [x for x in others if vars(x)["block_kv"] == vars(own)["block_kv"]]
    return tuple(others) if config == own else ()


def config_of_smaller_cards(
    package: str, target: str, spec: Spec, folder: str, kernel: str, config: KernelConfig
) -> KernelConfig:
    """Return the last row with the problem's key, known before anything is compiled."""
    rows = load_table(table_path(package, target, folder), folder)[kernel]
    own = next(row for row in rows if row.serves(spec))
    if config != _within_tiles(own.config, spec):  # `use_configs` changed it
        return config
    return [_within_tiles(row.config, spec) for row in rows if row.key == own.key][-1]


@contextmanager
def use_configs(
    configs: Mapping[str, Mapping[str, int]], package: str | None = None
) -> Iterator[set[str]]:
    """Run kernels with numbers other than the tables' inside the block.

    Blocks nest, and the inner one wins. The switch is process-wide, so that autograd's worker
    threads see it. A call of `pallas_attn` outside ``jax.jit`` follows it; a jitted function keeps
    the configurations under which it was traced. The numbers are not checked against the problem: a
    tile may be too large for the GPU.

    Args:
        configs: for each kernel the fields to change, such as ``{"flash_fwd": {"block_q": 64}}``. A
            family whose kernel lacks one of the fields keeps its own numbers.
        package: "torch_attn" or "pallas_attn" to change only one side.

    Yields:
        A set that fills with the names of the kernels whose configurations are looked up.

    Raises:
        ValueError: no such package, kernel or field.
    """
    global _changes, _read
    check_choice("package", package, PACKAGES)
    changes = []
    for kernel, numbers in configs.items():
        same_name = [kernels[kernel] for kernels in FAMILY_KERNELS.values() if kernel in kernels]
        _check_name("kernel", kernel, dict.fromkeys(chain.from_iterable(FAMILY_KERNELS.values())))
        fields = dict.fromkeys(chain.from_iterable(found.fields for found in same_name))
        for name in numbers:
            _check_name(f"field of {kernel}", name, fields)
        changes.append(Change(package, kernel, tuple(numbers.items())))
    read: set[str] = set()
    before = _changes, _read
    _changes, _read = (*_changes, *changes), (*_read, read)
    try:
        yield read
    finally:
        _changes, _read = before


def requested_configs() -> tuple[Change, ...]:
    return _changes


@contextmanager
def repeat_configs(changes: tuple[Change, ...]) -> Iterator[None]:
    """Apply exactly these changes, as to code that is traced after its caller ran."""
    global _changes
    before, _changes = _changes, changes
    try:
        yield
    finally:
        _changes = before


def _check_name(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        fail(ValueError, what, "one of " + ", ".join(map(repr, known)), repr(name))


@collector_paused()
def compile_to_fit(
    kernel: str,
    compile: Callable[[Any], Any],
    config: Any,
    target: str,
    limit: float,
    smaller: Callable[[], Iterable[Any]] = tuple,
) -> tuple[Any, Any]:
    """Compile a kernel, with fewer pipeline stages if shared memory is too small.

    Its memory depends on more than its table knows: if a compiler sees that a loop has one step,
    that step's tiles get buffers besides those of the next loop. Return the configuration that
    fits, and what was compiled.
    """
    others = None
    compiled = compile(config)
    while compiled.metadata.shared > limit:
        if config.num_stages > 1:
            config = replace(config, num_stages=config.num_stages - 1)
        else:
            others = iter(smaller()) if others is None else others
            following = next(others, None)
            if following is None:
                expected = f"at most {limit} bytes of shared memory on {target}"
                got = f"{compiled.metadata.shared} with {config}"
                fail(NotImplementedError, kernel, expected, got)
            config = following
        compiled = compile(config)
    return config, compiled
