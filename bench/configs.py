"""Running a package's kernels with other configurations than the shipped ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest import mock

from twin_attention.targets.config import KernelConfig, Spec

_ROOT = Path(__file__).parents[1]


def table_path(package: str, target: str) -> Path:
    """The file of a package's configurations for a target."""
    return _ROOT / package / "configs" / f"{target}.toml"


@contextmanager
def changed(package: str, changes: Mapping[str, Mapping[str, int]]) -> Iterator[set[str]]:
    """Change fields of kernels' configurations inside the block.

    `torch_attn` looks a configuration up at every launch, `pallas_attn` while it is traced.

    Args:
        package: "torch_attn" or "pallas_attn".
        changes: fields of `KernelConfig` by kernel.

    Yields:
        A set that fills with the names of the kernels whose configurations were looked up.
    """
    launch = import_module(f"{package}.launch")
    shipped, read = launch.configs_for, set()

    def configs_for(spec: Spec, target: str) -> dict[str, KernelConfig]:
        configs = shipped(spec, target)
        read.update(configs)
        return {name: replace(c, **changes.get(name, {})) for name, c in configs.items()}

    with mock.patch.object(launch, "configs_for", configs_for):
        yield read
